"""Named schedules and `greedy` side by side, at the same costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from attrs import frozen

from pipegrid.core.fields import Count, Name, checked, checked_arguments, nearest
from pipegrid.core.tables import table, text_table
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators import SCHEDULES
from pipegrid.plans.plan import Plan
from pipegrid.plans.simulate import Costs, GivenCosts, OtherCutError, Simulation, simulate, with_slack
from pipegrid.plans.verify import as_limit
from pipegrid.search.pairs import hides
from pipegrid.search.search import greedy
from pipegrid.timeline import amount, time_text


@frozen
class Row:
    """The figures of one schedule (see `Simulation`).

    Attributes:
        schedule: its name.
        plan: the plan of computes.
        makespan: until the last action ends.
        bubble_of_makespan: the idle share of all positions' time until then.
        bubble_of_span: the idle share of their time between their own first and last compute.
        peak_until_weight: the most live activations of a position, in microbatches, each until its ``B`` or ``W``.
        peak_until_input: the same, each until its ``B`` or ``I``.
        fits: the peak keeps to the cap.

    Examples:
        >>> row = compare(4, 8, names=["zero_bubble_v"])[0]
        >>> row.name, row.peak_until_weight, row.fits
        ('zero_bubble_v (2 chunks)', 4.0, True)
    """

    schedule: str
    plan: Plan
    makespan: float
    bubble_of_makespan: float
    bubble_of_span: float
    peak_until_weight: float
    peak_until_input: float
    fits: bool

    @property
    def name(self) -> str:
        """The schedule, and its chunks and slices where it has more than one."""
        counts = {"chunks": self.plan.num_chunks, "slices": self.plan.num_slices}
        several = ", ".join(f"{count} {what}" for what, count in counts.items() if count > 1)
        return f"{self.schedule} ({several})" if several else self.schedule


COMPARED = (*(name for name, schedule in SCHEDULES.items() if schedule.trains and not schedule.sliced), "greedy")
"""The schedules that `compare` knows, of whole microbatches."""

COMPARED_IN_SLICES = tuple(name for name, schedule in SCHEDULES.items() if schedule.sliced)
"""More schedules that it knows, where microbatches are cut into slices."""


@checked_arguments(PlanError)
def compare(
    num_positions: Count,
    num_microbatches: Count,
    *,
    costs: GivenCosts | None = None,
    memory_limit: float | None = None,
    num_chunks: Count = 2,
    num_slices: Count = 1,
    names: Iterable[str] | None = None,
) -> list[Row]:
    """Every training schedule of the table, and `greedy`, fastest first; those over the cap last.

    ``costs``: a single number is the cost of one position's slice of the model, a list the costs of consecutive
    slices; schedules with more stages cut the model further. ``names`` restricts the table. ``num_chunks`` is for the
    schedules that take any number. With ``num_slices`` above 1, the schedules that cut microbatches into so many slices
    are there as well. Where ``costs.hidden`` says that pairs save time, a schedule that has them is the better of both
    plans. Schedules whose edges are not those of costs per edge are left out.

    Examples:
        >>> best = compare(4, 8, names=["1f1b", "zero_bubble_v"])[0]
        >>> best.schedule, best.makespan
        ('zero_bubble_v', 25.5)
    """
    costs = costs or Costs()
    limit = as_limit(memory_limit)
    known = (*COMPARED, *(COMPARED_IN_SLICES if num_slices > 1 else ()))
    wanted: tuple[str, ...] = known if names is None else checked(names, tuple[Name, ...], "names", PlanError)
    if unknown := set(wanted).difference(known):
        name = min(unknown)
        raise PlanError(
            f"there is no schedule {name!r} to compare{nearest(name, known)}; choose from {', '.join(known)}"
        )
    rows: list[Row] = []
    mismatch: OtherCutError | None = None
    for name in (name for name in known if name in wanted):
        try:
            plans = (
                _greedy(num_positions, num_microbatches, costs, memory_limit, {1, num_chunks, 2})
                if name == "greedy"
                else [
                    SCHEDULES[name].plan(
                        num_positions,
                        num_microbatches,
                        num_chunks if SCHEDULES[name].chunks is None else None,
                        num_slices=num_slices if SCHEDULES[name].sliced else None,
                        overlap=overlap,
                    )
                    for overlap in ((False, True) if SCHEDULES[name].pairs and hides(costs) else (False,))
                ]
            )
            found = [_row(name, plan, costs, limit) for plan in plans]
        except OtherCutError as error:
            mismatch = error
            continue
        rows += sorted(found, key=_rank)[:1]
    if mismatch is not None and not rows:
        raise mismatch
    return sorted(rows, key=_rank)


def _rank(row: Row) -> tuple[bool, float, float]:
    return (not row.fits, row.makespan, row.peak_until_weight)


def _greedy(
    num_positions: int, num_microbatches: int, costs: Costs, memory_limit: float | None, chunks: set[int]
) -> list[Plan]:
    plans = []
    sizes: dict[str, Any] = {"num_positions": num_positions, "num_microbatches": num_microbatches}
    for stages in (num_positions * number for number in sorted(chunks)):
        with suppress(PlanError, OtherCutError):  # nothing fits under the cap in this many chunks, or the costs do not
            cut = costs.cut_into(stages, slices=num_positions)
            plans.append(greedy(cut, memory_limit, num_stages=stages, **sizes))
    return plans


def played(plan: Plan, costs: Costs) -> Simulation:
    """The plan with ``costs``, of which a number is that of a whole position."""
    beside, edges = plan.stages_beside, plan.graph.stage_edges
    return simulate(plan, costs.cut_into(plan.num_stages, slices=plan.num_positions, beside=beside, edges=edges))


def _row(name: str, plan: Plan, costs: Costs, limit: float) -> Row:
    step = played(plan, costs)
    bubble, of_span = step.bubble(), step.bubble(of="span")
    peak, earlier = step.peak(), step.peak(until="I")
    return Row(name, plan, step.makespan, bubble, of_span, peak, earlier, peak <= with_slack(limit))


HEADINGS = ("schedule", "makespan", "bubble", "within span", "peak until W", "until I")


def comparison_table(rows: Sequence[Row], *, unit: str = "", terminal: bool = False) -> str:
    """``rows`` of `compare` as a table. Peaks are live microbatches; schedules over the memory cap are marked.

    ``terminal``: drawn by rich where it is installed; else plain text.

    Examples:
        >>> print(comparison_table(compare(4, 8, names=["1f1b"])))
        schedule  makespan  bubble  within span  peak until W  until I
        --------  --------  ------  -----------  ------------  -------
        1f1b            33   27.3%        15.8%             4        4
    """
    cells = [
        (
            row.name,
            time_text(row.makespan, unit),
            f"{100 * row.bubble_of_makespan:.1f}%",
            f"{100 * row.bubble_of_span:.1f}%",
            amount(row.peak_until_weight) + ("" if row.fits else " (over)"),
            amount(row.peak_until_input),
        )
        for row in rows
    ]
    right = range(1, len(HEADINGS))
    if terminal:
        return table(HEADINGS, cells, right=right, color=True) + "\n"
    return text_table(HEADINGS, cells, right=right) + "\n"
