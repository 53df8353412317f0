"""Reading a plan from a table of tokens, with the place of each token at hand for errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import Any

from attrs import define, field, frozen

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.actions import Action, ActionKind, parse_action
from pipegrid.schedules.errors import PlanError, PlanSyntaxError
from pipegrid.schedules.plan import Group, Lane, Plan, Step, actions_of, chain
from pipegrid.transport.edge import Direction, Edge

_WORD = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^\s#"])+|#.*')
_LANE = re.compile(r"([FB])(\d{1,9})>(\d{1,9})", re.ASCII)
_EDGE = re.compile(r"(\d{1,9})>(\d{1,9})", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


@frozen
class Word:
    """A piece of the text, and where it starts."""

    text: str
    line: int
    column: int

    def error(self, expected: str) -> PlanSyntaxError:
        """The error that something else was expected here."""
        return PlanSyntaxError(line=self.line, column=self.column, found=repr(self.text), expected=expected)

    def within(self, text: str, offset: int) -> Word:
        """A part of this word."""
        return Word(text, self.line, self.column + offset)


def words(line: str, *, line_number: int, start: int = 0) -> Iterator[Word]:
    """The words of a line from ``start`` on, up to a comment; a name in double quotes may hold spaces."""
    at = start
    while at < len(line):
        if line[at].isspace():
            at += 1
            continue
        match = _WORD.match(line, at)
        if match is None:
            raise Word(line[at:], line_number, at + 1).error('the closing " of the name')
        if match[0].startswith("#"):
            return
        yield Word(match[0], line_number, at + 1)
        at = match.end()


@define
class PlanReader:
    """Gathers header and rows in any order, then checks them against each other with places at hand."""

    num_microbatches: int | None = None
    graph: ModuleGraph | None = None
    modules: list[tuple[str, int]] | None = None
    edges: list[tuple[str, str]] = field(factory=list)
    placement: list[tuple[int, ...]] | None = None
    forward_only: list[int] = field(factory=list)
    groups: list[Group] = field(factory=list)
    creation: dict[int, list[Lane | str]] = field(factory=dict)
    rows: dict[int, list[Step]] = field(factory=dict)
    places: dict[int, list[list[Word]]] = field(factory=dict)
    seen: dict[str, Word] = field(factory=dict)

    def header(self, words: Iterable[Word]) -> None:
        """Read a header line."""
        line = list(words)
        if not line:
            return
        key, *values = line
        readers: dict[str, Callable[[Word, list[Word]], None]] = {
            "microbatches": self._read_microbatches,
            "modules": self._read_modules,
            "edges": self._read_edges,
            "placement": self._read_placement,
            "forward_only": self._read_forward_only,
            "group": self._read_group,
            "create": self._read_creation,
        }
        if key.text not in readers:
            raise key.error(f"a position such as '0:' or one of {', '.join(readers)}")
        if key.text in self.seen and key.text not in ("group", "create"):
            raise key.error(f"no second {key.text!r} line; the first is line {self.seen[key.text].line}")
        self.seen[key.text] = key
        readers[key.text](key, values)

    def _read_microbatches(self, key: Word, values: list[Word]) -> None:
        if len(values) != 1:
            raise key.error("one number after 'microbatches'")
        count = _number(values[0], "a number of microbatches")
        if count < 1:
            raise values[0].error("at least 1 microbatch")
        self.num_microbatches = count

    def _read_modules(self, key: Word, values: list[Word]) -> None:
        if not values:
            raise key.error("modules as name:depth after 'modules'")
        self.modules = []
        for word in values:
            name, _, depth = word.text.rpartition(":")
            if not name:
                raise word.error("a module as name:depth, such as model:4")
            offset = len(name) + 1
            self.modules.append((_name(word, name), _number(word.within(depth, offset), "a depth")))

    def _read_edges(self, key: Word, values: list[Word]) -> None:
        if not values:
            raise key.error("edges between modules as source>destination after 'edges'")
        for word in values:
            parts = re.fullmatch(r'("(?:[^"\\]|\\.)*"|[^">]+)>("(?:[^"\\]|\\.)*"|[^">]+)', word.text)
            if parts is None:
                raise word.error("an edge between modules as source>destination, such as enc>llm")
            self.edges.append((_name(word, parts[1]), _name(word, parts[2])))

    def _read_placement(self, key: Word, values: list[Word]) -> None:
        if not values:
            raise key.error("the position (or positions, 0,1) of each stage after 'placement'")
        self.placement = [_numbers(word, "positions such as 0 or 0,1") for word in values]

    def _read_forward_only(self, key: Word, values: list[Word]) -> None:
        del key
        self.forward_only = [_number(word, "a stage") for word in values]

    def _read_group(self, key: Word, values: list[Word]) -> None:
        if len(values) < 2 or len(values) % 2:
            raise key.error("a name and positions after 'group', such as: group bridge 0,3 edges 1>2 tied 0,3")
        parts: dict[str, Any] = {"positions": _numbers(values[1], "positions such as 0,3")}
        for word, value in zip(values[2::2], values[3::2], strict=True):
            if word.text in parts or word.text not in ("edges", "tied"):
                raise word.error("'edges' or 'tied', once")
            if word.text == "edges":
                parts["edges"] = [_edge(value, text) for text in value.text.split(",")]
            else:
                parts["tied"] = _numbers(value, "stages such as 0,3")
        try:
            self.groups.append(Group(values[0].text, **parts))
        except PlanError as error:
            raise values[0].error(str(error)) from None

    def _read_creation(self, key: Word, values: list[Word]) -> None:
        if not values:
            raise key.error("a position, then groups and lanes after 'create'")
        position = _number(values[0], "a position")
        if position in self.creation:
            raise values[0].error(f"one 'create' line for position {position}")
        self.creation[position] = [parse_creation(word.text) for word in values[1:]]

    def position(self, head: Word, words: Iterable[Word]) -> None:
        """Read the steps of a position; ``head`` is its number."""
        position = _number(head, "a position")
        if position in self.rows:
            raise head.error(f"one line for position {position}; the table has another one above")
        if position != len(self.rows):
            raise head.error(f"position {len(self.rows)}; positions are written in order from 0")
        steps, places = self.rows.setdefault(position, []), self.places.setdefault(position, [])
        batch: list[Action] | None = None
        opened = head
        for word in words:
            text, offset = word.text, 0
            if text.startswith("["):
                if batch is not None:
                    raise word.error("']' first: a batch does not hold another")
                batch, opened, text, offset = [], word, text[1:], 1
                places.append([])
            closes = text.endswith("]")
            text = text[:-1] if closes else text
            if closes and batch is None:
                raise word.error("'[' before ']'")
            if text:
                token = word.within(text, offset)
                action = _action(token)
                if batch is None:
                    steps.append(action)
                    places.append([token])
                else:
                    batch.append(action)
                    places[-1].append(token)
            if closes and batch is not None:
                if not batch:
                    raise opened.error("communications between '[' and ']'")
                for action, token in zip(batch, places[-1], strict=True):
                    if action.kind.is_compute:
                        raise token.error("a communication; computes stand alone, outside a batch")
                steps.append(batch[0] if len(batch) == 1 else tuple(batch))
                batch = None
        if batch is not None:
            raise opened.error("']' at the end of the batch")

    def plan(self, *, num_lines: int) -> Plan:
        """The plan, checked against what the header says; ``num_lines`` is where the text ends."""
        if not self.rows:
            raise PlanSyntaxError(line=num_lines, column=1, found="the end", expected="a position, '0: ...'")
        graph = self._graph()
        count = self.num_microbatches
        if count is None:
            count = self._highest(lambda action: action.microbatch, "microbatch") + 1
        edges = frozenset(graph.stage_edges)
        names = {group.name for group in self.groups}
        for token, action in self._tokens():
            try:
                check_action(action, graph=graph, edges=edges, num_microbatches=count, groups=names)
            except PlanError as error:
                raise token.error(str(error)) from None
        placement = self.placement if self.placement is not None else self._inferred_placement(graph)
        creation = None
        if self.creation:
            creation = [self.creation.get(position, []) for position in range(len(self.rows))]
            for position in self.creation:
                if position not in self.rows:
                    raise self.seen["create"].error(f"positions in 0..{len(self.rows) - 1}")
        try:
            return Plan(
                positions=[self.rows[position] for position in range(len(self.rows))],
                graph=graph,
                placement=placement,
                num_microbatches=count,
                forward_only=self._forward_only(graph),
                groups=self.groups,
                creation=creation,
            )
        except PlanError as error:
            for key, word in (("placement", "place"), ("group", "group"), ("forward_only", "forward_only")):
                if key in self.seen and word in str(error):
                    raise self.seen[key].error(str(error)) from None
            raise

    def _tokens(self) -> Iterator[tuple[Word, Action]]:
        for position, steps in self.rows.items():
            for words, step in zip(self.places[position], steps, strict=True):
                yield from zip(words, actions_of(step), strict=True)

    def _graph(self) -> ModuleGraph:
        if self.modules is not None:
            try:
                return ModuleGraph(self.modules, self.edges)
            except ValueError as error:
                raise self.seen["edges" if self.edges else "modules"].error(str(error)) from None
        if self.edges:
            raise self.seen["edges"].error("a 'modules' line that declares what the edges join")
        if self.graph is not None:
            return self.graph
        return chain(self._highest(lambda action: action.stage, "stage") + 1)

    def _highest(self, number: Callable[[Action], int | None], what: str) -> int:
        """The highest number in the table, which cannot exceed the number of its actions."""
        tokens = list(self._tokens())
        highest = 0
        for token, action in tokens:
            found = number(action)
            if found is not None and found >= len(tokens):
                raise token.error(f"a {what} below {len(tokens)}, the number of actions in the table")
            highest = max(highest, found or 0)
        return highest

    def _inferred_placement(self, graph: ModuleGraph) -> list[tuple[int, ...]]:
        found: list[set[int]] = [set() for _ in range(graph.num_stages)]
        for position, steps in self.rows.items():
            for step in steps:
                for action in actions_of(step):
                    found[action.stage].add(position)
        for stage, positions in enumerate(found):
            if not positions:
                raise PlanSyntaxError(
                    line=1,
                    column=1,
                    found=f"no action of stage {stage}",
                    expected=f"actions of all stages 0..{graph.num_stages - 1}, or a 'placement' line",
                )
        return [tuple(sorted(positions)) for positions in found]

    def _forward_only(self, graph: ModuleGraph) -> Sequence[int]:
        if "forward_only" in self.seen:
            return self.forward_only
        # A bare table without a single backward is an evaluation; one that lacks some of them is a mistake.
        backwards = (ActionKind.B, ActionKind.I, ActionKind.W)
        trains = any(action.kind in backwards for _, action in self._tokens())
        return () if trains or "modules" in self.seen else range(graph.num_stages)


def parse_edge(text: str) -> Edge:
    """An edge between stages such as ``1>2``.

    Raises:
        PlanError: it is not written so, or does not ascend.
    """
    match = _EDGE.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise PlanError(f"an edge between stages, such as 1>2, not {text!r}")
    return Edge(int(match[1]), int(match[2]))


def _edge(word: Word, text: str) -> Edge:
    try:
        return parse_edge(text)
    except PlanError as error:
        raise word.error(str(error)) from None


def parse_creation(text: str) -> Lane | str:
    """A lane such as ``F0>1``, or the name of a group."""
    match = _LANE.fullmatch(text)
    return text if match is None else Lane(int(match[2]), int(match[3]), Direction(match[1]))


def _action(word: Word) -> Action:
    try:
        return parse_action(word.text)
    except PlanError as error:
        raise word.error(f"an action ({error})") from None


def check_action(
    action: Action,
    *,
    graph: ModuleGraph,
    edges: Container[Edge],
    num_microbatches: int,
    groups: Collection[str],
) -> None:
    """Refuse what cannot be meant: a stage, microbatch, edge or group that the plan does not have.

    Raises:
        PlanError: says what would be right.
    """
    if action.stage >= graph.num_stages:
        raise PlanError(f"a stage in 0..{graph.num_stages - 1}")
    if action.microbatch is not None and action.microbatch >= num_microbatches:
        raise PlanError(f"a microbatch in 0..{num_microbatches - 1}")
    if action.edge is not None and action.edge not in edges:
        known = [str(e) for e in graph.stage_edges if action.stage in (e.source, e.destination)]
        raise PlanError(f"an edge of the graph; stage {action.stage} has {', '.join(known) or 'none'}")
    if action.group is not None and action.group not in groups:
        raise PlanError(f"a declared group; known: {', '.join(sorted(groups)) or 'none'}")


def _name(word: Word, text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        name: Any = json.loads(text)
    except json.JSONDecodeError:
        raise word.error("a name in double quotes, as JSON writes it") from None
    return str(name)


def _number(word: Word, what: str) -> int:
    if _NUMBER.fullmatch(word.text) is None:
        raise word.error(f"{what}, an integer from 0 of at most 9 digits")
    return int(word.text)


def _numbers(word: Word, what: str) -> tuple[int, ...]:
    parts = word.text.split(",")
    if not all(_NUMBER.fullmatch(part) for part in parts):
        raise word.error(what)
    return tuple(int(part) for part in parts)
