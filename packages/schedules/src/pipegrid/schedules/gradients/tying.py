"""Tied parameters in a plan: the position of their ``REDUCE``, and its groups. Pure.

The copies of a tied parameter (an embedding and the head that shares its weight) are on several stages, and on
every data lane of each. The gradient of the parameter is the sum over all of them, and must be bitwise equal on all
copies, or they drift apart. One all-reduce therefore sums over stages and data lanes together, and the data-parallel
reduction only divides. That is correct for any numbers of data lanes on the two sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.lowering import reductions, tied_groups
from pipegrid.schedules.plan import Plan, require_plan
from pipegrid.topology import GroupSpec

_LANE_DIMS = ("dp", "cp")
_STAGE_DIM = "pp"


class TyingError(ValueError):
    """The stages, grids or values of tied parameters do not match."""


@frozen
class TieGroup:
    """The ranks with a copy of one shard of a tied parameter.

    Attributes:
        spec: the group to create: all copies, ascending by stage, then by rank.
        contributing: the ranks whose gradient is a term of the sum. The others are tensor-parallel replicas.
        first: the ranks of the lowest stage, whose copy counts as the parameter; all others are replicas.
    """

    spec: GroupSpec
    contributing: frozenset[int]
    first: frozenset[int]


def with_reduce(plan: Plan, tied: Mapping[str, Sequence[int]]) -> Plan:
    """``plan`` with a ``REDUCE`` of each tied parameter, after the last backward of all its stages.

    The same as the argument ``tied`` of `lower`, for a lowered plan. The ``REDUCE`` is the last step of each position
    with one of the stages: the sum waits for the slowest of them in any order.

    Args:
        plan: lowered.
        tied: the stages with a copy, by name.

    Raises:
        PlanError: a plan of computes alone, a name in use, or a stage that does not exist or has no backward.
    """
    require_plan(plan)
    if plan.num_positions > 1 and not plan.has_communication:
        raise PlanError("the plan has no communication; pass tied=... to lower, which adds both")
    added = tied_groups(plan, tied)
    positions = tuple((*steps, *reductions(position, plan, added)) for position, steps in enumerate(plan.positions))
    return evolve(plan, positions=positions, groups=plan.groups + added)


def tie_groups(name: str, stages: Sequence[int], graph: ModuleGraph, grids: Mapping[str, Any]) -> tuple[TieGroup, ...]:
    """Groups of a tied parameter: one per tp rank, across stages and data lanes.

    Modules whose grids agree in all dims but ``pp``, ``dp`` and ``cp`` have one group per shard. With different grids
    (tp 2 beside tp 1), every tp rank must hold the whole parameter: all copies are one group, in which the first tp
    rank of each module contributes.

    Args:
        name: the parameter's.
        stages: global numbers of the stages with a copy.
        graph: the modules and their stages.
        grids: the grid of each of these modules.

    Raises:
        TyingError: a stage that does not exist; a module without a grid; a grid whose ``pp`` is not the module's
            depth; a rank that holds different shards of two stages.
    """
    held = sorted(stages)
    for stage in held:
        if not 0 <= stage < graph.num_stages:
            raise TyingError(f"tied parameter {name!r} names stage {stage}; the graph has 0..{graph.num_stages - 1}")
    places = [(grid, index) for stage in held for grid, index in [_grid_of(name, stage, graph, grids)]]
    kinds = [_shard_sizes(grid) for grid, _ in places]
    alike = all(kind == kinds[0] for kind in kinds)
    members: dict[tuple[tuple[str, int], ...], list[int]] = {}
    contributing: set[int] = set()
    for grid, index in places:
        for rank in grid.ranks:
            coords = grid.coords(rank)
            if coords.get(_STAGE_DIM, 0) != index:
                continue
            shard = tuple((dim, coords[dim]) for dim in sorted(_shard_sizes(grid)))
            ranks = members.setdefault(shard if alike else (), [])
            if rank not in ranks:
                ranks.append(rank)
            if alike or not any(coordinate for _, coordinate in shard):
                contributing.add(rank)
    shard_of: dict[int, tuple[tuple[str, int], ...]] = {}
    for shard, ranks in members.items():
        for rank in ranks:
            if shard_of.setdefault(rank, shard) != shard:
                raise TyingError(
                    f"tied parameter {name!r}: rank {rank} holds two of the stages {held}, but of one the shard "
                    f"{dict(shard_of[rank])} and of another {dict(shard)}; use the same order of dims in their grids"
                )
    lowest, index = places[0]
    first = frozenset(rank for rank in lowest.ranks if lowest.coords(rank).get(_STAGE_DIM, 0) == index)
    return tuple(
        TieGroup(
            GroupSpec(ranks, _label(name, shard), shared=False),
            frozenset(contributing.intersection(ranks)),
            first.intersection(ranks),
        )
        for shard, ranks in sorted(members.items())
    )


def shards_alike(stages: Sequence[int], graph: ModuleGraph, grids: Mapping[str, Any]) -> bool:
    """Whether the modules of ``stages`` shard a parameter alike: equal sizes of all dims but stages and data lanes."""
    kinds = [_shard_sizes(grids[graph.module_of(stage)[0]]) for stage in stages]
    return all(kind == kinds[0] for kind in kinds)


def stages_here(stages: Sequence[int], graph: ModuleGraph, grids: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    """The subset of ``stages`` on ``rank``."""
    here = []
    for stage in stages:
        module, index = graph.module_of(stage)
        grid = grids[module]
        if rank in grid.ranks and grid.coords(rank).get(_STAGE_DIM, 0) == index:
            here.append(stage)
    return tuple(here)


def _grid_of(name: str, stage: int, graph: ModuleGraph, grids: Mapping[str, Any]) -> tuple[Any, int]:
    module, index = graph.module_of(stage)
    if module not in grids:
        raise TyingError(
            f"tied parameter {name!r} is on stage {stage} of module {module!r}, which has no grid; there are grids "
            f"for {sorted(grids)}"
        )
    grid = grids[module]
    depth = grid.dim_size(_STAGE_DIM) if _STAGE_DIM in grid.dim_names else 1
    if depth != graph.depth(module):
        raise TyingError(
            f"module {module!r} has {graph.depth(module)} stages in the graph and pp {depth} in its grid; a tied "
            "parameter needs one stage per pp rank"
        )
    return grid, index


def _shard_sizes(grid: Any) -> dict[str, int]:
    """Dims that shard or replicate a parameter on one stage of one data lane, with their sizes."""
    sizes = zip(grid.dim_names, grid.shape, strict=True)
    return {dim: size for dim, size in sizes if size > 1 and dim not in (*_LANE_DIMS, _STAGE_DIM)}


def _label(name: str, shard: tuple[tuple[str, int], ...]) -> str:
    return "/".join(["tied", name, *(f"{dim}{index}" for dim, index in shard)])
