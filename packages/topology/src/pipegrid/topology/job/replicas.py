"""The data contract: which samples of a batch each replica has. No torch.

A batch is one sequence of samples. A module's replicas (its data-parallel shares) have consecutive blocks of it, in
their order; `replica_bounds` is the one definition of where a block begins. Loaders, losses and bridges all cut by it,
so two modules with different numbers of replicas agree which sample is which.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pipegrid.core.fields import Count, Index, checked, checked_arguments
from pipegrid.topology.errors import GridError
from pipegrid.topology.grid import Dims, dims_of
from pipegrid.topology.hyper_comm_grid import HyperCommGrid
from pipegrid.topology.world import resolve_rank


@checked_arguments(GridError, kinds=True)
def replica_of(grid: HyperCommGrid, rank: int | None = None, *, dims: Dims = ("dp",)) -> tuple[int, int]:
    """``(replica, replicas)`` of a rank: its replica and the number of them.

    ``dims`` are the dims that shard the batch; those that the grid does not have count as size one, and of several the
    first in the grid varies fastest. Ranks that differ in other dims (tp, cp, pp) have the same samples.

    Examples:
        >>> replica_of(HyperCommGrid([2, 2], ["tp", "dp"], world_size=4), rank=2)
        (1, 2)
    """
    coords = grid.coords(resolve_rank(rank))
    wanted = dims_of(dims)
    replica, replicas = 0, 1
    for name in grid.dim_names:
        if name in wanted:
            replica += coords[name] * replicas
            replicas *= grid.dim_size(name)
    return replica, replicas


data_lane = replica_of  # as the data contract of a pipeline's lanes calls it


def replica_bounds(num_samples: int, replicas: int) -> tuple[int, ...]:
    """The contract: replica ``i`` of ``replicas`` has the samples from ``bounds[i]`` up to ``bounds[i + 1]``.

    Block sizes differ by at most one and the first ``num_samples % replicas`` replicas have one sample more:
    ``replica_bounds(10, 4) == (0, 3, 6, 8, 10)``. A replica may have no samples.
    """
    num_samples = checked(num_samples, Index, "num_samples", GridError)
    replicas = checked(replicas, Count, "replicas", GridError)
    size, larger = divmod(num_samples, replicas)
    return tuple(replica * size + min(replica, larger) for replica in range(replicas + 1))


def replica_sizes(num_samples: int, replicas: int) -> tuple[int, ...]:
    """Number of samples of each replica, by `replica_bounds`."""
    return tuple(stop - start for start, stop in itertools.pairwise(replica_bounds(num_samples, replicas)))


@checked_arguments(GridError, kinds=True)
def replica_samples(
    num_samples: int,
    grid: HyperCommGrid,
    rank: int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    dims: Dims = ("dp",),
) -> range:
    """Indices of the samples of the rank's replica, by `replica_bounds` or, where given, by the replicas' ``sizes``.

    Examples:
        >>> replica_samples(10, HyperCommGrid([2, 2], ["tp", "dp"], world_size=4), rank=2)
        range(5, 10)
    """
    replica, replicas = replica_of(grid, rank, dims=dims)
    if sizes is None:
        bounds = replica_bounds(num_samples, replicas)
    else:
        sizes = checked(sizes, tuple[Index, ...], "sizes", GridError)
        if len(sizes) != replicas or sum(sizes) != num_samples:
            raise GridError(f"sizes {list(sizes)} do not share {num_samples} samples among {replicas} replicas")
        bounds = (0, *itertools.accumulate(sizes))
    return range(bounds[replica], bounds[replica + 1])
