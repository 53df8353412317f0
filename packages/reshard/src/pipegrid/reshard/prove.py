"""The proof that a reshard plan moves every element to its place, once. Pure; no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from pipegrid.core.fields import checked_arguments
from pipegrid.reshard.box import Box, Span
from pipegrid.reshard.cuts import local_shape
from pipegrid.reshard.errors import BridgeError
from pipegrid.reshard.plan import ReshardPlan


@checked_arguments(BridgeError, kinds=True)
def check_plan(plan: ReshardPlan) -> None:
    """Prove a plan for all ranks: every element of every destination is written once, by a rank that holds it.

    Raises:
        BridgeError: boxes of different shapes, a box outside of the tensor, an element that is written twice or never,
            or one that is read from a rank that holds something else; a message of a rank that is not on its side.

    Examples:
        >>> from pipegrid.topology import place
        >>> grids = place({"images": {"dp": 3}, "language": {"dp": 2}}, world_size=5)
        >>> sides = boundary_side(grids["images"], "source"), boundary_side(grids["language"], "destination")
        >>> check_plan(plan_reshard(*sides, Sizes((6, 8), axes=axis_names(2))))
    """
    written: dict[int, list[Box]] = {rank: [] for rank in plan.dst.ranks}
    for message in plan.messages:
        given = _whole(message.source_box, plan.source_spans(message.source))
        taken = _whole(message.destination_box, plan.destination_spans(message.destination))
        if given != taken:
            raise BridgeError(f"{message} reads {given} of the whole tensor and writes it where {taken} belongs")
        written[message.destination].append(message.destination_box)
    received = {rank: tuple(boxes) for rank, boxes in written.items()}
    for step in plan.completions:
        for giver, boxes in zip(step.ranks, step.boxes, strict=True):
            if not set(boxes) <= set(received[giver]):
                raise BridgeError(f"rank {giver} completes {step.ranks} with boxes {boxes} that it did not receive")
            for taker in step.ranks:
                if taker != giver:
                    written[taker].extend(boxes)
    for rank in plan.dst.ranks:
        _check_tiles(rank, plan.destination_shape(rank), written[rank])


def _whole(box: Box, spans: Sequence[Sequence[Span]]) -> tuple[tuple[Span, ...], ...]:
    """The ranges of the whole tensor that a box of a local tensor stands for."""
    ranges = []
    for start, extent, axis in zip(box.start, box.shape, spans, strict=True):
        here, offset = [], 0
        for low, high in axis:
            a, b = max(start, offset), min(start + extent, offset + high - low)
            if a < b:
                here.append((low + a - offset, low + b - offset))
            offset += high - low
        if sum(b - a for a, b in here) != extent:
            raise BridgeError(f"box {box} lies outside of the tensor of shape {local_shape(spans)}")
        ranges.append(tuple(here))
    return tuple(ranges)


def _check_tiles(rank: int, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    filled = [box for box in boxes if box.numel]
    for box, other in itertools.combinations(filled, 2):
        axes = zip(box.start, box.shape, other.start, other.shape, strict=True)
        if all(a < b + m and b < a + n for a, n, b, m in axes):
            raise BridgeError(f"rank {rank}: boxes {box} and {other} write the same elements twice")
    missing = math.prod(shape) - sum(box.numel for box in filled)
    if missing:
        raise BridgeError(f"rank {rank}: {missing} of {math.prod(shape)} elements are never written (a hole)")
