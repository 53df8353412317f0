"""Plans as JSON, for other programs.

An object with ``microbatches``, ``modules`` (pairs of name and depth), ``edges`` (pairs of names), ``placement``
(positions of each stage), ``forward_only``, ``groups`` (name, positions, edges and tied stages), ``creation`` and
``positions``: per position its steps, an action as its token and a batch as a list of tokens. Optional: ``edges``,
``forward_only``, ``groups`` and ``creation``, and a group's ``edges`` and ``tied``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.actions import Action, parse_action
from pipegrid.schedules.errors import PlanError, PlanSyntaxError
from pipegrid.schedules.plan import Group, Lane, Plan, Step
from pipegrid.schedules.plan_reading import check_action, parse_creation, parse_edge

Path: TypeAlias = tuple[str | int, ...]
"""Keys and indices from the top of the document."""


def to_json(plan: Plan) -> str:
    """The plan as JSON, one line per position; `from_json` reads it back to an equal plan."""
    head: dict[str, Any] = {
        "microbatches": plan.num_microbatches,
        "modules": [list(module) for module in plan.graph.modules],
        "edges": [list(edge) for edge in plan.graph.edges],
        "placement": [list(places) for places in plan.placement],
        "forward_only": list(plan.forward_only),
        "groups": [
            {
                "name": group.name,
                "positions": list(group.positions),
                "edges": [str(edge) for edge in group.edges],
                "tied": list(group.tied),
            }
            for group in plan.groups
        ],
        "creation": [[str(name) for name in names] for names in plan.creation],
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    rows = [
        json.dumps([str(step) if isinstance(step, Action) else [str(a) for a in step] for step in steps])
        for steps in plan.positions
    ]
    positions = ",\n    ".join(rows)
    lines.append(f'  "positions": [\n    {positions}\n  ]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str) -> Plan:
    """Read a plan that `to_json` wrote.

    Raises:
        PlanSyntaxError: line and column, what was found, what was expected.
        PlanError: the parts do not fit each other, say a placement that misses a stage.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        found = repr(text[error.pos : error.pos + 12]) if error.pos < len(text) else "the end"
        raise PlanSyntaxError(line=error.lineno, column=error.colno, found=found, expected=error.msg) from None
    reader = _Reader(text, document)
    for key in reader.mapping((), document):
        if key not in _KEYS:
            raise reader.error((key,), f"one of the keys {', '.join(_KEYS)}", found=repr(key))
    return reader.plan()


_KEYS = (
    "microbatches",
    "modules",
    "edges",
    "placement",
    "forward_only",
    "groups",
    "creation",
    "positions",
)


