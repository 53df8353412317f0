"""The rules between the header of a written plan and its table of steps, for text, CSV and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import PlanFieldError
from pipegrid.schedules.plan.actions import Action
from pipegrid.schedules.plan.parts import Group


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


def check_extent(actions: Iterable[Action], graph: ModuleGraph, num_microbatches: int, num_slices: int) -> None:
    """Check the stages, microbatches and slices declared against a table, in which each of them acts.

    A count that is far too large is found here, before anything of that size is made.

    Raises:
        PlanFieldError: more stages, microbatches or slices than the table has.
    """
    stages = microbatches = slices = 0
    for action in actions:
        stages = max(stages, action.stage + 1)
        microbatches = max(microbatches, (action.microbatch or 0) + 1)
        slices = max(slices, (action.slice or 0) + 1)
    if num_microbatches > microbatches:
        raise PlanFieldError(
            f"{num_microbatches} microbatches are declared and the table has {microbatches}", path="microbatches"
        )
    if num_slices > slices:
        raise PlanFieldError(f"{num_slices} slices are declared and the table has {slices}", path="slices")
    if graph.num_stages > stages:
        declared = ", ".join(f"{name}:{depth}" for name, depth in graph.modules)
        raise PlanFieldError(
            f"{graph.num_stages} stages are declared ({declared}) and the table has {stages}", path="modules"
        )


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
        if action.slice is None and action.microbatch is not None and num_slices > 1:
            return f"a slice in 0..{num_slices - 1} after the microbatch, such as {action.microbatch}.0"
        if action.slice is not None and action.slice >= num_slices:
            return f"a slice in 0..{num_slices - 1}" if num_slices > 1 else "a microbatch alone: there are no slices"
        if action.edge is not None and action.edge not in edges:
            known = [str(e) for e in graph.stage_edges if action.stage in (e.source, e.destination)]
            return f"an edge of the graph; stage {action.stage} has {', '.join(known) or 'none'}"
        if action.group is not None and action.group not in names:
            return f"a declared group; known: {', '.join(sorted(names)) or 'none'}"
        return None

    return expected
