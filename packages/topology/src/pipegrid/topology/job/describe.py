"""The world as a table, ranks x modules. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from pipegrid.core.tables import table
from pipegrid.topology.grid import runs_of, span_of
from pipegrid.topology.hyper_comm_grid import HyperCommGrid


def describe(grids: Mapping[str, HyperCommGrid], *, max_rows: int = 64, color: bool = False) -> str:
    """The world as a table, ranks x modules: a row is a rank with its coordinates in each module.

    Drawn by rich where it is installed (the extra ``describe``), else in plain text.

    Args:
        grids: module name to grid, for example from `place`.
        max_rows: a larger world has a row per stretch of ranks with the same modules, with the modules' sizes.
        color: whether to use a terminal's colours; rich only.

    Examples:
        >>> "pp1" in describe(place({"images": {"dp": 2}, "language": {"pp": 2}}, world_size=4))
        True
    """
    world_size = max(grid.world_size for grid in grids.values()) if grids else 0
    if world_size <= max_rows:
        rows = [(str(rank), *(_coords(grid, rank) for grid in grids.values())) for rank in range(world_size)]
        return table(("rank", *grids), rows, color=color)
    bounds = {0, world_size}
    for grid in grids.values():
        for run in runs_of(grid.ranks):
            bounds |= {run.start, run.stop}
    rows = [
        (span_of(range(start, stop)), *(_sizes(grid) if start in grid.ranks else "" for grid in grids.values()))
        for start, stop in pairwise(sorted(bounds))
    ]
    return table(("ranks", *grids), rows, color=color)


def _coords(grid: HyperCommGrid, rank: int) -> str:
    return " ".join(f"{dim}{at}" for dim, at in grid.coords(rank).items()) if rank in grid.ranks else ""


def _sizes(grid: HyperCommGrid) -> str:
    return " ".join(f"{dim}={size}" for dim, size in zip(grid.dim_names, grid.shape, strict=True))
