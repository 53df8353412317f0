"""Plans as JSON, for other programs.

An object with ``microbatches``, ``modules`` (pairs of name and depth), ``edges`` (pairs of names), ``placement``
(positions of each stage), ``forward_only``, ``groups`` (name, positions, edges and tied stages) and ``positions``: per
position its steps: an action as its token, a batch as a list of tokens, a pair as ``"(3F7;1B4)"``. Optional: ``edges``,
``skips`` (``"0>2"``), ``forward_only``, ``groups``, ``slices`` (of each microbatch), ``routes`` (`routes_document`),
and a group's ``edges`` and ``tied``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import frozen

from pipegrid.core.edge import Edge
from pipegrid.core.fields import Count, checked, shown
from pipegrid.core.strict_json import exactly, first_fault, read_json
from pipegrid.plans.errors import PlanError, PlanSyntaxError
from pipegrid.plans.plan.actions import Action, parse_action
from pipegrid.plans.plan.parts import Group, Step, Text, as_step, is_pair, parse_edge, parse_step, step_text
from pipegrid.plans.plan.plan import Plan, require_placed, require_plan
from pipegrid.plans.plan.routes_text import routes_document, routes_from_document
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
        "groups": [
            {"name": g.name, "positions": g.positions, "edges": [str(edge) for edge in g.edges], "tied": g.tied}
            for g in plan.groups
        ],
        **({} if plan.routes is None else {"routes": routes_document(plan.routes)}),
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    rows = [
        json.dumps(
            [step_text(step) if isinstance(step, Action) or is_pair(step) else list(map(str, step)) for step in steps]
        )
        for steps in plan.positions
    ]
    positions = ",\n    ".join(rows)
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
    from cattrs import BaseValidationError

    data = load_json(text)
    if not isinstance(data, dict):
        raise PlanError(f"the document is {shown(data)}; it must be an object with 'microbatches', 'modules', ...")
    try:
        document = _converter().structure(data, _Document)
    except BaseValidationError as error:
        path, what = first_fault(error, PlanError)
        path = path or "the document"
        raise PlanError(f"{path}: {what}", path=path) from None
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
    routes: Any = None


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
        routes=None if document.routes is None else routes_from_document(document.routes),
    )


def _actions(positions: tuple[tuple[Step, ...], ...]) -> Iterator[tuple[tuple[int, ...], Action]]:
    """Every action with the indices that lead to it."""
    for position, steps in enumerate(positions):
        for index, step in enumerate(steps):
            if isinstance(step, Action):
                yield (position, index), step
            else:
                for at, action in enumerate(step):
                    yield (position, index, at), action


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

    converter.register_structure_hook(int, exactly)
    converter.register_structure_hook(str, exactly)
    converter.register_structure_hook(Action, action)
    converter.register_structure_hook(Edge, lambda value, _: parse_edge(exactly(value, str)))
    converter.register_structure_hook_func(lambda kind: kind == Step, step)
    return converter
