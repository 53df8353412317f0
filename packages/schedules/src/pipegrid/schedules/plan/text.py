"""Plans as text: a table to write by hand, read, diff and edit.

The text form has a header, then one line per position::

    microbatches 2
    modules enc:1 llm:1
    edges enc>llm
    placement 0 1
    0: 0F0 0SEND_F0>1 0F1 [0SEND_F1>1 0RECV_B0<1] ...
    1: 1RECV_F0<0 1F0 1B0 [1RECV_F1<0 1SEND_B0>0] ...

A header line may be left out where the table implies it: without ``modules`` the stages are a chain, without
``placement`` a stage lies where its actions are, without ``microbatches`` or ``slices`` the highest number counts.
``slices``, ``forward_only`` and ``group`` lines are written only where they differ from the default. ``#`` starts
a comment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from attrs import define, field

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import PlanError, PlanFieldError
from pipegrid.schedules.plan.actions import ALONE, Action, ActionKind
from pipegrid.schedules.plan.header import check_extent, expectation, module_graph
from pipegrid.schedules.plan.parts import Group, Step, chain
from pipegrid.schedules.plan.plan import Plan
from pipegrid.schedules.plan.tokens import Token, tokens
from pipegrid.topology.fields import shown

_POSITION = re.compile(r"\s*(\d+)\s*:", re.ASCII)
_MODULE_EDGE = re.compile(r'("(?:[^"\\]|\\.)*"|[^">]+)>("(?:[^"\\]|\\.)*"|[^">]+)')


def from_text(text: str) -> Plan:
    """Read a plan from its text form, written by `to_text` or by hand.

    Raises:
        PlanSyntaxError: line and column, what was found, what was expected.
        PlanError: the parts contradict each other, such as a placement that misses a stage; the line where known.
    """
    reader = Reader()
    for number, line in enumerate(lines_of(text), start=1):
        head = _POSITION.match(line)
        if head is None:
            reader.add_header(tokens(line, line_number=number))
        else:
            position = Token(head[1], number, head.start(1) + 1)
            reader.add_position(position, tokens(line, line_number=number, start=head.end()))
    return reader.plan(num_lines=text.count("\n") + 1)


def lines_of(text: Any) -> list[str]:
    """The lines of a written plan.

    Raises:
        PlanError: ``text`` is not a string.
    """
    if not isinstance(text, str):
        raise PlanError(f"text is {shown(text)}; give the plan's text itself, such as Path(...).read_text()")
    return text.splitlines()


# The header and the table, gathered token by token and then read as one plan

_ONCE = ("microbatches", "modules", "edges", "placement", "forward_only", "slices")


@define
class Reader:
    """The tokens of a written plan; ``num_stages`` and ``num_microbatches`` bound a table without a header."""

    num_stages: int | None = None
    num_microbatches: int | None = None
    header: dict[str, list[Token]] = field(factory=dict)  # by keyword, the tokens of its line, keyword first
    groups: list[list[Token]] = field(factory=list)
    rows: list[list[Step]] = field(factory=list)
    actions: list[list[tuple[Token, Action]]] = field(factory=list)  # per position

    def add_header(self, line: Iterable[Token]) -> None:
        """Take a line of the header; an empty one is skipped."""
        words = list(line)
        if not words:
            return
        key = words[0]
        if key.text == "group":
            self.groups.append(words)
            return
        if key.text not in _ONCE:
            raise key.error(f"a position such as '0:' or one of {', '.join(_ONCE)}, group")
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
                elif action.kind in ALONE:
                    raise word.error("a message or a collective; computes, sharding and offloads stay outside a batch")
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
        graph, count, slices = self._graph(), self._num_microbatches(), self._num_slices()
        declared = (count if "microbatches" in self.header else 0, slices if "slices" in self.header else 0)
        check_extent((action for _, action in self._all_actions()), graph, *declared)
        groups = [self._group(number, words) for number, words in enumerate(self.groups)]
        expected = expectation(graph, count, groups, slices)
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
            num_slices=slices,
        )

    def _all_actions(self) -> Iterator[tuple[Token, Action]]:
        for row in self.actions:
            yield from row

    def _num_microbatches(self) -> int:
        if "microbatches" not in self.header and self.num_microbatches is not None:
            return self.num_microbatches
        return self._declared("microbatch", "microbatches", lambda action: action.microbatch)

    def _num_slices(self) -> int:
        return self._declared("slice", "slices", lambda action: action.slice)

    def _declared(self, one: str, several: str, number: Callable[[Action], int | None]) -> int:
        """The count of a header line, or else the one that the table implies."""
        words = self.header.get(several)
        if words is None:
            return 1 + self._highest(one, number)
        if len(words) != 2:
            raise (words[2] if words[2:] else words[0].end()).error(f"one number after {several!r}")
        count = words[1].number(f"a number of {several}")
        if count < 1:
            raise words[1].error(f"at least 1 {one}")
        return count

    def _highest(self, what: str, number: Callable[[Action], int | None]) -> int:
        """The highest stage, microbatch or slice of the table; each takes an action, so a larger one is a mistake."""
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

    def _inferred_forward_only(self, graph: ModuleGraph) -> Sequence[int]:
        # A bare table without a single backward is an evaluation; one that lacks some of them is a mistake.
        backwards = (ActionKind.B, ActionKind.I, ActionKind.W)
        trains = any(action.kind in backwards for _, action in self._all_actions())
        return () if trains or "modules" in self.header else range(graph.num_stages)

    def _inferred_placement(self, graph: ModuleGraph) -> list[tuple[int, ...]]:
        """Each stage on the positions of its computes; several positions share a stage only if all do all of these.

        A stray action of a stage elsewhere is an error at its token, rather than a chain of errors that follow.
        """
        computes: list[dict[int, set[tuple[object, ...]]]] = [{} for _ in range(graph.num_stages)]
        for position, row in enumerate(self.actions):
            for _, action in row:
                if action.kind is ActionKind.COLLECTIVE:  # members of the group need not hold the stage
                    continue
                done = computes[action.stage].setdefault(position, set())
                if action.kind.is_compute:
                    done.add((action.kind is ActionKind.F, action.microbatch, action.slice))
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
