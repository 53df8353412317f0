"""The ranks of a tied parameter: arithmetic on grids, without communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from pipegrid.core.graph import ModuleGraph
from pipegrid.gradients.errors import GradientError
from pipegrid.topology import GroupSpec

_STAGE_DIM = "pp"

Shard = tuple[tuple[str, int], ...]
"""Coordinates of a shard in the dims that shard or replicate a parameter."""


@frozen
class TieGroup:
    """The ranks with a copy of one shard of a tied parameter."""

    spec: GroupSpec  # the group to create: all copies, ascending by stage, then by rank
    # The ranks whose gradient is a term of the sum. The others are tensor-parallel replicas.
    contributing: frozenset[int]


def tie_groups(name: str, stages: Sequence[int], graph: ModuleGraph, grids: Mapping[str, Any]) -> tuple[TieGroup, ...]:
    """Groups of a tied parameter with copies on ``stages``: one per tp rank, across stages and replicas.

    Modules whose grids agree in all dims but ``pp``, ``dp`` and ``cp`` have one group per shard. With different grids
    (tp 2 beside tp 1), every tp rank must hold the whole parameter: all copies are one group, in which the first tp
    rank of each module contributes.
    """
    alike = shards_alike(stages, graph, grids)
    members: dict[Shard, list[int]] = {}
    shard_of: dict[int, Shard] = {}
    contributing: set[int] = set()
    for stage in sorted(stages):
        for rank, shard in _holders(stage, graph, grids):
            if shard_of.setdefault(rank, shard) != shard and alike:
                raise GradientError(
                    f"tied parameter {name!r}: rank {rank} holds two of the stages {sorted(stages)}, but the shard "
                    f"{dict(shard_of[rank])} of one and {dict(shard)} of another; use one order of dims in their grids"
                )
            ranks = members.setdefault(shard if alike else (), [])
            if rank not in ranks:
                ranks.append(rank)
            if alike or not any(coordinate for _, coordinate in shard):
                contributing.add(rank)
    found = []
    for shard, ranks in sorted(members.items()):
        label = "/".join(["tied", name, *(f"{dim}{index}" for dim, index in shard)])
        found.append(TieGroup(GroupSpec(ranks, label, shared=False), frozenset(contributing.intersection(ranks))))
    return tuple(found)


def shards_alike(stages: Sequence[int], graph: ModuleGraph, grids: Mapping[str, Any]) -> bool:
    """Whether the modules of ``stages`` shard a parameter alike: equal sizes of all dims but stages and replicas."""
    kinds = [_shard_sizes(_grid_of(stage, graph, grids)) for stage in stages]
    return all(kind == kinds[0] for kind in kinds)


def stages_here(stages: Sequence[int], graph: ModuleGraph, grids: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    """The subset of ``stages`` on ``rank``."""
    return tuple(stage for stage in stages if rank in dict(_holders(stage, graph, grids)))


def _holders(stage: int, graph: ModuleGraph, grids: Mapping[str, Any]) -> Iterator[tuple[int, Shard]]:
    """The ranks of a stage, each with its shard of a parameter."""
    module, index = graph.module_of(stage)
    grid = _grid_of(stage, graph, grids)
    depth = grid.dim_size(_STAGE_DIM) if _STAGE_DIM in grid.dim_names else 1
    if depth != graph.depth(module):
        raise GradientError(
            f"module {module!r} has {graph.depth(module)} stages in the graph and pp {depth} in its grid; a tied "
            "parameter needs one stage per pp rank"
        )
    dims = sorted(_shard_sizes(grid))
    for rank in grid.ranks:
        coords = grid.coords(rank)
        if coords.get(_STAGE_DIM, 0) == index:
            yield rank, tuple((dim, coords[dim]) for dim in dims)


def _grid_of(stage: int, graph: ModuleGraph, grids: Mapping[str, Any]) -> Any:
    module, _ = graph.module_of(stage)
    if module not in grids:
        raise GradientError(
            f"stage {stage} is of module {module!r}, which has no grid; there are grids of {list(grids)}"
        )
    return grids[module]


def _shard_sizes(grid: Any) -> dict[str, int]:
    """Dims that shard or replicate a parameter on one stage of one replica, with their sizes."""
    sizes = zip(grid.dim_names, grid.shape, strict=True)
    return {dim: size for dim, size in sizes if size > 1 and dim not in ("dp", "cp", _STAGE_DIM)}
