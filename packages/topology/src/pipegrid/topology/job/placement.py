"""Place the modules of a job on the ranks of the world, and describe them as a table. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

from pipegrid.core.fields import Count, Index, checked, checked_arguments, shown
from pipegrid.core.tables import table, text_table
from pipegrid.topology.errors import PlacementError
from pipegrid.topology.grid import Grid, Relation, relation, runs_of, span_of
from pipegrid.topology.hyper_comm_grid import HyperCommGrid
from pipegrid.topology.world import resolve_world_size


def place(
    modules: Mapping[str, Mapping[str, int]],
    *,
    world_size: int | None = None,
    together: Iterable[Sequence[str]] = (),
    offsets: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> dict[str, HyperCommGrid]:
    """A grid per module, one after another by default, that together cover the world exactly.

    Args:
        modules: per module its dims and their sizes, the fastest first.
        world_size: number of ranks; None is the default process group's, or else WORLD_SIZE of the launcher.
        together: sets of modules on the same ranks. They start at the same rank; a smaller module of a set is nested
            in a larger one.
        offsets: first ranks of modules that do not follow the one before.
        backend: of all grids' groups.

    Returns:
        The grids, in the order of ``modules``.

    Raises:
        PlacementError: a rank without a module (a gap, or left over at the end), modules that overlap in
            part, or more ranks than the world has; with a table of the modules and their ranks.
        GridError: a module's dims are no grid.

    Examples:
        >>> grids = place({"images": {"dp": 2}, "language": {"tp": 2, "pp": 2}}, world_size=6)
        >>> grids["language"].ranks
        range(2, 6)
    """
    world_size = resolve_world_size(world_size)
    if not isinstance(modules, Mapping) or not all(isinstance(dims, Mapping) for dims in modules.values()):
        raise PlacementError(f"modules are {shown(modules)}; each must have names of dims and sizes: {{'tp': 2}}")
    sizes = {name: Grid(tuple(dims.values()), tuple(dims)).size for name, dims in modules.items()}
    offsets = checked(offsets, Mapping[str, Any] | None, "offsets", PlacementError)
    together = list(checked(together, Iterable[Any], "together", PlacementError))
    starts = _starts(sizes, together=together, offsets=dict(offsets or {}))
    placed = {name: Grid(tuple(dims.values()), tuple(dims), starts[name]) for name, dims in modules.items()}
    problems = [*_overlaps(placed), *_uncovered(placed, world_size)]
    if problems:
        texts = {name: " ".join(f"{dim}={size}" for dim, size in dims.items()) for name, dims in modules.items()}
        rows = [(name, texts[name], str(grid.size), span_of(grid.ranks)) for name, grid in placed.items()]
        drawn = text_table(("module", "dimensions", "size", "ranks"), rows)
        raise PlacementError(f"the modules do not fit a world of {world_size} ranks: {'; '.join(problems)}.\n{drawn}")
    return {
        name: HyperCommGrid(grid.shape, grid.dim_names, grid.rank_offset, backend, world_size=world_size)
        for name, grid in placed.items()
    }


def _starts(modules: Mapping[str, int], *, together: list[Sequence[str]], offsets: dict[str, int]) -> dict[str, int]:
    if any(isinstance(names, str) or not isinstance(names, Collection) for names in together):
        raise PlacementError(f"together is {together}; it must be a list of sets of modules: [('a', 'b')]")
    company = {name: names for names in together for name in names}
    named = [name for names in together for name in names]
    if len(company) < len(named) or not {*company, *offsets} <= modules.keys():
        raise PlacementError(f"together {together} and offsets {offsets} must name modules of {list(modules)} once")
    starts: dict[str, int] = {}
    cursor = 0
    for name, size in modules.items():
        placed = [other for other in company.get(name, ()) if other in starts]
        if placed and name in offsets:
            raise PlacementError(f"module {name!r} is together with {placed[0]!r}, which alone may have an offset")
        offset = checked(offsets.get(name, cursor), Index, f"the offset of module {name!r}", PlacementError)
        starts[name] = starts[placed[0]] if placed else offset
        cursor = max(cursor, starts[name] + size)
    return starts


def _overlaps(placed: Mapping[str, Grid]) -> list[str]:
    return [
        f"{a!r} ({span_of(placed[a].ranks)}) and {b!r} ({span_of(placed[b].ranks)}) overlap in part"
        for a, b in combinations(placed, 2)
        if relation(placed[a], placed[b]) is Relation.OVERLAPPING
    ]


def _uncovered(placed: Mapping[str, Grid], world_size: int) -> list[str]:
    problems = []
    covered = 0
    for first, end in sorted((grid.rank_offset, grid.rank_offset + grid.size) for grid in placed.values()):
        if first > covered:
            problems.append(f"ranks {covered}..{first - 1} hold no module (a gap)")
        covered = max(covered, end)
    if covered > world_size:
        problems.append(f"they need {covered} ranks, {covered - world_size} more than there are")
    if covered < world_size:
        problems.append(f"ranks {covered}..{world_size - 1} are left over")
    return problems


@checked_arguments(PlacementError, kinds=True)
def describe(grids: Mapping[str, HyperCommGrid], *, max_rows: Count = 64, color: bool = False) -> str:
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
