"""The data contract: which samples of a batch each data lane has. No torch.

A batch is one sequence of samples. A module's data lanes (its dp replicas) have consecutive blocks of it, in lane
order; `lane_bounds` is the one definition of where a block begins. Loaders, losses and bridges all cut by it, so two
modules with different numbers of lanes agree which sample is which.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pipegrid.topology.errors import GridError
from pipegrid.topology.fields import Count, Index, checked
from pipegrid.topology.grid import Dims, dims_of
from pipegrid.topology.hyper_comm_grid import HyperCommGrid
from pipegrid.topology.world import resolve_rank


def data_lane(grid: HyperCommGrid, rank: int | None = None, *, dims: Dims = ("dp",)) -> tuple[int, int]:
    """``(lane, lanes)`` of a rank: its data lane and the number of lanes.

    ``dims`` are the dims that shard the batch; those that the grid does not have count as size one, and of several the
    first in the grid varies fastest. Ranks that differ in other dims (tp, cp, pp) have the same samples.
    """
    coords = grid.coords(resolve_rank(rank))
    wanted = dims_of(dims)
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
    """
    num_samples = checked(num_samples, Index, "num_samples", GridError)
    lanes = checked(lanes, Count, "lanes", GridError)
    size, larger = divmod(num_samples, lanes)
    return tuple(lane * size + min(lane, larger) for lane in range(lanes + 1))


def lane_sizes(num_samples: int, lanes: int) -> tuple[int, ...]:
    """Number of samples of each data lane, by `lane_bounds`."""
    return tuple(stop - start for start, stop in itertools.pairwise(lane_bounds(num_samples, lanes)))


def lane_samples(
    num_samples: int,
    grid: HyperCommGrid,
    rank: int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    dims: Dims = ("dp",),
) -> range:
    """Indices of the samples of the rank's data lane, by `lane_bounds` or, where given, by the lanes' ``sizes``."""
    lane, lanes = data_lane(grid, rank, dims=dims)
    if sizes is None:
        bounds = lane_bounds(num_samples, lanes)
    else:
        sizes = checked(sizes, tuple[Index, ...], "sizes", GridError)
        if len(sizes) != lanes or sum(sizes) != num_samples:
            raise GridError(f"sizes {list(sizes)} do not share {num_samples} samples among {lanes} lanes")
        bounds = (0, *itertools.accumulate(sizes))
    return range(bounds[lane], bounds[lane + 1])
