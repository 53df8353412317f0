"""Parameters with a copy on several stages: the place of their ``REDUCE`` in a plan, and its groups. Pure.

The copies of a tied parameter (an embedding and the head that shares its weight) lie on several stages, and on
every data lane of each. The gradient of the parameter is the sum over all of them, and all copies must get the
very same bits, or they drift apart. So one all-reduce makes the whole sum, over stages and data lanes together; the
data-parallel reduction that follows only divides. That is right for any numbers of data lanes on the two sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.lowering import reductions, tied_groups
from pipegrid.schedules.plan.plan import Plan, default_creation, require_plan
from pipegrid.topology import GroupSpec

_LANE_DIMS = ("dp", "cp")
_STAGE_DIM = "pp"


class TyingError(ValueError):
    """Parameters cannot be tied as asked: their stages, their grids or their values do not fit."""


@frozen
class TieGroup:
    """The ranks that hold a copy of one shard of a tied parameter.

    Attributes:
        spec: the group to create: all copies, ascending by stage, then by rank.
        contributing: the ranks whose gradient counts. The others are tensor-parallel replicas of one that does.
        first: the ranks of the lowest stage, whose copy is the parameter; all others are replicas of it.
    """

    spec: GroupSpec
    contributing: frozenset[int]
    first: frozenset[int]


def with_reduce(plan: Plan, tied: Mapping[str, Sequence[int]]) -> Plan:
    """``plan`` with a ``REDUCE`` of each tied parameter, after the last backward of all stages that hold it.

    As `lower` does with its argument ``tied``, for a plan that has its communication already. It stands at the end
    of each position that holds one of the stages: the sum waits for the slowest of them wherever it stands.

    Args:
        plan: lowered.
        tied: by name, the stages that hold a copy.

    Raises:
        PlanError: a plan of computes alone, a name that is taken, or a stage that does not exist or has no backward.
    """
    require_plan(plan)
    if plan.num_positions > 1 and not plan.has_communication:
        raise PlanError("the plan has no communication yet; give tied=... to lower, which adds both")
    added = tied_groups(plan, tied)
    creation = None
    if plan.creation != default_creation(plan):
        # Created by all members before anything that the plan creates in an order of its own.
        creation = tuple(
            (*(group.name for group in added if position in group.positions), *names)
            for position, names in enumerate(plan.creation)
        )
    positions = tuple((*steps, *reductions(position, plan, added)) for position, steps in enumerate(plan.positions))
    return evolve(plan, positions=positions, groups=plan.groups + added, creation=creation)


def tie_groups(name: str, stages: Sequence[int], graph: ModuleGraph, grids: Mapping[str, Any]) -> tuple[TieGroup, ...]:
    """Who shares which shard of a tied parameter: one group per tp rank, across stages and data lanes.

    Modules whose grids agree in all dimensions but ``pp``, ``dp`` and ``cp`` share shard by shard. Where they do not
    (tp 2 beside tp 1), only a parameter that every tp rank holds whole can be tied: all its copies are one group, to
    which each module contributes by its first tp rank.

    Args:
        name: the parameter's.
        stages: global numbers of the stages that hold a copy.
        graph: the modules and so the stages.
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
                    f"{dict(shard_of[rank])} and of another {dict(shard)}; order the dimensions of their grids alike"
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
    """Whether the modules of ``stages`` cut a parameter alike: the same sizes but for stages and data lanes."""
    kinds = [_shard_sizes(grids[graph.module_of(stage)[0]]) for stage in stages]
    return all(kind == kinds[0] for kind in kinds)


def stages_here(stages: Sequence[int], graph: ModuleGraph, grids: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    """Those of ``stages`` that ``rank`` holds."""
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
            f"tied parameter {name!r} lies on stage {stage} of module {module!r}, which has no grid; there are grids "
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
    """The dimensions that cut or replicate a parameter on one stage of one data lane, with their sizes."""
    sizes = zip(grid.dim_names, grid.shape, strict=True)
    return {dim: size for dim, size in sizes if size > 1 and dim not in (*_LANE_DIMS, _STAGE_DIM)}


def _label(name: str, shard: tuple[tuple[str, int], ...]) -> str:
    return "/".join(["tied", name, *(f"{dim}{index}" for dim, index in shard)])
