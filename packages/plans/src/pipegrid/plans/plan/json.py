"""Plans and routes as JSON, for other programs.

A plan is an object with ``microbatches``, ``modules`` (pairs of name and depth), ``edges`` (pairs of names),
``placement`` (positions of each stage), ``forward_only``, ``groups`` (name, positions, edges and tied stages) and
``positions``: per position its steps: an action as its token, a batch as a list of tokens, a pair as ``"(3F7;1B4)"``.
Optional: ``edges``, ``skips`` (``"0>2"``), ``forward_only``, ``groups``, ``slices`` (of each microbatch), ``routes``,
and a group's ``edges`` and ``tied``. Routes: ``{"units": [4, 4], "moves": {"1": {"0@1": 0}}, ...}``, moves by stage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NewType, TypeVar

from attrs import AttrsInstance, Factory, asdict, fields, frozen

from pipegrid.core.edge import Edge
from pipegrid.core.fields import Count, checked, shown
from pipegrid.core.strict_json import exactly, first_fault, read_json
from pipegrid.plans.errors import PlanError, PlanSyntaxError
from pipegrid.plans.plan.actions import Action, parse_action
from pipegrid.plans.plan.parts import Group, Step, Text, actions_of, as_step, is_pair, parse_edge, parse_step, step_text
from pipegrid.plans.plan.plan import Plan, require_placed, require_plan
from pipegrid.plans.plan.routes import Actor, Move, Routes
from pipegrid.plans.plan.text import check_extent, expectation, module_graph

if TYPE_CHECKING:
    from cattrs import Converter


def to_json(plan: Plan) -> str:
    """The plan as JSON, one line per position; `from_json` reads it back to an equal plan."""
    require_plan(plan)
    head: dict[str, Any] = {
        "microbatches": plan.num_microbatches,
        **({"slices": plan.num_slices} if plan.num_slices > 1 else {}),
        "modules": plan.graph.modules,
        "edges": plan.graph.edges,
        **({"skips": list(map(str, plan.graph.skips))} if plan.graph.skips else {}),
        "placement": plan.placement,
        "forward_only": plan.forward_only,
        "groups": [{**asdict(group), "edges": list(map(str, group.edges))} for group in plan.groups],
        **({} if plan.routes is None else {"routes": _routes_document(plan.routes)}),
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]

    def plain(step: Step) -> str | list[str]:
        return step_text(step) if isinstance(step, Action) or is_pair(step) else list(map(str, step))

    positions = ",\n    ".join(json.dumps(list(map(plain, steps))) for steps in plan.positions)
    lines.append(f'  "positions": [\n    {positions}\n  ]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str) -> Plan:
    """Read a plan from the JSON of `to_json`.

    Raises:
        PlanSyntaxError: text that is not JSON: line and column, what was found, what was expected.
        PlanError: a value that is wrong, or parts that contradict each other; with the path, ``positions[3][2]``.

    Examples:
        >>> from_json(to_json(gpipe(2, 4))) == gpipe(2, 4)
        True
    """
    document = _structured(load_json(text), _Document)
    try:
        return _plan(document)
    except PlanError as error:
        if error.path is None:
            raise
        raise PlanError(f"{error.path}: {error}", path=error.path) from None


def load_json(text: str, *, finite: bool = True) -> Any:
    """The document that ``text`` holds, as `read_json` has it.

    Raises:
        PlanSyntaxError: line and column, what was found, what was expected.
        PlanError: ``text`` is not a string, a key is there twice, or a number is not finite.
    """
    checked(text, Text, "text", PlanError)
    try:
        return read_json(text, finite=finite)
    except json.JSONDecodeError as error:
        found = repr(text[error.pos : error.pos + 12]) if error.pos < len(text) else "the end"
        expected = f"JSON ({error.msg})"
        raise PlanSyntaxError(line=error.lineno, column=error.colno, found=found, expected=expected) from None
    except ValueError as error:
        raise PlanError(str(error)) from None


def routes_to_json(routes: Routes) -> str:
    """Routes as JSON; `routes_from_json` reads them back to equal ones."""
    return json.dumps(_routes_document(routes)) + "\n"


def routes_from_json(text: str) -> Routes:
    """Read routes from the JSON of `routes_to_json`.

    Raises:
        PlanError: text that is not JSON, or a value that is not what it must be.
    """
    return _routes(_structured(load_json(text), _RoutesDocument, "routes."))


def _routes_document(routes: Routes) -> dict[str, Any]:
    moves: dict[str, dict[str, int]] = {}
    for move in routes.moves:
        moves.setdefault(str(move.stage), {})[routes.name(move.unit)] = move.replica
    parts: dict[str, Any] = {
        "dead": [*map(str, routes.dead)],
        "moves": moves,
        "skips": {name: [*map(routes.name, units)] for name, units in routes.skips},
        "every": dict(routes.every),
    }
    return {"units": list(routes.units), **{key: value for key, value in parts.items() if value}}


_Stage = NewType("_Stage", int)
_Pair = NewType("_Pair", tuple[int, int])  # ``"3@1"``: a unit by its microbatch and home, an actor by its position


@frozen
class _RoutesDocument:
    units: tuple[int, ...]
    dead: tuple[_Pair, ...] = ()
    moves: dict[_Stage, dict[_Pair, int]] = Factory(dict)
    skips: dict[str, tuple[_Pair, ...]] = Factory(dict)
    every: dict[str, int] = Factory(dict)


def _routes(document: _RoutesDocument) -> Routes:
    plain = Routes(document.units)

    def unit(pair: tuple[int, int]) -> int:
        return plain.unit(pair[1], pair[0])

    return Routes(
        plain.units,
        moves=[Move(stage, unit(at), to) for stage, units in document.moves.items() for at, to in units.items()],
        skips={name: [*map(unit, units)] for name, units in document.skips.items()},
        every=document.every,
        dead=[Actor(*pair) for pair in document.dead],
    )


@frozen
class _Document:
    microbatches: int
    modules: tuple[tuple[str, int], ...]
    placement: tuple[tuple[int, ...], ...]
    positions: tuple[tuple[Step, ...], ...]
    edges: tuple[tuple[str, str], ...] = ()
    skips: tuple[Edge, ...] = ()
    forward_only: tuple[int, ...] = ()
    groups: tuple[Group, ...] = ()
    slices: int = 1
    routes: _RoutesDocument | None = None


def _plan(document: _Document) -> Plan:
    count = checked(document.microbatches, Count, "microbatches", PlanError)
    graph = module_graph(document.modules, document.edges, document.skips)
    if document.routes is not None:
        require_placed(document.placement, graph)  # before anything of the number of stages is made
    actions = list(_actions(document.positions))
    slices = checked(document.slices, Count, "slices", PlanError)
    check_extent([action for _, action in actions], graph, count, slices, routed=document.routes is not None)
    expected = expectation(graph, count, document.groups, slices)
    for path, action in actions:
        if (instead := expected(action)) is not None:
            raise PlanError(f"found '{action}'; expected {instead}", path="positions" + "".join(f"[{i}]" for i in path))
    return Plan(
        positions=document.positions,
        graph=graph,
        placement=document.placement,
        num_microbatches=count,
        forward_only=document.forward_only,
        groups=document.groups,
        num_slices=slices,
        routes=None if document.routes is None else _routes(document.routes),
    )


def _actions(positions: tuple[tuple[Step, ...], ...]) -> Iterator[tuple[tuple[int, ...], Action]]:
    """Every action with the indices that lead to it."""
    for position, steps in enumerate(positions):
        for index, step in enumerate(steps):
            for at, action in enumerate(actions_of(step)):
                yield (position, index) if action is step else (position, index, at), action


_T = TypeVar("_T", bound=AttrsInstance)


def _structured(data: Any, kind: type[_T], root: str = "") -> _T:
    """The parts of a document; a `PlanError` with the path, from ``root``, to a value that is not what it must be."""
    from cattrs import BaseValidationError

    if not isinstance(data, dict):
        keys = ", ".join(repr(attribute.name) for attribute in fields(kind)[:2])
        raise PlanError(f"the document is {shown(data)}; it must be an object with {keys}, ...")
    try:
        return _converter().structure(data, kind)
    except BaseValidationError as error:
        path, what = first_fault(error, PlanError)
        path = root + path or "the document"
        raise PlanError(f"{path}: {what}", path=path) from None


@cache
def _converter() -> Converter:
    from cattrs import Converter

    converter = Converter(forbid_extra_keys=True)

    def action(value: Any, _: Any) -> Action:
        return parse_action(exactly(value, str))

    def step(value: Any, _: Any) -> Step:
        if not isinstance(value, list):
            return parse_step(exactly(value, str))
        return as_step(converter.structure(value, tuple[Action, ...]), paired=False)

    def numbers(value: Any, form: str, example: str) -> tuple[int, ...]:
        if (match := re.fullmatch(form, value, re.ASCII)) is None:
            raise PlanError(f"{shown(value)} is not {example}")
        return tuple(map(int, match.groups()))

    stage, pair = (r"(\d{1,9})", "a stage"), (r"(\d{1,9})@(\d{1,9})", "a pair such as '3@1'")
    converter.register_structure_hook(_Stage, lambda value, _: numbers(exactly(value, str), *stage)[0])
    converter.register_structure_hook(_Pair, lambda value, _: numbers(exactly(value, str), *pair))
    converter.register_structure_hook(int, exactly)
    converter.register_structure_hook(str, exactly)
    converter.register_structure_hook(Action, action)
    converter.register_structure_hook(Edge, lambda value, _: parse_edge(exactly(value, str)))
    converter.register_structure_hook_func(lambda kind: kind == Step, step)
    return converter
