"""Placements for a search, the named schedules on them, and the list scheduler's orders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

from attrs import evolve

from pipegrid.core.fields import Count, checked_arguments
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators import (
    ANY_GRAPH,
    SCHEDULES,
    frozen_stages,
    interleaved_zero_bubble,
    looped_placement,
    multi_module_1f1b,
    schedule_for,
    v_placement,
)
from pipegrid.plans.network.problem import Entries, Problem
from pipegrid.plans.passes.skipping import with_skips
from pipegrid.plans.plan import Action, ActionKind, Plan, as_placement, chain, compute_plan, require_graph
from pipegrid.plans.simulate import Costs, CostsError, GivenCosts, activation_sizes
from pipegrid.plans.verify import as_limit
from pipegrid.search.calls import RoutedProblem
from pipegrid.search.found import Found, candidate
from pipegrid.search.list_scheduler import list_schedule, policies
from pipegrid.search.pairs import hides

SPREAD = 29
"""A prime that divides no number of policies."""


def candidates(shapes: Iterable[Problem]) -> Iterator[Found]:
    """The named schedules under the cap, then the list scheduler's plans; ``origin`` is a name, or ``"list"``.

    Examples:
        >>> from pipegrid.plans import Costs
        >>> from pipegrid.search.candidates import problems
        >>> found = list(candidates(problems(Costs(), 4, num_positions=2, num_microbatches=4)))
        >>> found[0].origin, found[0].makespan
        ('gpipe', 15.0)
    """
    for problem in shapes:
        yield from named(problem)
        yield from listed(problem)


@checked_arguments(PlanError)
def problems(
    costs: GivenCosts,
    memory_limit: float | None = None,
    *,
    num_positions: Count,
    num_microbatches: Count,
    num_stages: Count | None = None,
    placement: Iterable[int | Iterable[int]] | None = None,
    graph: ModuleGraph | None = None,
    forward_only: Iterable[str] = (),
    ahead: Count | None = None,
) -> list[Problem]:
    """The problem on each placement that suits the stages and whose positions hold one microbatch.

    Arguments and errors are those of `search`.
    """
    if graph is not None:
        require_graph(graph)
    if num_stages is None:
        num_stages = graph.num_stages if graph is not None else (costs.stages or num_positions)
    if graph is None:
        graph = chain(num_stages)
    if graph.num_stages != num_stages:
        raise PlanError(f"num_stages is {num_stages} and the graph has {graph.num_stages} stages")
    without = frozen_stages(graph, forward_only)
    limit = as_limit(memory_limit)
    placements = _placements(num_positions, num_stages) if placement is None else [as_placement(placement)]
    shapes = []
    for places in placements:
        rows = [()] * (1 + max((position for own in places for position in own), default=0))
        options: dict[str, Any] = {"graph": graph, "placement": places, "forward_only": without}
        empty = compute_plan(rows, num_microbatches=num_microbatches, **options)
        own = with_kept(empty, costs)
        shapes.append(
            Problem(graph, places, num_microbatches, own, activation_sizes(empty, own), limit, without, ahead)
        )
    for shape in shapes:
        if (count := shape.num_positions) != num_positions:
            raise PlanError(f"{num_stages} stages lie on {count} positions; num_positions is {num_positions}")
    least = [shape.least_memory() for shape in shapes]
    fitting = [shape for shape, needed in zip(shapes, least, strict=True) if needed <= shape.room]
    if not fitting:
        raise PlanError(
            f"memory_limit {memory_limit} does not hold one microbatch at a time; the least that works is {min(least)}"
        )
    return fitting


def with_kept(plan: Plan, costs: Costs) -> Costs:
    """``costs`` in whose activations are the payloads that the positions of ``plan`` keep of edges past stages.

    In a plan of computes alone one is kept from the ``F`` of the stage that it comes to, until its ``I``.

    Raises:
        CostsError: a payload that stays on its position is a copy there, which has another lifetime: its source has no
            backward.
    """
    kept = costs.per_edge("kept", plan.graph.skips)
    if not any(kept.values()):
        return costs
    sizes = list(activation_sizes(plan, costs))
    released = [size * share for size, share in zip(sizes, costs.per_stage("input_release", len(sizes)), strict=True)]
    for edge, size in kept.items():
        if plan.placement[edge.source] != plan.placement[edge.destination]:
            sizes[edge.destination] += size
            released[edge.destination] += size
        elif size and edge.source in plan.forward_only:
            raise CostsError(
                f"kept is {size:g} for edge {edge}: stage {edge.source} has no backward and its position keeps a copy, "
                "which searches do not count; place the two stages apart, or give kept=0 for it"
            )
    shares = [min(1.0, part / size) if size else 0.0 for part, size in zip(released, sizes, strict=True)]
    return evolve(costs, activation=sizes, input_release=shares, kept=0.0)


def _placements(num_positions: int, num_stages: int) -> list[tuple[tuple[int, ...], ...]]:
    found = [looped_placement(num_positions, num_stages)]
    if num_stages == 2 * num_positions and num_positions > 1:
        found.append(v_placement(num_positions))
    return [as_placement(places) for places in found]


def planned(problem: Problem, orders: Iterable[Entries], make: Callable[..., Action] = Action) -> Plan:
    """The plan of computes with these orders; ``make`` builds an action of an entry."""
    return compute_plan(
        [[make(*entry) for entry in order] for order in orders],
        graph=problem.graph,
        placement=problem.placement,
        num_microbatches=problem.num_microbatches,
        forward_only=problem.forward_only,
    )


def named(problem: Problem) -> Iterator[Found]:
    """The named schedules that have this graph and placement, and keep to the cap."""
    plans: list[tuple[str, Plan]] = []
    options: dict[str, Any]
    if len(problem.graph.modules) == 1 and not problem.forward_only:
        chunks = -(-problem.graph.num_stages // problem.num_positions)
        for schedule in SCHEDULES.values():
            if schedule.trains and not schedule.sliced and schedule.chunks in (None, chunks):
                for overlap in (False, True) if schedule.pairs and hides(problem.costs) else (False,):
                    plan = schedule.plan(
                        problem.num_positions,
                        problem.num_microbatches,
                        chunks,
                        num_stages=problem.graph.num_stages if schedule.chunks is None else None,
                        overlap=overlap,
                    )
                    plans.append((f"{schedule.name}, pairs" if overlap else schedule.name, plan))
        options = {"num_chunks": chunks, "num_stages": problem.graph.num_stages, "warmup_per_hop": 2}  # for slow links
        slow = interleaved_zero_bubble(problem.num_positions, problem.num_microbatches, **options)
        plans.append(("interleaved_zero_bubble", slow))
    else:
        modules = {problem.graph.module_of(stage)[0] for stage in problem.forward_only}
        options = {"placement": problem.placement, "forward_only": sorted(modules)}
        plans.append(("multi_module_1f1b", multi_module_1f1b(problem.graph, problem.num_microbatches, **options)))
        # The schedules that train the module with the loss, with the others around it, where they fit.
        around = {name: name for name, known in SCHEDULES.items() if known.trains and not known.sliced}
        around[ANY_GRAPH] = "seq1f1b"  # 1F1B where a microbatch is one slice; ANY_GRAPH has a rule for all modules
        for origin, name in around.items():
            with suppress(PlanError):
                plans.append((origin, schedule_for(problem.graph, name, problem.num_microbatches, **options)))
    for name, plan in plans:
        if plan.placement == problem.placement:
            entry = candidate(name, with_skips(plan, problem.graph.skips), problem)
            if entry is not None:
                yield entry


def listed(problem: Problem) -> Iterator[Found]:
    """The list scheduler's plans under each policy, with backwards split, and whole where W follows its I."""
    seen = set()
    make = cache(Action)  # the same few thousand actions, over and over
    one_module = len(problem.graph.modules) == 1
    tried = list(policies(problem))
    if not one_module:  # a search may stop among them: different ones first
        tried = [tried[index * SPREAD % len(tried)] for index in range(len(tried))]
    one_replica = RoutedProblem.of_one_replica(problem)
    for policy in tried:
        split = list(list_schedule(one_replica, policy).orders.values())
        for orders in (split, with_whole_backwards(split)):
            if (key := tuple(map(tuple, orders))) not in seen:
                seen.add(key)
                entry = candidate("list", planned(problem, orders, make), problem)
                if entry is not None:
                    yield entry


def with_whole_backwards(orders: Iterable[Entries]) -> list[Entries]:
    """``orders`` with each ``I`` that its own ``W`` directly follows, on all positions, written as one ``B``."""
    orders = list(orders)
    apart = {
        entry
        for order in orders
        for entry, after in itertools.pairwise([*order, None])
        if entry is not None and entry[0] is ActionKind.I and after != (ActionKind.W, *entry[1:])
    }
    merged = []
    for order in orders:
        result: Entries = []
        for kind, stage, microbatch in order:
            whole = (ActionKind.I, stage, microbatch)
            if kind is ActionKind.W and whole not in apart:
                result[-1] = (ActionKind.B, stage, microbatch)
            else:
                result.append((kind, stage, microbatch))
        merged.append(result)
    return merged
