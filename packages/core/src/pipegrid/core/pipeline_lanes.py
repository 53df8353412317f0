"""The lanes that a pipeline needs: a pure function of where its stages are and of the traffic it uses. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pipegrid.core.edge import Direction, Edge
from pipegrid.core.errors import P2PUsageError
from pipegrid.core.fields import Index, checked
from pipegrid.core.graph import ModuleGraph
from pipegrid.core.sharing import Communicators, LaneSharing, PositionLane
from pipegrid.core.spec import LaneSpec


def direction_lane(source_stage_rank: int, destination_stage_rank: int, direction: Direction) -> LaneSpec:
    """The lane of an edge between stages on these global ranks: gradients travel against the edge."""
    if direction is Direction.FORWARD:
        return LaneSpec(source_stage_rank, destination_stage_rank, "forward")
    if direction is Direction.BACKWARD:
        return LaneSpec(destination_stage_rank, source_stage_rank, "backward")
    raise P2PUsageError(f"the direction is {direction!r}; it must be Direction.FORWARD or Direction.BACKWARD")


def require_edge(edge: Any, placement: Sequence[int] | None, edges: Collection[Edge] | None = None) -> None:
    """Raise unless ``edge`` is one of ``edges``, by default of a chain of stages with this placement."""
    if edges is not None:
        if edge not in edges:
            raise P2PUsageError(f"the edge is {edge}; those of the graph are {', '.join(map(str, sorted(edges)))}")
        return
    last = math.inf if placement is None else len(placement) - 1
    if not isinstance(edge, Edge) or edge.destination != edge.source + 1 or not 0 <= edge.source < last:
        raise P2PUsageError(f"the edge is {edge}; it must be an Edge of this pipeline, such as Edge(0, 1)")


def placed(placement: Any, count: int) -> tuple[int, ...]:
    """A checked placement: the index of each of two or more stages in the ``count`` ranks of the pipeline."""
    stages: tuple[int, ...] = checked(placement, tuple[Index, ...], "placement", P2PUsageError)
    if len(stages) < 2 or max(stages) >= count:
        raise P2PUsageError(f"placement is {placement!r}; it must give two or more stages an index below {count} each")
    return stages


def placed_stages(placement: Any, count: int, graph: ModuleGraph | None) -> tuple[int, ...] | None:
    """The index among ``count`` ranks of each stage: as given, of a graph round and round, or None of a chain.

    Raises:
        P2PUsageError: as `placed`; or a placement of another number of stages than the graph has.
    """
    if graph is None:
        return None if placement is None else placed(placement, count)
    found = placed([s % count for s in range(graph.num_stages)] if placement is None else placement, count)
    if len(found) != graph.num_stages:
        raise P2PUsageError(
            f"placement is {placement!r}; it must give the {graph.num_stages} stages of the graph a rank"
        )
    return found


def pipeline_lanes(
    ranks: Sequence[int],
    *,
    placement: Sequence[int] | None = None,
    traffic: Iterable[tuple[Edge, Direction]] | None = None,
) -> tuple[LaneSpec, ...]:
    """The lanes of a pipeline on ``ranks`` (global): one per ordered neighbour pair and direction, ascending.

    Args:
        ranks: the ranks of the pipeline, in order.
        placement: the index in ``ranks`` of each stage; None is cyclic, with lanes from the last rank to the first.
        traffic: the edges and directions that a plan uses; None is all of them.
    """
    count = len(ranks)
    stages = tuple(range(count)) if placement is None else placed(placement, count)
    if traffic is None:
        last = count if placement is None else len(stages) - 1
        traffic = [(Edge(stage, stage + 1), direction) for stage in range(last) for direction in Direction]
    lanes = set()
    for edge, direction in traffic:
        if edge.source < 0 or (placement is not None and max(edge.source, edge.destination) >= len(stages)):
            raise P2PUsageError(f"traffic has edge {edge}, but the placement {placement!r} has {len(stages)} stages")
        source, destination = (ranks[stages[stage % len(stages)]] for stage in (edge.source, edge.destination))
        lanes.add(direction_lane(source, destination, direction))
    return tuple(sorted(lanes))


def checked_replicas(
    given: Any, ranks: Sequence[int], communicators: Communicators
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The ranks of the pipeline of each replica, and the replica whose pipeline is on ``ranks``."""
    replicas: tuple[tuple[int, ...], ...] = checked(given, tuple[tuple[Index, ...], ...], "replicas", P2PUsageError)
    every = [rank for row in replicas for rank in row]
    if tuple(ranks) not in replicas or {len(row) for row in replicas} != {len(ranks)} or len({*every}) < len(every):
        raise P2PUsageError(
            f"replicas is {given!r}; it must give each replica {len(ranks)} ranks of its own, one of them {list(ranks)}"
        )
    if isinstance(communicators, LaneSharing):
        raise P2PUsageError(
            "replicas beside communicators of a plan, which have no lanes between replicas; give 'separate' or 'shared'"
        )
    return replicas, replicas.index(tuple(ranks))


def pair_lanes(lanes: Iterable[LaneSpec]) -> set[LaneSpec]:
    """All four lanes between the ranks of each of ``lanes``: of a communicator that they share."""
    return {
        LaneSpec(*ends, direction.name.lower())
        for lane in lanes
        for ends in (lane.pair, lane.pair[::-1])
        for direction in Direction
    }


def carried_lanes(ranks: Sequence[int], lanes: Iterable[LaneSpec]) -> dict[LaneSpec, PositionLane]:
    """The lane of a plan that each of these lanes of a pipeline carries; without those from a rank to itself."""
    return {
        lane: PositionLane(ranks.index(lane.source), ranks.index(lane.destination), Direction[lane.label.upper()])
        for lane in lanes
        if not lane.is_local
    }


def planned_lanes(
    ranks: Sequence[int],
    placement: Sequence[int] | None,
    traffic: Iterable[tuple[Edge, Direction]] | None,
    communicators: Communicators,
    edges: Collection[Edge] | None = None,
) -> tuple[Sequence[LaneSpec], Mapping[LaneSpec, PositionLane]]:
    """The lanes to open, and the lane of a plan that each carries. ``edges`` are those of a graph; None: of a chain.

    Without ``traffic``, of all lanes those for which a plan has ``communicators``; all, where no plan is given.

    Raises:
        P2PUsageError: the plan has a lane that the pipeline does not have.
    """
    every = None if edges is None else [(edge, direction) for edge in edges for direction in Direction]
    lanes = pipeline_lanes(ranks, placement=placement, traffic=every if traffic is None else traffic)
    carried = carried_lanes(ranks, lanes)
    if traffic is not None or not isinstance(communicators, LaneSharing):
        return lanes, carried
    if foreign := sorted(communicators.numbers.keys() - carried.values()):
        raise P2PUsageError(
            f"communicators has lane {foreign[0]} of a plan, but these positions are no neighbours in the pipeline: it "
            f"has {', '.join(map(str, sorted(carried.values())))}"
        )
    return [lane for lane in lanes if lane.is_local or carried[lane] in communicators.numbers], carried
