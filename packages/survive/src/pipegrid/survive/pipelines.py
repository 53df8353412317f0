"""The communicator of one replica of a job's pipeline, on one grid or on one per module, without lanes to the dead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from pipegrid.plans.plan import module_places
from pipegrid.reshard import positions_of
from pipegrid.reshard.errors import BridgeError
from pipegrid.schedules import Actor, Plan
from pipegrid.survive.errors import SurviveError
from pipegrid.survive.living import Living
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import Direction, Edge

if TYPE_CHECKING:
    from pipegrid.transport.communicator import LaneCommunicator

ModuleGrids: TypeAlias = Mapping[str, HyperCommGrid]


def module_positions(plan: Plan, grids: ModuleGrids) -> dict[int, int]:
    """The position of each rank, where each module of ``plan`` has a grid of its own.

    Raises:
        SurviveError: the grids are not those of the plan's modules, put stages on other positions than the plan, have
            other numbers of replicas, or a rank in two replicas.
    """
    graph = plan.graph
    if set(grids) != set(graph.order):
        raise SurviveError(f"the grids are those of modules {sorted(grids)}; the plan has {sorted(graph.order)}")
    sizes = {name: dict(zip(grid.dim_names, grid.shape, strict=True)).get("dp", 1) for name, grid in grids.items()}
    if len({*sizes.values()}) > 1:
        raise SurviveError(
            f"the modules have dp {sizes}; units of a dead rank go to its position in another replica, so each module "
            "has as many replicas"
        )
    places = {name: module_places(graph, plan.placement, name) for name in grids}
    try:
        found = positions_of(graph, grids, places)
    except BridgeError as error:
        raise SurviveError(f"the grids do not fit the plan: {error}") from error
    if found.placement != plan.placement:
        raise SurviveError(
            f"the plan has the stages on positions {plan.placement}, and the grids put them on {found.placement}: give "
            "schedule_for(graph, ..., placement=...) that of the grids"
        )
    replica: dict[int, tuple[int, str]] = {}
    for name, grid in grids.items():
        for rank in grid.ranks:
            here = grid.coords(rank).get("dp", 0)
            known, other = replica.setdefault(rank, (here, name))
            if known != here:
                raise SurviveError(f"rank {rank} is in replica {known} of {other!r} and in replica {here} of {name!r}")
    return {rank: position for position, ranks in enumerate(found.ranks) for rank in ranks}


def connect_modules(
    grids: ModuleGrids, plan: Plan, living: Living, rank: int, config: Any, options: Mapping[str, Any]
) -> LaneCommunicator:
    """The communicator of modules on ``grids``; its bridges to other replicas are made when a plan needs them."""
    from pipegrid.bridges import MultiModulePipelineCommunicator

    graph = plan.graph
    return MultiModulePipelineCommunicator(
        grids,
        {name: [other for source, other in graph.edges if source == name] for name in grids},
        config,
        stage_placement={name: module_places(graph, plan.placement, name) for name in grids},
        traffic=living_traffic(plan, living, rank),
        replicas=True,
        **options,
    )


def connect_chain(grid: HyperCommGrid, plan: Plan, living: Living, rank: int, config: Any) -> LaneCommunicator:
    """The communicator of a pipeline on one ``grid``; its lanes to other replicas open when a plan needs them."""
    from pipegrid.transport import P2PCommunicator

    at, graph = grid.coords(rank), plan.graph
    replicas = [
        [grid.rank_at(**{**at, "pp": position, "dp": replica}) for position in range(plan.num_positions)]
        for replica in range(grid.dim_size("dp"))
    ]
    places = tuple([positions[0] for positions in plan.placement])
    cyclic = all(place == stage % plan.num_positions for stage, place in enumerate(places))
    return P2PCommunicator(
        grid.get_pg("pp"),
        config,
        placement=None if cyclic else places,
        traffic=living_traffic(plan, living, rank),
        replicas=replicas,
        graph=graph if len(graph.order) > 1 else None,
    )


def living_traffic(plan: Plan, living: Living, rank: int) -> list[tuple[Edge, Direction]]:
    """The edges of ``plan`` between living actors of the replica of ``rank``, in both directions."""
    replica, dead = living.actor(rank).replica, set(living.dead)
    here = {
        stage
        for stage, positions in enumerate(plan.placement)
        if all(Actor(position, replica) not in dead for position in positions)
    }
    edges = [edge for edge in plan.graph.stage_edges if {edge.source, edge.destination} <= here]
    return [(edge, direction) for edge in edges for direction in Direction]
