"""The result of a search: a plan under the memory limit, with its figures in simulation."""

from __future__ import annotations

from attrs import frozen

from pipegrid.plans.network.network import Objective
from pipegrid.plans.network.problem import Problem
from pipegrid.plans.plan import Plan
from pipegrid.plans.simulate import simulate


@frozen
class Found:
    """A plan of computes that keeps to the memory limit, with its figures in simulation.

    Attributes:
        plan: the plan.
        origin: the schedule or method it comes from.
        makespan: until its last action ends.
        span: the longest time of a position between its first and its last compute.
        peak: the most memory of a position, in the unit of the limit.
        bound: of a `search`: the objective of no plan on this placement is less.
        optimal: of a `search`: whether that, or a search of all orders, proves the plan the best on its placement.
        complete: of a `search`: False if the time limit, or the caller, stopped it.

    Examples:
        >>> from pipegrid.plans import Costs
        >>> found = search(Costs(), 2, num_positions=2, num_microbatches=4, effort=0.1)
        >>> found.peak <= 2, found.bound <= found.makespan
        (True, True)
    """

    plan: Plan
    origin: str
    makespan: float
    span: float
    peak: float
    bound: float = 0.0
    optimal: bool = False
    complete: bool = True


def candidate(origin: str, plan: Plan, problem: Problem) -> Found | None:
    """``plan`` with its figures; None if it does not keep to the cap."""
    simulation = simulate(plan, problem.costs)
    peak = simulation.peak()
    if peak > problem.room:
        return None
    return Found(plan, origin, simulation.makespan, simulation.span, peak)


def value_of(entry: Found, objective: Objective) -> float:
    """The objective of a candidate."""
    return entry.makespan if objective == "makespan" else entry.span


def rank_of(entry: Found, objective: Objective) -> tuple[float, float]:
    """The least is the best: the objective, of equal ones the peak."""
    return value_of(entry, objective), entry.peak
