"""Plans as text: a table to write by hand, read, diff and edit.

The text form has a header, then one line per position::

    microbatches 2
    modules enc:1 llm:1
    edges enc>llm
    placement 0 1
    0: 0F0 0SEND_F0>1 0F1 [0SEND_F1>1 0RECV_B0<1] ...
    1: 1RECV_F0<0 1F0 1B0 [1RECV_F1<0 1SEND_B0>0] ...

A batch of messages is in brackets, a pair of computes is ``(3F7;1B4)``. A header line may be left out where the table
implies it: without ``modules`` the stages are a chain, without ``placement`` a stage lies where its computes are,
without ``microbatches`` or ``slices`` the highest number counts. ``slices``, ``forward_only`` and ``group`` lines are
written only where they differ from the default. With routes (`routes_text`) a position is an actor, a microbatch a
unit, and the line ``placement`` is needed. ``#`` starts a comment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from attrs import define, field

from pipegrid.core.edge import Edge
from pipegrid.core.fields import checked
from pipegrid.core.graph import ModuleGraph, chain
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan.actions import Action, ActionKind
from pipegrid.plans.plan.parts import QUOTED, Group, Step, Text, Token, as_step, parse_edge, read_name
from pipegrid.plans.plan.plan import Plan, require_placed
from pipegrid.plans.plan.routes_text import LINES as ROUTE_LINES
from pipegrid.plans.plan.routes_text import RoutesReader

_POSITION = re.compile(r"\s*(\d{1,9})\s*:", re.ASCII)


def from_text(text: str) -> Plan:
    """Read a plan from its text form, written by `to_text` or by hand.

    Raises:
        PlanSyntaxError: line and column, what was found, what was expected.
        PlanError: the parts contradict each other, such as a placement that misses a stage; the line where known.

    Examples:
        >>> from_text(to_text(one_f_one_b(2, 4))) == one_f_one_b(2, 4)
        True
    """
    reader = Reader()
    lines = checked(text, Text, "text", PlanError).splitlines()
    for number, line in enumerate(lines, start=1):
        head = _POSITION.match(line)
        if head is None:
            reader.add_header(Token(line, number, 1))
            continue
        if int(head[1]) != len(reader.rows):
            position = Token(head[1], number, head.start(1) + 1)
            raise position.error(f"position {len(reader.rows)}; positions are written in order from 0, each once")
        reader.add_position(Token(line[head.end() :].partition("#")[0], number, head.end() + 1).steps())
    return reader.plan(num_lines=len(lines) + 1)


_NUMBERS = r"\d{1,9}(?:,\d{1,9})*"
_COUNT = r"(?=\d{1,9}$)\d*[1-9]\d*"
_EDGES = r"\d{1,9}>\d{1,9}(?:,\d{1,9}>\d{1,9})*"
_MODULE = re.compile(rf'({QUOTED}|[^"]+):({_COUNT})', re.ASCII)
_MODULE_EDGE = re.compile(rf'({QUOTED}|[^">]+)>({QUOTED}|[^">]+)')
_WORDS = {  # per line of the header: the form of its words, and how an error describes them
    "microbatches": (re.compile(_COUNT, re.ASCII), "one number of at least 1 and at most 9 digits"),
    "slices": (re.compile(_COUNT, re.ASCII), "one number of at least 1 and at most 9 digits"),
    "modules": (_MODULE, "modules as name:depth, such as model:4"),
    "edges": (_MODULE_EDGE, "edges between modules as source>destination, such as enc>llm"),
    "skips": (re.compile(_EDGES, re.ASCII), "edges between stages as source>destination, such as 0>2"),
    "placement": (re.compile(_NUMBERS, re.ASCII), "the position of each stage, several as 0,1"),
    "forward_only": (re.compile(_NUMBERS, re.ASCII), "stages, such as 0 1"),
}
_GROUP = re.compile(
    rf"group (?P<name>\S+) (?P<positions>{_NUMBERS})"
    r"(?!.* (?P<part>edges|tied) .* (?P=part) )"  # neither comes twice
    rf"(?: edges (?P<edges>{_EDGES})| tied (?P<tied>{_NUMBERS}))*",
    re.ASCII,
)


@define
class Reader:
    """The tokens of a written plan, gathered line by line; ``num_stages`` and ``num_microbatches`` are defaults."""

    num_stages: int | None = None
    num_microbatches: int | None = None
    header: dict[str, list[re.Match[str]]] = field(factory=dict)  # by keyword, the words after it
    lines: dict[str, int] = field(factory=dict)  # by keyword, or a group's number as in a path
    groups: list[list[Token]] = field(factory=list)
    routes: RoutesReader = field(factory=RoutesReader)
    rows: list[list[Step]] = field(factory=list)
    actions: list[tuple[int, Token, Action]] = field(factory=list)  # with the position

    def add_header(self, line: Token) -> None:
        """Take a line of the header; an empty one is skipped."""
        if not (found := list(line.words())):
            return
        key, *words = found
        if key.text == "group":
            self.lines[f"groups[{len(self.groups)}]"] = key.line
            self.groups.append(found)
            return
        if key.text in ROUTE_LINES:
            self.routes.add(key, words)
            return
        if key.text not in _WORDS or key.text in self.header:
            known = f"{', '.join(_WORDS)}, or lines of routes ({', '.join(ROUTE_LINES)})"
            raise key.error(f"a position such as '0:', a group, or one line of each of {known}")
        form, expected = _WORDS[key.text]
        matches = [form.fullmatch(word.text) for word in words]
        wrong = [word for word, match in zip(words, matches, strict=True) if match is None]
        wrong += words[1:] if key.text in ("microbatches", "slices") else []
        if wrong or not words:
            raise (wrong[0] if wrong else key.end()).error(f"{expected}, after {key.text!r}")
        self.lines[key.text], self.header[key.text] = key.line, [match for match in matches if match]

    def add_position(self, steps: Iterable[tuple[Token, list[Token]]]) -> None:
        """Read the steps of the next position, each with its words."""
        row: list[Step] = []
        for step, words in steps:
            actions = [word.action() for word in words]
            self.actions += [(len(self.rows), *pair) for pair in zip(words, actions, strict=True)]
            try:
                row.append(as_step(tuple(actions), paired=step.text.startswith("(")))
            except PlanError as error:
                raise step.error(f"an action, or a batch between '[' and ']' ({error})") from None
        self.rows.append(row)

    def plan(self, *, num_lines: int) -> Plan:
        """The plan; ``num_lines`` is the line on which the text ends."""
        if not self.actions:
            raise Token("", num_lines, 1, "the end").error("an action of a position, such as '0: 0F0'")
        try:
            return self._plan()
        except PlanError as error:
            if error.path is None:
                raise
            part = re.findall(r"groups\[\d+\]|routes\.\w+|\w+", error.path)[0]
            line = (self.lines | self.routes.lines).get(part, self.lines.get("edges") if part == "modules" else None)
            if line is not None:
                raise PlanError(f"line {line}: {error}", path=error.path) from None
            if (number := _IMPLIED.get(part)) is None:
                raise
            _, highest, _ = max(self.actions, key=lambda entry: number(entry[2]))
            raise highest.error(f"a number that fits the rest ({error})") from None

    def _plan(self) -> Plan:
        actions, header = [action for _, _, action in self.actions], self.header
        implied = {part: 1 + max(map(number, actions)) for part, number in _IMPLIED.items()}
        count = self._count("microbatches", self.num_microbatches or implied["microbatches"])
        slices = self._count("slices", implied["slices"])
        graph = self._graph(self.num_stages or implied["modules"])
        placement = [_numbers(word[0]) for word in header["placement"]] if "placement" in header else None
        routes = self.routes.routes()
        if routes is not None:  # before anything of the number of stages is made
            require_placed(placement or (), graph)
        check_extent(actions, graph, count, slices, routed=bool(self.routes.words))
        groups = [_group(number, words) for number, words in enumerate(self.groups)]
        expected = expectation(graph, count, groups, slices)
        for _, token, action in self.actions:
            if (instead := expected(action)) is not None:
                raise token.error(instead)
        forward_only = [stage for word in header.get("forward_only", ()) for stage in _numbers(word[0])]
        if not forward_only and "modules" not in header and all(a.kind not in _BACKWARDS for a in actions):
            forward_only = list(range(graph.num_stages))  # an evaluation; a table that lacks some is a mistake
        return Plan(
            positions=self.rows,
            graph=graph,
            placement=self._inferred_placement(graph) if placement is None else placement,
            num_microbatches=count,
            forward_only=forward_only,
            groups=groups,
            num_slices=slices,
            routes=routes,
        )

    def _count(self, name: str, implied: int) -> int:
        return int(self.header[name][0][0]) if name in self.header else implied

    def _graph(self, implied: int) -> ModuleGraph:
        skips = [parse_edge(edge) for word in self.header.get("skips", ()) for edge in word[0].split(",")]
        if "modules" not in self.header and "edges" not in self.header:
            return module_graph(chain(implied).modules, (), skips)
        modules = [(read_name(word[1]), int(word[2])) for word in self.header.get("modules", ())]
        edges = [(read_name(word[1]), read_name(word[2])) for word in self.header.get("edges", ())]
        return module_graph(modules, edges, skips)

    def _inferred_placement(self, graph: ModuleGraph) -> list[list[int]]:
        """Each stage on the positions with the most of its computes: several share it where all do all of these."""
        computes: list[dict[int, set[tuple[object, ...]]]] = [{} for _ in range(graph.num_stages)]
        for position, _, action in self.actions:
            if action.kind is not ActionKind.COLLECTIVE:  # members of the group need not hold the stage
                done = computes[action.stage].setdefault(position, set())
                if action.kind.is_compute:
                    done.add((action.kind is ActionKind.F, action.microbatch, action.slice))
        most = [max(by_position.values(), key=len, default=None) for by_position in computes]
        return [[at for at, done in own.items() if done == full] for own, full in zip(computes, most, strict=True)]


_IMPLIED: dict[str, Callable[[Action], int]] = {  # by the line of the header that counts them
    "modules": lambda action: action.stage,
    "microbatches": lambda action: action.microbatch or 0,
    "slices": lambda action: action.slice or 0,
}
_BACKWARDS = (ActionKind.B, ActionKind.I, ActionKind.W)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _group(number: int, words: Sequence[Token]) -> Group:
    """The group of a line such as ``group bridge 0,3 edges 1>2 tied 0,3``."""
    match = _GROUP.fullmatch(" ".join(word.text for word in words))
    if match is None:
        raise words[0].error("a line such as: group bridge 0,3 edges 1>2 tied 0,3")
    name, positions, edges, tied = (part or "" for part in match.group("name", "positions", "edges", "tied"))
    try:
        carried = [parse_edge(edge) for edge in edges.split(",") if edge]
        return Group(name, _numbers(positions), edges=carried, tied=_numbers(tied) if tied else ())
    except PlanError as error:
        raise PlanError(str(error), path=f"groups[{number}].name") from None


# The rules between the header of a written plan and its table of steps, for text, CSV and JSON


def module_graph(
    modules: Sequence[tuple[str, int]], edges: Sequence[tuple[str, str]], skips: Sequence[Edge] = ()
) -> ModuleGraph:
    """The graph of ``modules`` with ``edges`` between them, and ``skips`` between their stages."""
    path = "modules"
    try:
        ModuleGraph(modules)
        path = "edges"
        ModuleGraph(modules, edges)
        path = "skips"
        return ModuleGraph(modules, edges, skips)
    except ValueError as error:
        raise PlanError(str(error), path=path) from None


def check_extent(
    actions: Collection[Action], graph: ModuleGraph, num_microbatches: int, num_slices: int, *, routed: bool = False
) -> None:
    """Check that each stage, microbatch and slice has an action (a routed stage may have none) before any is made."""
    for path, count, found in (
        ("modules", graph.num_stages, {action.stage for action in actions}),
        ("microbatches", num_microbatches, {action.microbatch or 0 for action in actions}),
        ("slices", num_slices, {action.slice or 0 for action in actions}),
    ):
        if count > len(found) and not (routed and path == "modules"):
            what = "stages" if path == "modules" else path
            raise PlanError(f"the table has actions of {len(found)} of {count} {what}", path=path)


def expectation(
    graph: ModuleGraph, num_microbatches: int, groups: Sequence[Group], num_slices: int
) -> Callable[[Action], str | None]:
    """A function from an action to the text of what is expected in its place; None for an action the plan can have."""
    stages, edges, names = graph.num_stages, frozenset(graph.stage_edges), {group.name for group in groups}

    def expected(action: Action) -> str | None:
        if action.stage >= stages:
            return f"a stage in 0..{stages - 1}"
        if action.microbatch is not None and action.microbatch >= num_microbatches:
            return f"a microbatch in 0..{num_microbatches - 1}"
        if action.microbatch is not None and num_slices > 1 and action.slice not in range(num_slices):
            return f"a slice in 0..{num_slices - 1} after the microbatch, as in {action.microbatch}.0"
        if action.slice is not None and num_slices == 1:
            return "a microbatch without a slice"
        if action.edge is not None and action.edge not in edges:
            known = [str(e) for e in graph.stage_edges if action.stage in (e.source, e.destination)]
            return f"an edge of the graph; stage {action.stage} has {', '.join(known) or 'none'}"
        if action.group is not None and action.group not in names:
            return f"a declared group; known: {', '.join(sorted(names)) or 'none'}"
        return None

    return expected
