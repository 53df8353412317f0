"""Which lanes a pipeline needs: a pure function of where its stages lie. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pipegrid.transport.edge import Direction
from pipegrid.transport.errors import LaneSpecError
from pipegrid.transport.lane_spec import LaneSpec


def direction_lane(source_stage_rank: int, destination_stage_rank: int, direction: Direction) -> LaneSpec:
    """The lane for an edge between stages on those global ranks: gradients go the other way."""
    if direction is Direction.FORWARD:
        return LaneSpec(source_stage_rank, destination_stage_rank, "forward")
    return LaneSpec(destination_stage_rank, source_stage_rank, "backward")


def pipeline_lanes(ranks: Sequence[int], *, placement: Sequence[int] | None = None) -> tuple[LaneSpec, ...]:
    """The lanes of a pipeline on ``ranks`` (global), one per ordered neighbour pair and direction, ascending.

    Args:
        ranks: the ranks of the pipeline, in order.
        placement: the index in ``ranks`` of each stage; None is cyclic, with the way from the last rank round to
            the first.

    Raises:
        LaneSpecError: a placement with an index that ``ranks`` does not have, or of fewer than two stages.
    """
    count = len(ranks)
    if placement is None:
        steps = [(index, (index + 1) % count) for index in range(count)]
    else:
        if len(placement) < 2 or not all(0 <= index < count for index in placement):
            raise LaneSpecError(
                f"the placement {tuple(placement)} must give each of two or more stages an index from 0 to {count - 1}"
            )
        steps = list(itertools.pairwise(placement))
    lanes = {
        direction_lane(ranks[source], ranks[destination], direction)
        for source, destination in steps
        for direction in Direction
    }
    return tuple(sorted(lanes))
