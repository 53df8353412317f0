"""Which lanes a pipeline needs: a pure function of where its stages lie. No torch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from pipegrid.transport.edge import Direction
from pipegrid.transport.errors import LaneSpecError, P2PUsageError
from pipegrid.transport.spec import LaneSpec


def direction_lane(source_stage_rank: int, destination_stage_rank: int, direction: Direction) -> LaneSpec:
    """The lane for an edge between stages on those global ranks: gradients go the other way.

    Raises:
        P2PUsageError: ``direction`` is no `Direction`.
    """
    if not isinstance(direction, Direction):
        raise P2PUsageError(f"the direction is {direction!r}; it must be Direction.FORWARD or Direction.BACKWARD")
    if direction is Direction.FORWARD:
        return LaneSpec(source_stage_rank, destination_stage_rank, "forward")
    return LaneSpec(destination_stage_rank, source_stage_rank, "backward")


def placed(placement: Any, count: int) -> tuple[int, ...]:
    """A placement over ``count`` ranks, checked.

    Raises:
        LaneSpecError: not a sequence of integers, fewer than two stages, or an index that is not below ``count``.
    """
    stages: tuple[Any, ...] = tuple(placement) if isinstance(placement, Sequence) else ()
    if isinstance(placement, str) or len(stages) < 2 or not all(_is_index(index, count) for index in stages):
        raise LaneSpecError(
            f"the placement {placement!r} must give each of two or more stages an index from 0 to {count - 1}"
        )
    return tuple(map(operator.index, stages))


def _is_index(value: Any, count: int) -> bool:
    try:
        return not isinstance(value, bool) and 0 <= operator.index(value) < count
    except TypeError:
        return False


def pipeline_lanes(ranks: Sequence[int], *, placement: Sequence[int] | None = None) -> tuple[LaneSpec, ...]:
    """The lanes of a pipeline on ``ranks`` (global), one per ordered neighbour pair and direction, ascending.

    Args:
        ranks: the ranks of the pipeline, in order.
        placement: the index in ``ranks`` of each stage; None is cyclic, with the way from the last rank round to
            the first.

    Raises:
        LaneSpecError: see `placed`.
    """
    count = len(ranks)
    if placement is None:
        steps = [(index, (index + 1) % count) for index in range(count)]
    else:
        steps = list(itertools.pairwise(placed(placement, count)))
    lanes = {
        direction_lane(ranks[source], ranks[destination], direction)
        for source, destination in steps
        for direction in Direction
    }
    return tuple(sorted(lanes))
