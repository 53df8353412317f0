"""Plans as text, a table to write by hand, read, diff and edit; and as CSV, for exchange with torch.

The text form has a header, then one line per position::

    microbatches 2
    modules enc:1 llm:1
    edges enc>llm
    placement 0 1
    0: 0F0 0SEND_F0>1 0F1 [0SEND_F1>1 0RECV_B0<1] ...
    1: 1RECV_F0<0 1F0 1B0 [1RECV_F1<0 1SEND_B0>0] ...

A header line may be left out where the table implies it: without ``modules`` the stages are a chain, without
``placement`` a stage lies where its actions are, without ``microbatches`` the highest number counts.
``forward_only``, ``group`` and ``create`` lines are written only where they differ from the default. ``#`` starts
a comment.

CSV has one row per position and one step per cell: torch.distributed.pipelining's format of compute-only schedules
(``0F0,1F0,...``). An empty cell is an idle slot. The header, where one is needed, comes first in lines of ``#:``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from attrs import define, field, frozen

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import PlanError, PlanFieldError, PlanSyntaxError
from pipegrid.schedules.plan.actions import Action, ActionKind, GroupName, parse_action
from pipegrid.schedules.plan.plan import (
    Group,
    Lane,
    Plan,
    Step,
    chain,
    default_creation,
    header_lines,
    require_plan,
    step_text,
)
from pipegrid.topology.fields import Count, checked, shown
from pipegrid.transport.edge import Direction, Edge


def from_text(text: str) -> Plan:
    """Read a plan from its text form, written by `to_text` or by hand.

    Raises:
        PlanSyntaxError: line and column, what was found, what was expected.
        PlanError: the parts contradict each other, such as a placement that misses a stage; the line where known.
    """
    reader = _Reader()
    for number, line in enumerate(_lines(text), start=1):
        head = _POSITION.match(line)
        if head is None:
            reader.add_header(tokens(line, line_number=number))
        else:
            position = Token(head[1], number, head.start(1) + 1)
            reader.add_position(position, tokens(line, line_number=number, start=head.end()))
    return reader.plan(num_lines=text.count("\n") + 1)


def to_csv(plan: Plan) -> str:
    """The plan as CSV; `from_csv` reads it back to an equal plan, and torch reads the computes of a chain.

    Raises:
        PlanError: ``plan`` is not a `Plan`.
    """
    require_plan(plan)
    rows = [",".join(map(step_text, steps)) or "," for steps in plan.positions]  # "," is a row of idle slots
    header = [] if _is_implied_by_its_table(plan) else [f"#: {line}" for line in header_lines(plan)]
    return "\n".join([*header, *rows]) + "\n"


def from_csv(text: str, *, num_microbatches: int | None = None, num_stages: int | None = None) -> Plan:
    """Read CSV, one row per position, written by `to_csv` or by torch.

    ``num_microbatches`` and ``num_stages`` (of a chain) bound the table; by default the table implies them. torch's
    ``(4F5;3B0)OVERLAP_F_B`` is read as the two computes one after the other.

    Raises:
        PlanSyntaxError: line and column, what was found, what was expected.
        PlanError: the parts contradict each other; the line where known.
    """
    for name, size in (("num_microbatches", num_microbatches), ("num_stages", num_stages)):
        checked(size, Count | None, name, PlanError)
    reader = _Reader(num_stages=num_stages, num_microbatches=num_microbatches)
    lines = _lines(text)
    while lines and not lines[-1].strip():
        lines.pop()  # an empty line in the middle is a position that does nothing; at the end it is no row
    for number, line in enumerate(lines, start=1):
        if line.startswith("#:"):
            reader.add_header(tokens(line, line_number=number, start=2))
        elif not line.startswith("#"):
            reader.add_position(Token(str(len(reader.rows)), number, 1), _cells(line, number))
    return reader.plan(num_lines=len(lines) + 1)


def _lines(text: Any) -> list[str]:
    if not isinstance(text, str):
        raise PlanError(f"text is {shown(text)}; give the plan's text itself, such as Path(...).read_text()")
    return text.splitlines()


def _is_implied_by_its_table(plan: Plan) -> bool:
    """Whether the table of steps alone reads back to ``plan``: a chain in which every stage acts at home."""
    count, stages = plan.num_microbatches, plan.num_stages
    trains = False
    forwards = set()
    for position, steps in enumerate(plan.positions):
        for action in steps:
            if not isinstance(action, Action) or not action.kind.is_compute or action.stage >= stages:
                return False
            if plan.placement[action.stage] != (position,) or (action.microbatch or 0) >= count:
                return False
            if action.kind is ActionKind.F:
                forwards.add((action.stage, action.microbatch))
            trains = trains or action.kind is not ActionKind.F
    return (
        plan.graph == chain(stages)
        and len(forwards) == stages * count
        and plan.forward_only == (() if trains else tuple(range(stages)))
        and not plan.groups
        and plan.creation == default_creation(plan)
    )


# Tokens


@frozen
class Token:
    """A piece of the text and its place; ``called`` names it in errors where its text does not."""

    text: str
    line: int
    column: int
    called: str = ""

    def error(self, expected: str) -> PlanSyntaxError:
        """The error for this token where ``expected`` should be."""
        found = self.called or repr(self.text)
        return PlanSyntaxError(line=self.line, column=self.column, found=found, expected=expected)

    def within(self, text: str, offset: int) -> Token:
        """A part of this token."""
        return Token(text, self.line, self.column + offset)

    def parts(self) -> Iterator[Token]:
        """The parts between commas."""
        offset = 0
        for text in self.text.split(","):
            yield self.within(text, offset)
            offset += len(text) + 1

    def end(self) -> Token:
        """The end of a line whose last token is this one."""
        return Token("", self.line, self.column + len(self.text), "the end of the line")

    def number(self, what: str) -> int:
        """This token as a number from 0."""
        if _NUMBER.fullmatch(self.text) is None:
            raise self.error(f"{what}, an integer from 0 of at most 9 digits")
        return int(self.text)

    def numbers(self, what: str) -> tuple[int, ...]:
        """This token as numbers between commas."""
        return tuple(part.number(what) for part in self.parts())

    def edges(self) -> tuple[Edge, ...]:
        """This token as edges between commas."""
        found = []
        for part in self.parts():
            try:
                found.append(parse_edge(part.text))
            except PlanError as error:
                raise part.error(str(error)) from None
        return tuple(found)

    def name(self, text: str) -> str:
        """``text``, a part of this token, as the name of a module: plain, or in double quotes."""
        if not text.startswith('"'):
            return text
        try:
            return str(json.loads(text))
        except json.JSONDecodeError:
            raise self.error("a name in double quotes, as JSON writes it") from None

    def group_name(self) -> str:
        """This token as the name of a group."""
        name: str = checked(self.text, GroupName, "", lambda text: self.error(text.partition("must be ")[2]))
        return name

    def action(self) -> Action:
        """This token as an action."""
        try:
            return parse_action(self.text)
        except PlanError as error:
            raise self.error(f"an action ({error})") from None


_TOKEN = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^\s#"])+|#.*')
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_POSITION = re.compile(r"\s*(\d+)\s*:", re.ASCII)
_EDGE = re.compile(r"(\d{1,9})>(\d{1,9})", re.ASCII)
_LANE = re.compile(r"([FB])(\d{1,9})>(\d{1,9})", re.ASCII)
_MODULE_EDGE = re.compile(r'("(?:[^"\\]|\\.)*"|[^">]+)>("(?:[^"\\]|\\.)*"|[^">]+)')
_OVERLAP = re.compile(r"\s*\(\s*([^;()\s]+)\s*;\s*([^;()\s]+)\s*\)\s*OVERLAP_F_B\s*")


def tokens(line: str, *, line_number: int, start: int = 0) -> Iterator[Token]:
    """The tokens of a line from ``start`` on, up to a comment; a name in double quotes may hold spaces."""
    at = start
    while at < len(line):
        if line[at].isspace():
            at += 1
            continue
        match = _TOKEN.match(line, at)
        if match is None:
            raise Token(line[at:], line_number, at + 1).error('the closing " of the name')
        if match[0].startswith("#"):
            return
        yield Token(match[0], line_number, at + 1)
        at = match.end()


def _cells(line: str, line_number: int) -> Iterator[Token]:
    """The tokens of a row of CSV."""
    column = 1
    for cell in line.split(","):
        pair = _OVERLAP.fullmatch(cell)
        if pair is not None:
            for part in (1, 2):
                yield Token(pair[part], line_number, column + pair.start(part))
        elif "OVERLAP" in cell:
            start = len(cell) - len(cell.lstrip())
            raise Token(cell.strip(), line_number, column + start).error(
                "a cell of its own for each step; a pair is written (4F5;3B0)OVERLAP_F_B"
            )
        else:
            for match in re.finditer(r"\S+", cell):
                yield Token(match[0], line_number, column + match.start())
        column += len(cell) + 1


def parse_edge(text: str) -> Edge:
    """An edge between stages such as ``1>2``.

    Raises:
        PlanError: another form, or an edge that does not ascend.
    """
    match = _EDGE.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise PlanError(f"an edge between stages, such as 1>2, not {text!r}")
    return Edge(int(match[1]), int(match[2]))


def parse_creation(text: str) -> Lane | str:
    """A lane such as ``F0>1``, or ``text`` as the name of a group."""
    match = _LANE.fullmatch(text)
    return text if match is None else Lane(int(match[2]), int(match[3]), Direction(match[1]))


# The header and the table, gathered token by token and then read as one plan

_ONCE = ("microbatches", "modules", "edges", "placement", "forward_only")
_EACH = ("group", "create")


@define
class _Reader:
    """The tokens of a written plan; ``num_stages`` and ``num_microbatches`` bound a table without a header."""

    num_stages: int | None = None
    num_microbatches: int | None = None
    header: dict[str, list[Token]] = field(factory=dict)  # by keyword, the tokens of its line, keyword first
    groups: list[list[Token]] = field(factory=list)
    creation: list[list[Token]] = field(factory=list)
    rows: list[list[Step]] = field(factory=list)
    actions: list[list[tuple[Token, Action]]] = field(factory=list)  # per position

    def add_header(self, line: Iterable[Token]) -> None:
        """Take a line of the header; an empty one is skipped."""
        words = list(line)
        if not words:
            return
        key = words[0]
        if key.text in _EACH:
            (self.groups if key.text == "group" else self.creation).append(words)
            return
        if key.text not in _ONCE:
            raise key.error(f"a position such as '0:' or one of {', '.join(_ONCE + _EACH)}")
        first = self.header.setdefault(key.text, words)[0]
        if first is not key:
            raise key.error(f"no second {key.text!r} line; the first is line {first.line}")

    def add_position(self, head: Token, line: Iterable[Token]) -> None:
        """Read the steps of a position; ``head`` is its number."""
        position = head.number("a position")
        if position < len(self.rows):
            raise head.error(f"one line for position {position}; the table has another one above")
        if position != len(self.rows):
            raise head.error(f"position {len(self.rows)}; positions are written in order from 0")
        steps, found = list[Step](), list[tuple[Token, Action]]()
        self.rows.append(steps)
        self.actions.append(found)
        batch: list[Action] | None = None
        opened = head
        for token in line:
            text, offset = token.text, 0
            if text.startswith("["):
                if batch is not None:
                    raise token.error("']' first: a batch does not hold another")
                batch, opened, text, offset = [], token, text[1:], 1
            closes = text.endswith("]")
            text = text[:-1] if closes else text
            if closes and batch is None:
                raise token.error("'[' before ']'")
            if text:
                word = token if text == token.text else token.within(text, offset)
                action = word.action()
                found.append((word, action))
                if batch is None:
                    steps.append(action)
                elif action.kind.is_compute:
                    raise word.error("a communication; computes stay outside a batch")
                else:
                    batch.append(action)
            if closes and batch is not None:
                if not batch:
                    raise opened.error("communications between '[' and ']'")
                steps.append(batch[0] if len(batch) == 1 else tuple(batch))
                batch = None
        if batch is not None:
            raise opened.error("']' at the end of the batch")

    def plan(self, *, num_lines: int) -> Plan:
        """The plan; ``num_lines`` is the line on which the text ends."""
        end = Token("", num_lines, 1, "the end")
        if not self.rows:
            raise end.error("a position, '0: ...'")
        if not any(self.actions):
            raise end.error("an action; no position does anything")
        try:
            return self._plan()
        except PlanFieldError as error:
            line = self._line_of(error.path)
            raise error if line is None else PlanFieldError(f"line {line}: {error}", path=error.path) from None

    def _line_of(self, path: str) -> int | None:
        part, _, rest = path.partition("[")
        if part == "groups":
            return self.groups[int(rest.partition("]")[0])][0].line
        return self.header[part][0].line if part in self.header else None

    def _plan(self) -> Plan:
        graph, count = self._graph(), self._num_microbatches()
        declared = count if "microbatches" in self.header else 0
        check_extent((action for _, action in self._all_actions()), graph, declared)
        groups = [self._group(number, words) for number, words in enumerate(self.groups)]
        expected = expectation(graph, count, groups)
        for token, action in self._all_actions():
            if (instead := expected(action)) is not None:
                raise token.error(instead)
        header = self.header
        return Plan(
            positions=self.rows,
            graph=graph,
            placement=[word.numbers("a position") for word in header["placement"][1:]]
            if "placement" in header
            else self._inferred_placement(graph),
            num_microbatches=count,
            forward_only=[stage for word in header["forward_only"][1:] for stage in word.numbers("a stage")]
            if "forward_only" in header
            else self._inferred_forward_only(graph),
            groups=groups,
            creation=self._creation() if self.creation else None,
        )

    def _all_actions(self) -> Iterator[tuple[Token, Action]]:
        for row in self.actions:
            yield from row

    def _num_microbatches(self) -> int:
        words = self.header.get("microbatches")
        if words is None and self.num_microbatches is not None:
            return self.num_microbatches
        if words is None:
            return 1 + self._highest("microbatch", lambda action: action.microbatch)
        if len(words) != 2:
            raise (words[2] if words[2:] else words[0].end()).error("one number after 'microbatches'")
        count = words[1].number("a number of microbatches")
        if count < 1:
            raise words[1].error("at least 1 microbatch")
        return count

    def _highest(self, what: str, number: Callable[[Action], int | None]) -> int:
        """The highest stage or microbatch of the table; each takes an action, so a larger number is a mistake."""
        count, highest = sum(map(len, self.actions)), 0
        for token, action in self._all_actions():
            highest = max(highest, number(action) or 0)
            if highest >= count:
                raise token.error(f"a {what} below {count}, the number of actions in the table")
        return highest

    def _graph(self) -> ModuleGraph:
        words, edges = self.header.get("modules"), self.header.get("edges")
        if words is None:
            if edges is not None:
                raise (edges[1] if edges[1:] else edges[0]).error("a 'modules' line that declares what the edges join")
            return chain(self.num_stages or 1 + self._highest("stage", lambda action: action.stage))
        return module_graph(list(_modules(words)), list(_module_edges(edges or [])))

    def _group(self, number: int, words: list[Token]) -> Group:
        if len(words) < 3 or len(words) % 2 == 0:
            raise (
                words[-1]
                .end()
                .error("a name and positions after 'group', such as: group bridge 0,3 edges 1>2 tied 0,3")
            )
        parts: dict[str, Any] = {}
        for word, value in zip(words[3::2], words[4::2], strict=True):
            if word.text in parts or word.text not in ("edges", "tied"):
                raise word.error("'edges' or 'tied', once")
            parts[word.text] = value.edges() if word.text == "edges" else value.numbers("a stage")
        try:
            return Group(words[1].group_name(), words[2].numbers("a position"), **parts)
        except PlanFieldError as error:
            raise PlanFieldError(str(error), path=f"groups[{number}].{error.path}") from None

    def _creation(self) -> list[list[Lane | str]]:
        orders: dict[int, list[Lane | str]] = {}
        for words in self.creation:
            if len(words) == 1:
                raise words[0].end().error("a position, then groups and lanes after 'create'")
            position = words[1].number("a position")
            if position in orders:
                raise words[1].error(f"one 'create' line for position {position}")
            if position >= len(self.rows):
                raise words[1].error(f"a position in 0..{len(self.rows) - 1}")
            orders[position] = [
                name if isinstance(name := parse_creation(word.text), Lane) else word.group_name() for word in words[2:]
            ]
        return [orders.get(position, []) for position in range(len(self.rows))]

    def _inferred_forward_only(self, graph: ModuleGraph) -> Sequence[int]:
        # A bare table without a single backward is an evaluation; one that lacks some of them is a mistake.
        backwards = (ActionKind.B, ActionKind.I, ActionKind.W)
        trains = any(action.kind in backwards for _, action in self._all_actions())
        return () if trains or "modules" in self.header else range(graph.num_stages)

    def _inferred_placement(self, graph: ModuleGraph) -> list[tuple[int, ...]]:
        """Each stage on the positions of its computes; several positions share a stage only if all do all of these.

        A stray action of a stage elsewhere is an error at its token, rather than a chain of errors that follow.
        """
        computes: list[dict[int, set[tuple[bool, int | None]]]] = [{} for _ in range(graph.num_stages)]
        for position, row in enumerate(self.actions):
            for _, action in row:
                if action.kind is ActionKind.COLLECTIVE:  # members of the group need not hold the stage
                    continue
                done = computes[action.stage].setdefault(position, set())
                if action.kind.is_compute:
                    done.add((action.kind is ActionKind.F, action.microbatch))
        placement = []
        for stage, by_position in enumerate(computes):
            if not by_position:
                found = list(self._all_actions())
                after = next((token for token, action in found if action.stage > stage), found[-1][0])
                raise after.error(f"actions of stage {stage} too, which the table lacks, or a 'placement' line")
            most = max(by_position.values(), key=len)
            for position, done in by_position.items():
                if done != most:
                    stray = next(token for token, action in self.actions[position] if action.stage == stage)
                    home = next(p for p, others in by_position.items() if others == most)
                    raise stray.error(
                        f"a stage of position {position}; stage {stage} has {len(most)} computes on position {home} "
                        f"and {len(done)} here; or a 'placement' line that allows it"
                    )
            placement.append(tuple(by_position))
        return placement


def _modules(words: Sequence[Token]) -> Iterator[tuple[str, int]]:
    if len(words) == 1:
        raise words[0].end().error("modules as name:depth after 'modules'")
    for word in words[1:]:
        name, _, depth = word.text.rpartition(":")
        if not name:
            raise word.error("a module as name:depth, such as model:4")
        number = word.within(depth, len(name) + 1)
        if number.number("a depth") < 1:
            raise number.error("a depth of at least 1")
        yield word.name(name), int(depth)


def _module_edges(words: Sequence[Token]) -> Iterator[tuple[str, str]]:
    if len(words) == 1:
        raise words[0].end().error("edges between modules as source>destination after 'edges'")
    for word in words[1:]:
        parts = _MODULE_EDGE.fullmatch(word.text)
        if parts is None:
            raise word.error("an edge between modules as source>destination, such as enc>llm")
        yield word.name(parts[1]), word.name(parts[2])


# What a table must be to its header, in every written form


def module_graph(modules: Sequence[tuple[str, int]], edges: Sequence[tuple[str, str]]) -> ModuleGraph:
    """The graph of ``modules`` and ``edges``.

    Raises:
        PlanFieldError: they form no graph.
    """
    path = "modules"
    try:
        ModuleGraph(modules)
        path = "edges"
        return ModuleGraph(modules, edges)
    except ValueError as error:
        raise PlanFieldError(str(error), path=path) from None


def check_extent(actions: Iterable[Action], graph: ModuleGraph, num_microbatches: int) -> None:
    """Check the stages and microbatches declared against a table, in which each of them acts.

    A count that is far too large is found here, before anything of that size is made.

    Raises:
        PlanFieldError: more stages or microbatches than the table has.
    """
    stages = microbatches = 0
    for action in actions:
        stages = max(stages, action.stage + 1)
        microbatches = max(microbatches, (action.microbatch or 0) + 1)
    if num_microbatches > microbatches:
        raise PlanFieldError(
            f"{num_microbatches} microbatches are declared and the table has {microbatches}", path="microbatches"
        )
    if graph.num_stages > stages:
        declared = ", ".join(f"{name}:{depth}" for name, depth in graph.modules)
        raise PlanFieldError(
            f"{graph.num_stages} stages are declared ({declared}) and the table has {stages}", path="modules"
        )


def expectation(graph: ModuleGraph, num_microbatches: int, groups: Sequence[Group]) -> Callable[[Action], str | None]:
    """A function from an action to the text of what is expected in its place; None for an action the plan can have."""
    stages, edges, names = graph.num_stages, frozenset(graph.stage_edges), {group.name for group in groups}

    def expected(action: Action) -> str | None:
        if action.stage >= stages:
            return f"a stage in 0..{stages - 1}"
        if action.microbatch is not None and action.microbatch >= num_microbatches:
            return f"a microbatch in 0..{num_microbatches - 1}"
        if action.edge is not None and action.edge not in edges:
            known = [str(e) for e in graph.stage_edges if action.stage in (e.source, e.destination)]
            return f"an edge of the graph; stage {action.stage} has {', '.join(known) or 'none'}"
        if action.group is not None and action.group not in names:
            return f"a declared group; known: {', '.join(sorted(names)) or 'none'}"
        return None

    return expected
