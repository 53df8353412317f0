"""The boundary between two stages of different tensor-parallel sizes: who sends what to whom. Pure; no torch.

Each data replica of the pipeline has boundaries of its own. A side either holds copies of the tensor (tensor
parallelism) or consecutive parts of its sequence (sequence parallelism). Both are cases of the reshard plan, which is
made here for the tensor seen as ``[before, sequence, after]``: any number of axes fits, and seeing it so moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from attrs import frozen

from pipegrid.bridges.bridge import BridgeWiring, Traffic, directions_of
from pipegrid.bridges.errors import ShapeError
from pipegrid.bridges.reshard import Placement, RankPart, Replicate, Shard, Side, Sizes, plan_reshard
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

    def check_sequence(self, length: int) -> None:
        """Raise unless the ranks can share a sequence of that length: `ShapeError`."""
        if rest := length % self.parts:
            raise ShapeError(
                f"a sequence of {length} cannot be cut in {self.parts} equal parts for {self.name}; pad it to "
                f"{length + self.parts - rest}"
            )

    @property
    def side(self) -> Side:
        """The stage as a side of a boundary."""
        placement: Placement = Shard("s") if self.cuts_sequence else Replicate()
        size = len(self.ranks)
        return Side(self.name, 0, (SideDim("tp", size, 1, placement),) if size > 1 else (), members=self.ranks)


@frozen(slots=False)
class VTPBoundary:
    """Between ``source``, which makes the activation, and ``destination``; ``axis`` is the sequence's.

    ``edge`` is in numbers of plan stages: the way round of a ring of P stages is ``Edge(P - 1, P)``.
    """

    edge: Edge
    source: VTPStage
    destination: VTPStage
    axis: int = 0

    def stage_of(self, rank: int) -> VTPStage:
        """The side that the rank is on."""
        return self.source if rank in self.source.ranks else self.destination

    def sends(self, rank: int, direction: Direction) -> bool:
        """Whether the rank is on the side that sends in that direction."""
        return (rank in self.source.ranks) == (direction is Direction.FORWARD)

    def receiver(self, direction: Direction) -> VTPStage:
        """The side that receives in that direction."""
        return self.destination if direction is Direction.FORWARD else self.source

    def wiring(self, label: str, rank: int, traffic: Traffic | None = None) -> BridgeWiring:
        """The lanes and groups of ``rank`` for ``traffic`` (None: both directions), named after ``label``."""
        directions = directions_of(self.edge, backward=True, traffic=traffic)
        return BridgeWiring(f"{label}/{self.edge}", *self._sides, _AXES, "direct", directions, rank)

    def whole(self, shape: Sequence[int], rank: int) -> Shape:
        """The shape of the whole tensor of which ``rank`` holds a part of ``shape``, if both sides can cut it."""
        extents = list(shape)
        if self._cuts_sequence:
            if len(extents) <= self.axis:
                raise ShapeError(f"boundary {self.edge} cuts axis {self.axis}; shape {tuple(shape)} has no such axis")
            extents[self.axis] *= self.stage_of(rank).parts
            for stage in (self.source, self.destination):
                stage.check_sequence(extents[self.axis])
        return tuple(extents)

    def crossing(self, whole: Sequence[int], direction: Direction, rank: int) -> tuple[Shape, RankPart]:
        """The shape of ``rank``'s own tensor where the whole is ``whole``, and its part in the plan that moves it.

        The plan is for the tensor seen with three axes, and so are its ``source_shape`` and ``destination_shape``.
        """
        sizes = Sizes(self._view(whole), axes=_AXES)
        plan = plan_reshard(*self._sides, sizes, backward=direction is Direction.BACKWARD, rank=rank)
        shape = list(whole)
        parts = self.stage_of(rank).parts
        if parts > 1:
            shape[self.axis] //= parts
        return tuple(shape), RankPart(plan, rank)

    def _view(self, whole: Sequence[int]) -> Shape:
        """Three axes; the elements in one row where no side cuts the sequence, since slices are then contiguous."""
        if not self._cuts_sequence:
            return (1, 1, math.prod(whole))
        return (math.prod(whole[: self.axis]), whole[self.axis], math.prod(whole[self.axis + 1 :]))

    @property
    def _cuts_sequence(self) -> bool:
        return self.source.parts > 1 or self.destination.parts > 1

    @cached_property
    def _sides(self) -> tuple[Side, Side]:
        return self.source.side, self.destination.side
