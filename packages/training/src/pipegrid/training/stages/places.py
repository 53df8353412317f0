"""Which stages of a layout the ranks of a grid have, by the name of a schedule."""

from __future__ import annotations

from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.schedules import PlanError, stage_places
from pipegrid.topology import HyperCommGrid
from pipegrid.training.errors import CutError


def pp_size(grid: HyperCommGrid) -> int:
    """The number of pipeline ranks of a grid; 1 where it has no dim ``pp``."""
    return grid.dim_size("pp") if "pp" in grid.dim_names else 1


def places_on(layout: PipelineParallelLayerLayout, grid: HyperCommGrid, schedule: str | None) -> tuple[int, ...]:
    """The pp rank of each stage of ``layout`` under ``schedule``; None: one stage on each rank.

    Raises:
        CutError: the layout has other than pp x chunks stages, with the chunks that the schedule has on a rank.
        PlanError: no schedule has that name.
    """
    pp, count = pp_size(grid), len(layout.stages)
    chunks, rest = divmod(count, pp)
    places = tuple(range(pp))
    if schedule is not None:
        try:
            places = stage_places(schedule, pp, chunks if chunks and not rest else None)
        except PlanError:  # another number of chunks than the schedule's, or no schedule
            places = stage_places(schedule, pp)
    if len(places) != count:
        by = "one stage on each rank" if schedule is None else f"the places of {schedule}"
        raise CutError(
            f"layout {layout.short_text()} has {count} stages, and {len(places)} are needed: {by} of pp {pp} is "
            f"{places}{'; name the schedule of several stages on a rank, schedule=...' if schedule is None else ''}"
        )
    return places
