"""The rules between the header of a written plan and its table of steps, for text, CSV and JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan.actions import Action
from pipegrid.plans.plan.parts import Group


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
