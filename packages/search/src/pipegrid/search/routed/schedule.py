"""The step of given routes: a plan with an order for each actor, from list schedules that are improved."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from typing import get_args

from attrs import field, frozen

from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Action, Actor, Plan, Routes, check_routes, compute_plan, require_plan
from pipegrid.plans.simulate import Costs, activation_sizes, unit_costs
from pipegrid.plans.verify import as_limit
from pipegrid.search.calls import RoutedProblem
from pipegrid.search.candidates import with_kept
from pipegrid.search.list_scheduler import First, Listed, Policy, list_schedule
from pipegrid.search.routed.bound import routed_bound
from pipegrid.search.routed.reroute import as_speeds

UNIT = 100_000
"""Operations scheduled at an effort of 1: about a third of a second."""


@frozen
class RoutedStep:
    """A plan of computes for routes, with the figures of its schedule.

    Attributes:
        plan: the plan.
        makespan: until its last action ends.
        bound: no plan with these actors, whatever its routes, is shorter.
        peaks: per actor, the most it holds, in the unit of the memory limit.

    Examples:
        >>> from pipegrid.plans import Routes, one_f_one_b
        >>> plan = one_f_one_b(2, 4)
        >>> routes = reroute(Routes.identity(2, 4), {0: [1]}, plan=plan)
        >>> step = schedule_routes(plan, routes, effort=0.1)
        >>> step.makespan, len(step.peaks)
        (24.0, 3)
    """

    plan: Plan
    makespan: float
    bound: float
    peaks: Mapping[Actor, float] = field(repr=False)


def schedule_routes(
    plan: Plan,
    routes: Routes,
    costs: Costs | None = None,
    memory_limit: float | Iterable[float] | None = None,
    *,
    speeds: Mapping[Actor, float] | None = None,
    whole: bool = False,
    effort: float = 1.0,
) -> RoutedStep:
    """The shortest step for ``routes`` that the effort finds, with backwards split into ``I`` and ``W``.

    Actors start the oldest unit that is ready, backwards first, forwards first, or in turn; ``W`` fills what is left
    (see `list_schedule`). Then units are made older or younger at random, and what is no worse is kept, until a step is
    as short as `routed_bound`, or the effort is spent: a few hundred schedules of a small step, three of a large one.
    The effort counts operations and the draws have a fixed seed, so the result is the same on every rank. Lower and
    verify the plan as any other. Routes by which all replicas act alike give the plan of one.

    Args:
        plan: the undisturbed plan, which says graph, placement and forward-only stages.
        routes: to living actors, such as `reroute` gives.
        costs: times, memory and messages (None: `unit_costs`).
        memory_limit: the most that an actor holds, one number or one per position, in the unit of ``costs.activation``
            (by default microbatches), counted from the F of a unit to the end of its W. None: unlimited.
        speeds: as of `reroute`.
        whole: backwards are not split.
        effort: scales the number of schedules tried.

    Raises:
        PlanError: routes that do not fit the plan, a stage on several positions, slices, or a limit below the memory of
            one unit.

    Examples:
        >>> from pipegrid.plans import Routes, one_f_one_b
        >>> plan = one_f_one_b(2, 4)
        >>> routes = reroute(Routes.identity(2, 4), {0: [1]}, plan=plan)
        >>> step = schedule_routes(plan, routes, effort=0.1)
        >>> step.bound <= step.makespan
        True
    """
    problem = routed_problem(plan, routes, costs, memory_limit, speeds=speeds, whole=whole)
    bound = routed_bound(problem)
    found = improved(problem, bound, effort)
    orders = {actor: list(starmap(Action, order)) for actor, order in found.orders.items()}
    routes = problem.routes
    routed = compute_plan(
        [orders.get(Actor(p, r), []) for r in range(routes.num_replicas) for p in range(plan.num_positions)],
        graph=plan.graph,
        placement=plan.placement,
        num_microbatches=routes.num_units,
        forward_only=plan.forward_only,
        routes=routes,
    )
    return RoutedStep(routed, found.makespan, bound, found.peaks)


def routed_problem(
    plan: Plan,
    routes: Routes,
    costs: Costs | None = None,
    memory_limit: float | Iterable[float] | None = None,
    *,
    speeds: Mapping[Actor, float] | None = None,
    whole: bool = False,
) -> RoutedProblem:
    """The problem of `schedule_routes`, whose arguments and errors these are."""
    require_plan(plan)
    check_routes(routes, plan.graph, plan.placement, forward_only=plan.forward_only)
    if plan.num_slices > 1:
        raise PlanError(f"microbatches are cut into {plan.num_slices} slices; routes are for whole ones")
    shared = [stage for stage, places in enumerate(plan.placement) if len(places) > 1]
    if shared:
        raise PlanError(f"stage {shared[0]} lies on positions {plan.placement[shared[0]]}; give each stage one")
    costs = with_kept(plan, costs or unit_costs(plan))
    given = [memory_limit] * plan.num_positions if not isinstance(memory_limit, Iterable) else list(memory_limit)
    if len(given) != plan.num_positions:
        raise PlanError(f"memory_limit has {len(given)} numbers; the plan has {plan.num_positions} positions")
    if routes.is_identity:  # then a plan has one order per position
        routes = Routes.identity(1, routes.units[0])
    sizes, limits, without = activation_sizes(plan, costs), tuple(map(as_limit, given)), frozenset(plan.forward_only)
    pace = as_speeds(speeds)
    problem = RoutedProblem(routes, plan.graph, plan.placement, costs, sizes, limits, pace, without, whole)
    for position, limit in enumerate(problem.limits):
        if problem.held(position) > limit * (1 + 1e-9):
            raise PlanError(
                f"memory_limit {limit:g} of position {position} does not hold one unit; the least that works is "
                f"{problem.held(position):g}"
            )
    return problem


def improved(problem: RoutedProblem, goal: float, effort: float) -> Listed:
    """The shortest of the list schedules that the effort tries, until one is as short as ``goal``."""
    rng = random.Random(0)  # noqa: S311 -- no secret
    firsts: Sequence[First] = get_args(First)
    units = problem.routes.num_units
    tries = max(len(firsts), int(effort * UNIT / (3 * len(problem.calls.seat))))
    best: tuple[tuple[float, float], First, list[float], Listed] | None = None
    for number in range(tries):
        younger, first = [0.0] * units, firsts[number % len(firsts)]
        if best is not None and number >= len(firsts):
            younger, first = list(best[2]), best[1] if rng.random() < 0.7 else firsts[int(rng.random() * len(firsts))]
            for _ in range((1, 2, 4)[int(rng.random() * 3)]):
                younger[int(rng.random() * units)] += (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)[int(rng.random() * 6)]
        found = list_schedule(problem, Policy(first, younger=younger, later=False))
        value = found.makespan, math.fsum(max(0.0, end - goal) for end in found.ends.values())
        if best is None or value <= best[0]:
            best = (value, first, younger, found)
        if found.makespan <= goal * (1 + 1e-9):
            break
    assert best is not None
    return best[3]
