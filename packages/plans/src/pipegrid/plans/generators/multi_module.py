"""1F1B over any graph of modules."""

from __future__ import annotations

from collections.abc import Iterable

from pipegrid.core.fields import Count, Name, checked, checked_arguments
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators.shapes import Order
from pipegrid.plans.plan import (
    Action,
    Plan,
    as_placement,
    backward,
    compute_plan,
    forward,
    require_graph,
    require_placed,
    stages_on,
)


@checked_arguments(PlanError)
def multi_module_1f1b(
    graph: ModuleGraph,
    num_microbatches: Count,
    *,
    placement: Iterable[int | Iterable[int]] | None = None,
    forward_only: Iterable[str] = (),
) -> Plan:
    """1F1B over a graph of modules of any depths, with branches, skip edges and colocated modules.

    A stage warms up by its distance to the farthest sink, so branches of different depth neither deadlock nor stall; at
    most that distance and one microbatches are live.

    Args:
        graph: the modules.
        num_microbatches: of a step.
        placement: the position of each stage, or positions (a module that shares those of another); by default its own.
        forward_only: modules that run no backward: frozen ones that nothing trained feeds, or all in an evaluation.

    Source: the 1F1B rule of Narayanan et al. 2021, section 2.2.1, by the distance to the sink. It cannot deadlock: give
    the forward of microbatch ``m`` at a stage with distance ``d`` the date ``2m - d``, and its backward ``2m + d + 1``;
    every dependency goes from a smaller date to a larger one, and so does a position, through all of its stages.

    Examples:
        >>> multi_module_1f1b(chain(3), 4) == one_f_one_b(3, 4)
        True
    """
    require_graph(graph)
    without = frozen_stages(graph, forward_only)
    places = as_placement(range(graph.num_stages) if placement is None else placement)
    require_placed(places, graph)
    held = stages_on(places)
    return compute_plan(
        [
            _order(held.get(position, ()), graph, num_microbatches, without=without)
            for position in range(max(held, default=0) + 1)
        ],
        graph=graph,
        placement=places,
        num_microbatches=num_microbatches,
        forward_only=without,
    )


def frozen_stages(graph: ModuleGraph, forward_only: Iterable[str]) -> frozenset[int]:
    """The stages of the modules named in ``forward_only``."""
    names = checked(forward_only, tuple[Name, ...], "forward_only", PlanError)
    return frozenset(graph.stage(name, index) for name in names for index in range(graph.depth(name)))


def _order(stages: Iterable[int], graph: ModuleGraph, num_microbatches: int, *, without: frozenset[int]) -> Order:
    """The order of a position that holds ``stages``; of those in ``without``, forwards alone."""
    dated: list[tuple[int, int, Action]] = []
    for stage in stages:
        distance = graph.distance_to_sink[stage]
        for m in range(num_microbatches):
            # At one date, backwards first: they free memory. Neither waits for the other.
            dated.append((2 * m - distance, 1, forward(stage, m)))
            if stage not in without:
                dated.append((2 * m + distance + 1, 0, backward(stage, m)))
    dated.sort(key=lambda entry: (entry[0], entry[1], entry[2].stage))
    # Sorted by date, a stage does min(M, distance) forwards, then one and one, then the last backwards.
    return [action for _, _, action in dated]
