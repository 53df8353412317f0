"""The boundary between two stages of different tensor-parallel sizes: who sends what to whom. Pure; no torch.

Each data replica of the pipeline has boundaries of its own. A side either holds copies of the tensor (tensor
parallelism) or consecutive parts of its sequence (sequence parallelism). Both are cases of the reshard plan, which is
made here for the tensor seen as ``[before, sequence, after]``: any number of axes fits, and seeing it so moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

from attrs import frozen

from pipegrid.bridges.errors import ShapeError, TilingError
from pipegrid.bridges.reshard import Box, Completion, Placement, Replicated, Sharded, Side, Sizes, plan_reshard, routes
from pipegrid.bridges.reshard.side import SideDim
from pipegrid.transport.edge import Direction, Edge

Shape = tuple[int, ...]

_AXES = (("b",), ("s",), ("h",))


@frozen
class VTPStage:
    """One replica of one stage: its ranks, and whether they hold parts of the sequence in place of copies."""

    name: str
    ranks: tuple[int, ...]
    cuts_sequence: bool = False

    @property
    def parts(self) -> int:
        """In how many parts the ranks hold the sequence."""
        return len(self.ranks) if self.cuts_sequence else 1

    @property
    def side(self) -> Side:
        """The stage as a side of a boundary."""
        placement: Placement = Sharded("s") if self.cuts_sequence else Replicated()
        size = len(self.ranks)
        return Side(self.name, 0, (SideDim("tp", size, 1, placement),) if size > 1 else (), members=self.ranks)


@frozen
class Crossing:
    """One rank's part in one message along a boundary.

    Attributes:
        shape: of the rank's own tensor.
        view: the same tensor with the three axes that the boxes are in.
        peers: per rank at the other side, ascending, the boxes that go there or come from there.
        completion: how the copies on a receiving side then complete each other; None where there is nothing to do.
    """

    shape: Shape
    view: Shape
    peers: Mapping[int, tuple[Box, ...]]
    completion: Completion | None


@frozen(slots=False)
class VTPBoundary:
    """Between ``source``, which makes the activation, and ``destination``; ``axis`` is the sequence's.

    ``edge`` is in numbers of plan stages: the way round of a ring of P stages is ``Edge(P - 1, P)``.
    """

    edge: Edge
    source: VTPStage
    destination: VTPStage
    axis: int = 0

    def __attrs_post_init__(self) -> None:
        both = set(self.source.ranks) & set(self.destination.ranks)
        if both:
            raise TilingError(f"ranks {sorted(both)} are on both sides of boundary {self.edge}; each side has its own")

    def stage_of(self, rank: int) -> VTPStage:
        """The side that the rank is on."""
        return self.source if rank in self.source.ranks else self.destination

    def sends(self, rank: int, direction: Direction) -> bool:
        """Whether the rank is on the side that sends in that direction."""
        return (rank in self.source.ranks) == (direction is Direction.FORWARD)

    def receiver(self, direction: Direction) -> VTPStage:
        """The side that receives in that direction."""
        return self.destination if direction is Direction.FORWARD else self.source

    def peers(self, rank: int, direction: Direction) -> tuple[int, ...]:
        """The ranks with which ``rank`` exchanges something in that direction, whatever the sizes, ascending."""
        src, dst = self._sides
        pairs = routes(src, dst, _AXES, backward=direction is Direction.BACKWARD, rank=rank)
        return tuple(sorted(a if b == rank else b for a, b in pairs))

    def copies(self, direction: Direction) -> tuple[int, ...]:
        """The ranks that complete each other when they receive in that direction; none where each has its own part."""
        stage = self.receiver(direction)
        return tuple(sorted(stage.ranks)) if stage.parts < len(stage.ranks) else ()

    def whole(self, shape: Sequence[int], rank: int) -> Shape:
        """The shape of the whole tensor of which ``rank`` holds a part of ``shape``.

        Raises:
            ShapeError: there is no such axis, or the sequence cannot be cut on the other side.
        """
        extents = list(shape)
        parts = self.stage_of(rank).parts
        if parts > 1 and len(extents) > self.axis:
            extents[self.axis] *= parts
        self.check(extents)
        return tuple(extents)

    def check(self, whole: Sequence[int]) -> None:
        """Raise for a whole tensor whose sequence a side cannot cut.

        Raises:
            ShapeError: there is no such axis, or its extent is no multiple of a side's ranks.
        """
        if self.source.parts == self.destination.parts == 1:
            return
        if len(whole) <= self.axis:
            raise ShapeError(
                f"boundary {self.edge} cuts the sequence on axis {self.axis}, but a tensor of shape {tuple(whole)} has "
                f"no such axis; send [sequence, batch, hidden], or say sequence_axis"
            )
        for stage in (self.source, self.destination):
            check_sequence(whole[self.axis], stage.name, stage.parts)

    def crossing(self, whole: Sequence[int], direction: Direction, rank: int) -> Crossing:
        """What ``rank`` sends, or receives and completes, of a tensor of the shape ``whole``."""
        src, dst = self._sides
        sizes = Sizes(self._view(whole), axes=_AXES)
        plan = plan_reshard(src, dst, sizes, backward=direction is Direction.BACKWARD, rank=rank)
        shape = list(whole)
        parts = self.stage_of(rank).parts
        if parts > 1:
            shape[self.axis] //= parts
        if self.sends(rank, direction):
            boxes = {peer: tuple(m.source_box for m in ms) for peer, ms in plan.sends(rank).items()}
            view = plan.source_shape(rank)
        else:
            boxes = {peer: tuple(m.destination_box for m in ms) for peer, ms in plan.receives(rank).items()}
            view = plan.destination_shape(rank)
        return Crossing(
            tuple(shape), view, boxes, next((step for step in plan.completions if rank in step.ranks), None)
        )

    def _view(self, whole: Sequence[int]) -> Shape:
        """Three axes; the elements in one row where no side cuts the sequence, since slices are then contiguous."""
        if self.source.parts == self.destination.parts == 1:
            return (1, 1, math.prod(whole))
        return (math.prod(whole[: self.axis]), whole[self.axis], math.prod(whole[self.axis + 1 :]))

    @cached_property
    def _sides(self) -> tuple[Side, Side]:
        return self.source.side, self.destination.side


def check_sequence(length: int, name: str, parts: int) -> None:
    """Raise unless ``parts`` ranks can share the sequence evenly.

    Raises:
        ShapeError: it is no multiple.
    """
    if length % parts:
        raise ShapeError(
            f"a sequence of {length} cannot be cut in {parts} equal parts for the tensor-parallel ranks of {name}; "
            f"pad it to {length + parts - length % parts}, or declare {name} without sequence parallelism"
        )
