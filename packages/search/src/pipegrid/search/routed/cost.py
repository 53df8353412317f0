"""The cost of a dead rank: the time of a step without it, and the memory that its peers need for that."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve, frozen

from pipegrid.core.fields import Count, checked
from pipegrid.core.tables import text_table
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Actor, Plan, Routes
from pipegrid.plans.simulate import Costs, simulate, unit_costs
from pipegrid.search.calls import RoutedProblem
from pipegrid.search.routed.bound import routed_bound
from pipegrid.search.routed.reroute import reroute
from pipegrid.search.routed.schedule import improved, routed_problem


def least_room(
    plan: Plan,
    routes: Routes,
    makespan: float,
    costs: Costs | None = None,
    *,
    speeds: Mapping[Actor, float] | None = None,
    effort: float = 0.3,
) -> tuple[float, ...]:
    """Per position, the units that its actors hold beyond the peak of the undisturbed ``plan``, for a step so short.

    As few on every position alike as the effort finds, then fewer on each where that is enough. Other arguments are
    those of `schedule_routes`.

    Raises:
        PlanError: no step so short was found with any memory.

    Examples:
        >>> from pipegrid.plans import Routes, one_f_one_b
        >>> plan = one_f_one_b(2, 4)
        >>> routes = reroute(Routes.identity(2, 4), {0: [1]}, plan=plan)
        >>> least_room(plan, routes, makespan=30.0)
        (0.0, 0.0)
    """
    costs = costs or unit_costs(plan)
    problem = routed_problem(plan, routes, costs, speeds=speeds)
    peaks, units = simulate(plan, costs).peaks(), [problem.held(place) for place in range(plan.num_positions)]

    def peaks_within(extra: Sequence[float]) -> list[float] | None:
        """The extra units of a step that is short enough with ``extra`` of them at most."""
        limits = [peak + more * unit for peak, more, unit in zip(peaks, extra, units, strict=True)]
        bounded = evolve(problem, limits=tuple(limits))
        if routed_bound(bounded) > makespan * (1 + 1e-9):
            return None
        found = improved(bounded, makespan, effort)
        if found.makespan > makespan * (1 + 1e-9):
            return None
        most = [max(held for actor, held in found.peaks.items() if actor.position == p) for p in range(len(peaks))]
        return [max(0.0, round((held - peak) / unit, 9)) for held, peak, unit in zip(most, peaks, units, strict=True)]

    if peaks_within([routes.num_units] * len(peaks)) is None:
        raise PlanError(f"no step of {makespan:g} was found, however much memory there is")
    counts = itertools.count()
    found = next(extra for extra in (peaks_within([more] * len(peaks)) for more in counts) if extra is not None)
    for position in range(len(peaks)):
        while found[position] > 0:
            fewer = peaks_within([*found[:position], max(0.0, found[position] - 1), *found[position + 1 :]])
            if fewer is None:
                break
            found = fewer
    return tuple(found)


@frozen
class LostRank:
    """A step after the death of a rank, beside the undisturbed one.

    Attributes:
        plan: the undisturbed one, of one replica.
        num_replicas: before the death.
        position: where, in one replica, a rank died.
        undisturbed: the makespan without a death.
        makespans: with 0, 1, 2, ... more units of memory on each position than the undisturbed plan, until the step is
            as short as with any memory.
        bound: no makespan is shorter.
        whole: with backwards that are not split, and any memory.
        room: per position, the units of memory that are enough for the last of ``makespans``.

    Examples:
        >>> from pipegrid.plans import one_f_one_b
        >>> found = lost_rank_costs(one_f_one_b(2, 4), 2, positions=[0])[0]
        >>> found.position, found.undisturbed, found.whole
        (0, 15.0, 24.0)
    """

    plan: Plan
    num_replicas: int
    position: int
    undisturbed: float
    makespans: tuple[float, ...]
    bound: float
    whole: float
    room: tuple[float, ...]

    def __str__(self) -> str:
        shape = f"{self.plan.num_positions} x {self.num_replicas} x {self.plan.num_microbatches}"
        room = [f"{more:g} on stage {where}" for where, more in enumerate(self.room) if more]
        return (
            f"one dead rank at stage {self.position} of {shape}: {self.makespans[-1]:g} for {self.undisturbed:g}, "
            f"{self.share(self.makespans[-1])}, with room for more microbatches ({', '.join(room) or 'none'}); "
            f"{self.share(self.makespans[0])} without, {self.share(self.whole)} with whole backwards"
        )

    def share(self, makespan: float) -> str:
        """The change from the undisturbed step, as text."""
        return f"{100 * (makespan / self.undisturbed - 1):+.0f}%"


def lost_rank_costs(
    plan: Plan, num_replicas: Count, costs: Costs | None = None, *, positions: Iterable[int] | None = None
) -> list[LostRank]:
    """The cost of one dead rank of each position to a job that runs ``plan`` in ``num_replicas`` replicas.

    ``positions``: those asked for (None: all). ``costs``: as of `schedule_routes`.

    Raises:
        PlanError: fewer than two replicas, and what `schedule_routes` raises.

    Examples:
        >>> from pipegrid.plans import one_f_one_b
        >>> row = lost_rank_costs(one_f_one_b(2, 4), 2, positions=[0])[0]
        >>> row.position, row.undisturbed, row.makespans[-1]
        (0, 15.0, 24.0)
    """
    if checked(num_replicas, Count, "num_replicas", PlanError) < 2:
        raise PlanError("num_replicas is 1; a dead rank's units go to its peers in other replicas, give at least 2")
    costs = costs or unit_costs(plan)
    undisturbed, rows = simulate(plan, costs), []
    for position in range(plan.num_positions) if positions is None else positions:
        dead = {position: [num_replicas - 1]}
        routes = reroute(Routes.identity(num_replicas, plan.num_microbatches), dead, plan=plan)
        free = routed_problem(plan, routes, costs)
        bound = routed_bound(free)
        shortest = improved(free, bound, 1.0).makespan
        unsplit = evolve(free, whole=True)
        whole = improved(unsplit, routed_bound(unsplit), 1.0).makespan
        makespans = _trade(free, undisturbed.peaks(), shortest)
        room = least_room(plan, routes, makespans[-1], costs)
        rows.append(LostRank(plan, num_replicas, position, undisturbed.makespan, makespans, bound, whole, room))
    return rows


def _trade(problem: RoutedProblem, peaks: Sequence[float], shortest: float) -> tuple[float, ...]:
    """The makespans with 0, 1, 2, ... more units on each position than ``peaks``, down to the shortest."""
    makespans: list[float] = []
    while not makespans or makespans[-1] > shortest * (1 + 1e-9):
        limits = [peak + len(makespans) * problem.held(place) for place, peak in enumerate(peaks)]
        bounded = evolve(problem, limits=tuple(limits))
        found = improved(bounded, max(shortest, routed_bound(bounded)), 1.0).makespan
        makespans.append(min([found, *makespans[-1:]]))
    return tuple(makespans)


def lost_rank_table(rows: Sequence[LostRank]) -> str:
    """``rows`` of `lost_rank_costs` as a table, a stage each.

    Examples:
        >>> from pipegrid.plans import one_f_one_b
        >>> "stage" in lost_rank_table(lost_rank_costs(one_f_one_b(2, 4), 2, positions=[0]))
        True
    """
    most = max((len(row.makespans) for row in rows), default=0)
    headings = ["dead at", "whole", *(f"room +{extra}" for extra in range(most)), "bound", "enough room, per position"]
    cells = []
    for row in rows:
        trade = [row.whole, *row.makespans, *([row.makespans[-1]] * (most - len(row.makespans)))]
        figures = (f"{makespan:g} {row.share(makespan)}" for makespan in trade)
        room = " ".join(f"{more:g}" for more in row.room)
        cells.append((f"stage {row.position}", *figures, f"{row.bound:g}", room))
    return text_table(headings, cells, right=range(1, len(headings) - 1)) + "\n"
