"""The data contract: which samples of a batch each data lane has. No torch.

A batch is one sequence of samples. A module's data lanes (its dp replicas) have consecutive blocks of it, in lane
order; `lane_bounds` is the one definition of where a block begins. Loaders, losses and bridges all cut by it, so two
modules with different numbers of lanes agree which sample is which.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from pipegrid.topology._checks import as_dims, as_integer, as_kind, as_tuple, index_of
from pipegrid.topology.errors import GridShapeError
from pipegrid.topology.hyper_comm_grid import HyperCommGrid
from pipegrid.topology.world import resolve_rank

_MOST_LANES = 1 << 24  # the sizes of all lanes are listed, and no world has so many ranks


def data_lane(grid: HyperCommGrid, rank: int | None = None, *, dims: str | Iterable[str] = ("dp",)) -> tuple[int, int]:
    """``(lane, lanes)``: which of how many shares of the batch the rank works on.

    ``dims`` are the dimensions that shard the batch; those that the grid does not have count as size one, and
    of several the first in the grid varies fastest. Other dimensions (tp, cp, pp) see the same samples.

    Raises:
        CoordinateError: the rank is not in the grid.
        GridShapeError, UnknownDimensionError: no grid, or something among ``dims`` that is no name.
    """
    as_kind(grid, "grid", HyperCommGrid, "place() makes them", error=GridShapeError)
    coords = grid.coords(resolve_rank(rank))
    wanted = frozenset(as_dims(dims))
    lane, lanes = 0, 1
    for name in grid.dim_names:
        if name in wanted:
            lane += coords[name] * lanes
            lanes *= grid.dim_size(name)
    return lane, lanes


def lane_bounds(num_samples: int, lanes: int) -> tuple[int, ...]:
    """The contract: lane ``i`` of ``lanes`` has the samples from ``bounds[i]`` up to ``bounds[i + 1]``.

    Block sizes differ by at most one and the first ``num_samples % lanes`` lanes have one sample more:
    ``lane_bounds(10, 4) == (0, 3, 6, 8, 10)``. A lane may be empty.

    Raises:
        GridShapeError: a negative number of samples, no lanes, or more lanes than any world has ranks.
    """
    num_samples = as_integer(num_samples, "num_samples", least=0)
    lanes = as_integer(lanes, "the number of lanes", least=1, most=_MOST_LANES)
    size, larger = divmod(num_samples, lanes)
    return tuple(lane * size + min(lane, larger) for lane in range(lanes + 1))


def lane_sizes(num_samples: int, lanes: int) -> tuple[int, ...]:
    """Number of samples of each data lane, by `lane_bounds`.

    Raises:
        GridShapeError: as for `lane_bounds`.
    """
    return tuple(stop - start for start, stop in itertools.pairwise(lane_bounds(num_samples, lanes)))


def lane_samples(
    num_samples: int,
    grid: HyperCommGrid,
    rank: int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    dims: str | Iterable[str] = ("dp",),
) -> range:
    """The indices of the batch's samples that the rank works on.

    ``sizes`` gives each lane's share where it is not `lane_sizes`.

    Raises:
        GridShapeError: ``sizes`` is not one number of samples per lane, or does not sum to ``num_samples``.
        CoordinateError: the rank is not in the grid.
    """
    lane, lanes = data_lane(grid, rank, dims=dims)
    num_samples = as_integer(num_samples, "num_samples", least=0)
    given = lane_sizes(num_samples, lanes) if sizes is None else sizes
    listed = as_tuple(given, "sizes", "samples, one number per lane", error=GridShapeError)
    shares = [size for size in map(index_of, listed) if size is not None and size >= 0]
    if len(shares) != len(listed) or len(shares) != lanes or sum(shares) != num_samples:
        raise GridShapeError(
            f"sizes {list(listed)} do not share {num_samples} samples among {lanes} lanes; "
            f"give {lanes} non-negative numbers that sum to {num_samples}"
        )
    bounds = (0, *itertools.accumulate(shares))
    return range(bounds[lane], bounds[lane + 1])
