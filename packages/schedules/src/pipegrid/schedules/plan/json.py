"""Plans as JSON, for other programs.

An object with ``microbatches``, ``modules`` (pairs of name and depth), ``edges`` (pairs of names), ``placement``
(positions of each stage), ``forward_only``, ``groups`` (name, positions, edges and tied stages), ``creation`` and
``positions``: per position its steps, an action as its token and a batch as a list of tokens. Optional: ``edges``,
``forward_only``, ``groups`` and ``creation``, and a group's ``edges`` and ``tied``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import FieldPath, PlanError, PlanFieldError, PlanSyntaxError
from pipegrid.schedules.plan.actions import Action, parse_action
from pipegrid.schedules.plan.header import located_graph
from pipegrid.schedules.plan.json_reading import Path, load_json, locate
from pipegrid.schedules.plan.plan import Group, Lane, Plan, Step, actions_of, require_plan
from pipegrid.schedules.plan.table_checks import Extent, check_action
from pipegrid.schedules.plan.words import parse_creation, parse_edge, require_text


def to_json(plan: Plan) -> str:
    """The plan as JSON, one line per position; `from_json` reads it back to an equal plan.

    Raises:
        PlanError: it is no `Plan`.
    """
    require_plan(plan)
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
        PlanError: the parts do not fit each other, say a placement that misses a stage; or it is no text.
    """
    require_text(text)
    document = load_json(text)
    reader = _Reader(text, document)
    for key in reader.mapping((), document):
        if key not in _KEYS:
            raise reader.error((key,), f"one of the keys {', '.join(_KEYS)}", found=repr(key))
    try:
        return reader.plan()
    except PlanFieldError as error:
        raise reader.error(_way(document, error.path), error.expected) from None


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

    def count(self, path: Path, value: Any, what: str, *, least: int = 0) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(path, f"{what}, an integer from {least}")
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
        count = self.count(("microbatches",), self.document["microbatches"], "a number of microbatches", least=1)
        rows = [
            self.sequence(("positions", p), steps, "a list of steps")
            for p, steps in enumerate(self.part("positions", "a list of positions"))
        ]
        positions = [
            [self._step(("positions", p, i), item) for i, item in enumerate(row)] for p, row in enumerate(rows)
        ]
        actions = [action for steps in positions for step in steps for action in actions_of(step)]
        if not actions:
            raise self.error(("positions",), "an action; no position does anything")
        table = Extent.of(actions)
        table.require_microbatches(count)
        graph = self._graph()
        table.require_stages(graph)
        groups = [self._group(("groups", i), item) for i, item in enumerate(self.part("groups", "a list"))]
        names = {group.name for group in groups}
        edges = frozenset(graph.stage_edges)

        for path, action in self._placed(positions):
            try:
                check_action(action, graph=graph, edges=edges, num_microbatches=count, groups=names)
            except PlanError as error:
                raise self.error(path, str(error)) from None
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

    def _step(self, path: Path, value: Any) -> Step:
        if not isinstance(value, list):
            return self._action(path, value)
        if not value:
            raise self.error(path, "communications in the batch")
        batch = tuple(self._action((*path, i), item) for i, item in enumerate(value))
        for i, item in enumerate(batch):
            if item.kind.is_compute:
                raise self.error((*path, i), "a communication; computes stand alone, outside a batch")
        return batch

    def _action(self, path: Path, value: Any) -> Action:
        if not isinstance(value, str):
            raise self.error(path, 'an action, such as "3F7"')
        try:
            return parse_action(value)
        except PlanError as error:
            raise self.error(path, str(error)) from None

    @staticmethod
    def _placed(positions: Sequence[Sequence[Step]]) -> Iterator[tuple[Path, Action]]:
        """Every action, and the way to it."""
        for p, steps in enumerate(positions):
            for i, step in enumerate(steps):
                if isinstance(step, Action):
                    yield ("positions", p, i), step
                    continue
                for k, action in enumerate(step):
                    yield ("positions", p, i, k), action

    def _graph(self) -> ModuleGraph:
        modules = [
            self.pair(("modules", i), item, "a pair of a name and a depth")
            for i, item in enumerate(self.part("modules", "a list of modules"))
        ]
        for i, (_, depth) in enumerate(modules):
            self.count(("modules", i, 1), depth, "a depth", least=1)
        edges = [
            self.pair(("edges", i), item, "a pair of names of modules")
            for i, item in enumerate(self.part("edges", "a list of edges"))
        ]
        for i, (_, destination) in enumerate(edges):
            if not isinstance(destination, str):
                raise self.error(("edges", i, 1), "the name of a module")
        return located_graph(modules, edges)

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
        except PlanFieldError as error:
            raise error.inside(*path) from None

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


def _way(document: Mapping[str, Any], path: FieldPath) -> Path:
    """Where ``path`` of a plan leads in its document, as far as that goes."""
    way: list[str | int] = []
    node: Any = document
    for key in path:
        step: Any = {"num_microbatches": "microbatches", "depth": 1}.get(str(key), key)
        if isinstance(node, list) and key != "depth" and not any(isinstance(item, list | dict) for item in node):
            items = [str(item) for item in node]  # numbers, edges: the key is one of them
            step = items.index(str(key)) if str(key) in items else None
        known = step in node if isinstance(node, dict) else isinstance(step, int) and step < len(node)
        if not known:
            break
        way.append(step)
        node = node[step]
    return tuple(way)
