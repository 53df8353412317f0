"""Lay the modules of a job on the ranks of the world. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from pipegrid.topology._checks import as_integer, as_mapping, as_names, as_tuple
from pipegrid.topology.errors import PlacementError
from pipegrid.topology.factorization import Factorization
from pipegrid.topology.hyper_comm_grid import HyperCommGrid
from pipegrid.topology.relations import Relation, relation
from pipegrid.topology.table import text_table
from pipegrid.topology.world import resolve_world_size


def place(
    modules: Mapping[str, Mapping[str, int]],
    *,
    world_size: int | None = None,
    together: Iterable[Sequence[str]] = (),
    offsets: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> dict[str, HyperCommGrid]:
    """A grid for each module, one after another unless told otherwise, covering the world exactly.

    Args:
        modules: per module its dimensions and their sizes, the fastest first.
        world_size: how many ranks; None asks the default process group, then WORLD_SIZE.
        together: sets of modules that stand on the same ranks. They start at the same rank; a smaller module
            of a set is nested in a larger one.
        offsets: first ranks of the modules that shall not follow the one before.
        backend: the backend of all grids' groups.

    Returns:
        the grids, in the order of ``modules``.

    Raises:
        PlacementError: a rank without a module (a gap, or left over at the end), modules that overlap in
            part, or more ranks than the world has; with a table of the modules and their ranks.
        PlacementError: something of another kind among the arguments.
        GridShapeError: a module's dimensions are no grid.
    """
    world_size = resolve_world_size(world_size)
    modules = {
        name: as_mapping(dims, f"the dimensions of module {name!r}", "names to sizes", error=PlacementError)
        for name, dims in as_mapping(modules, "modules", "names to dimensions", error=PlacementError).items()
    }
    if not modules:
        raise PlacementError(f"there are no modules to place on {world_size} ranks; give at least one")
    sets = as_tuple(together, "together", "sets of module names", error=PlacementError, ordered=False)
    first = {} if offsets is None else as_mapping(offsets, "offsets", "names to first ranks", error=PlacementError)
    starts = _starts(
        {name: Factorization(dims.values(), dims).size for name, dims in modules.items()},
        together=[as_names(names, "a set of together", error=PlacementError) for names in sets],
        offsets={
            name: as_integer(rank, f"the offset of {name!r}", least=0, error=PlacementError)
            for name, rank in first.items()
        },
    )
    boxes = {name: Factorization(dims.values(), dims, starts[name]) for name, dims in modules.items()}
    problems = [*_overlaps(boxes), *_uncovered(boxes, world_size)]
    if problems:
        rows = [
            (name, " ".join(f"{dim}={size}" for dim, size in modules[name].items()), str(box.size), _span(box))
            for name, box in boxes.items()
        ]
        table = text_table(("module", "dimensions", "size", "ranks"), rows)
        raise PlacementError(
            f"the modules do not fit a world of {world_size} ranks: {'; '.join(problems)}.\n{table}\n"
            f"Change sizes so that they fill the world, or say which modules stand together or at which offsets."
        )
    return {
        name: HyperCommGrid(box.shape, box.dim_names, box.offset, backend, world_size=world_size)
        for name, box in boxes.items()
    }


def _starts(
    modules: Mapping[str, int],
    *,
    together: list[Sequence[str]],
    offsets: dict[str, int],
) -> dict[str, int]:
    company: dict[str, Sequence[str]] = {}
    for names in together:
        for name in names:
            if name in company:
                raise PlacementError(f"module {name!r} stands together in two sets; name it in one of them")
            company[name] = names
    for name in [*company, *offsets]:
        if name not in modules:
            raise PlacementError(f"unknown module {name!r}; the known ones are {list(modules)}")
    starts: dict[str, int] = {}
    cursor = 0
    for name, size in modules.items():
        placed = [other for other in company.get(name, ()) if other in starts]
        if placed and name in offsets:
            raise PlacementError(
                f"module {name!r} has an offset, but stands together with {placed[0]!r}, which is placed already; "
                f"give the offset for {placed[0]!r} alone"
            )
        starts[name] = starts[placed[0]] if placed else offsets.get(name, cursor)
        cursor = max(cursor, starts[name] + size)
    return starts


def _span(box: Factorization | range) -> str:
    ranks = box if isinstance(box, range) else box.ranks
    return f"{ranks.start}..{ranks.stop - 1}"


def _overlaps(boxes: Mapping[str, Factorization]) -> list[str]:
    return [
        f"{a!r} ({_span(boxes[a])}) and {b!r} ({_span(boxes[b])}) overlap in part"
        for a, b in combinations(boxes, 2)
        if relation(boxes[a], boxes[b]) is Relation.OVERLAPPING
    ]


def _uncovered(boxes: Mapping[str, Factorization], world_size: int) -> list[str]:
    problems = []
    covered = 0
    for ranks in sorted((box.ranks for box in boxes.values()), key=lambda ranks: (ranks.start, ranks.stop)):
        if ranks.start > covered:
            problems.append(f"ranks {_span(range(covered, ranks.start))} hold no module (a gap)")
        covered = max(covered, ranks.stop)
    if covered > world_size:
        problems.append(f"they need {covered} ranks, {covered - world_size} more than there are")
    if covered < world_size:
        problems.append(f"ranks {_span(range(covered, world_size))} are left over")
    return problems
