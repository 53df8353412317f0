"""The lanes that a pipeline needs: a pure function of where its stages are and of the traffic it uses. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pipegrid.topology.fields import index_of
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.errors import LaneSpecError, P2PUsageError
from pipegrid.transport.spec import LaneSpec


def direction_lane(source_stage_rank: int, destination_stage_rank: int, direction: Direction) -> LaneSpec:
    """The lane of an edge between stages on these global ranks: gradients travel against the edge.

    Raises:
        P2PUsageError: ``direction`` is not a `Direction`.
    """
    if direction is Direction.FORWARD:
        return LaneSpec(source_stage_rank, destination_stage_rank, "forward")
    if direction is Direction.BACKWARD:
        return LaneSpec(destination_stage_rank, source_stage_rank, "backward")
    raise P2PUsageError(f"the direction is {direction!r}; it must be Direction.FORWARD or Direction.BACKWARD")


def placed(placement: Any, count: int) -> tuple[int, ...]:
    """A checked placement: the index of each stage in the ``count`` ranks of the pipeline.

    Raises:
        LaneSpecError: fewer than two stages, or an index outside the range.
    """
    stages = (
        () if isinstance(placement, str) or not isinstance(placement, Sequence) else tuple(map(index_of, placement))
    )
    indices = tuple(index for index in stages if index is not None and 0 <= index < count)
    if len(stages) < 2 or len(indices) < len(stages):
        raise LaneSpecError(
            f"the placement {placement!r} must give each of two or more stages an index from 0 to {count - 1}"
        )
    return indices


def pipeline_lanes(
    ranks: Sequence[int],
    *,
    placement: Sequence[int] | None = None,
    traffic: Iterable[tuple[Edge, Direction]] | None = None,
) -> tuple[LaneSpec, ...]:
    """The lanes of a pipeline on ``ranks`` (global): one per ordered neighbour pair and direction, ascending.

    Args:
        ranks: the ranks of the pipeline, in order.
        placement: the index in ``ranks`` of each stage; None is cyclic, with the way from the last rank to the first.
        traffic: the edges and directions that a plan uses; None is all of them.

    Raises:
        LaneSpecError: see `placed`; or ``traffic`` has an edge between stages that the placement does not have.
    """
    count = len(ranks)
    stages = tuple(range(count)) if placement is None else placed(placement, count)
    if traffic is None:
        last = count if placement is None else len(stages) - 1
        traffic = [(Edge(stage, stage + 1), direction) for stage in range(last) for direction in Direction]
    lanes = set()
    for edge, direction in traffic:
        if edge.source < 0 or (placement is not None and max(edge.source, edge.destination) >= len(stages)):
            raise LaneSpecError(f"traffic has edge {edge}, but the placement {placement!r} has {len(stages)} stages")
        source, destination = (ranks[stages[stage % len(stages)]] for stage in (edge.source, edge.destination))
        lanes.add(direction_lane(source, destination, direction))
    return tuple(sorted(lanes))