class _Reader:
    """Takes the document apart with the path at hand, so that an error can point at the text."""

    def __init__(self, text: str, document: Any) -> None:
        self.text = text
        self.document = document

    def error(self, path: Path, expected: str, *, found: str | None = None) -> PlanSyntaxError:
        line, column, value = locate(self.text, path)
        return PlanSyntaxError(line=line, column=column, found=found or value, expected=expected)

    def mapping(self, path: Path, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self.error(path, "an object")
        return value

    def sequence(self, path: Path, value: Any, what: str) -> Sequence[Any]:
        if not isinstance(value, list):
            raise self.error(path, what)
        return value

    def part(self, key: str, what: str) -> Sequence[Any]:
        return self.sequence((key,), self.document.get(key, []), what)

    def count(self, path: Path, value: Any, what: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(path, f"{what}, an integer from 0")
        return value

    def counts(self, path: Path, value: Any, what: str) -> tuple[int, ...]:
        items = self.sequence(path, value, f"a list of {what}s")
        return tuple(self.count((*path, i), item, f"a {what}") for i, item in enumerate(items))

    def pair(self, path: Path, value: Any, what: str) -> tuple[Any, Any]:
        items = self.sequence(path, value, what)
        if len(items) != 2 or not isinstance(items[0], str):
            raise self.error(path, what)
        return items[0], items[1]

    def plan(self) -> Plan:
        for key in ("microbatches", "modules", "placement", "positions"):
            if key not in self.document:
                raise self.error((), f"the key {key!r}", found="an object without it")
        graph = self._graph()
        count = self.count(("microbatches",), self.document["microbatches"], "a number of microbatches")
        groups = [self._group(("groups", i), item) for i, item in enumerate(self.part("groups", "a list"))]
        names = {group.name for group in groups}
        edges = frozenset(graph.stage_edges)

        def action(path: Path, value: Any) -> Action:
            if not isinstance(value, str):
                raise self.error(path, 'an action, such as "3F7"')
            try:
                found = parse_action(value)
                check_action(found, graph=graph, edges=edges, num_microbatches=count, groups=names)
            except PlanError as error:
                raise self.error(path, str(error)) from None
            return found

        def step(path: Path, value: Any) -> Step:
            if not isinstance(value, list):
                return action(path, value)
            if not value:
                raise self.error(path, "communications in the batch")
            batch = tuple(action((*path, i), item) for i, item in enumerate(value))
            for i, item in enumerate(batch):
                if item.kind.is_compute:
                    raise self.error((*path, i), "a communication; computes stand alone, outside a batch")
            return batch

        positions = [
            [
                step(("positions", p, i), item)
                for i, item in enumerate(self.sequence(("positions", p), steps, "a list of steps"))
            ]
            for p, steps in enumerate(self.part("positions", "a list of positions"))
        ]
        return Plan(
            positions=positions,
            graph=graph,
            placement=[
                self.counts(("placement", i), item, "position")
                for i, item in enumerate(self.part("placement", "a list of lists of positions"))
            ],
            num_microbatches=count,
            forward_only=self.counts(("forward_only",), self.document.get("forward_only", []), "stage"),
            groups=groups,
            creation=self._creation() if "creation" in self.document else None,
        )

    def _graph(self) -> ModuleGraph:
        modules = [
            self.pair(("modules", i), item, "a pair of a name and a depth")
            for i, item in enumerate(self.part("modules", "a list of modules"))
        ]
        for i, (_, depth) in enumerate(modules):
            self.count(("modules", i, 1), depth, "a depth")
        edges = [
            self.pair(("edges", i), item, "a pair of names of modules")
            for i, item in enumerate(self.part("edges", "a list of edges"))
        ]
        try:
            return ModuleGraph(modules, edges)
        except ValueError as error:
            raise self.error(("edges" if edges else "modules",), str(error)) from None

    def _group(self, path: Path, value: Any) -> Group:
        item = self.mapping(path, value)
        if not {"name", "positions"} <= set(item) <= {"name", "positions", "edges", "tied"}:
            raise self.error(path, 'a group as {"name": ..., "positions": [...], "edges": ["1>2"], "tied": [...]}')
        if not isinstance(item["name"], str):
            raise self.error((*path, "name"), "a name")
        edges = []
        for i, edge in enumerate(self.sequence((*path, "edges"), item.get("edges", []), "a list of edges")):
            try:
                edges.append(parse_edge(str(edge)))
            except PlanError as error:
                raise self.error((*path, "edges", i), str(error)) from None
        positions = self.counts((*path, "positions"), item["positions"], "position")
        tied = self.counts((*path, "tied"), item.get("tied", []), "stage")
        try:
            return Group(item["name"], positions, edges=edges, tied=tied)
        except PlanError as error:
            raise self.error(path, str(error)) from None

    def _creation(self) -> list[list[Lane | str]]:
        creation = []
        for p, names in enumerate(self.part("creation", "a list of lists")):
            own = []
            for i, name in enumerate(self.sequence(("creation", p), names, "a list of groups and lanes")):
                if not isinstance(name, str):
                    raise self.error(("creation", p, i), "the name of a group, or a lane such as F0>1")
                own.append(parse_creation(name))
            creation.append(own)
        return creation


_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def locate(text: str, path: Path) -> tuple[int, int, str]:
    """Line and column (from 1) of the value at ``path`` in valid JSON, and its text, shortened."""
    at = _skip(text, 0)
    for key in path:
        inside = _skip(text, at + 1)
        if text[inside] in "]}":
            break
        at = _member(text, inside, key) if isinstance(key, str) else _element(text, inside, key)
    line = text.count("\n", 0, at) + 1
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    _, end = _DECODER.raw_decode(text, at)
    value = text[at:end]
    return line, column, value if len(value) <= 60 else f"{value[:57]}..."


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _element(text: str, at: int, index: int) -> int:
    for _ in range(index):
        _, at = _DECODER.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
    return at


def _member(text: str, at: int, key: str) -> int:
    """Where the value of ``key`` starts; of the last one if the key is there twice, as `json` reads it."""
    found = at
    while True:
        name, at = _DECODER.raw_decode(text, at)
        value = _skip(text, _skip(text, at) + 1)
        if name == key:
            found = value
        _, at = _DECODER.raw_decode(text, value)
        at = _skip(text, at)
        if text[at] == "}":
            return found
        at = _skip(text, at + 1)
