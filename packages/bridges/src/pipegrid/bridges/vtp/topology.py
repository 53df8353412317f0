"""Stages of one pipeline with different tensor-parallel sizes: which rank is where. Pure; no torch.

``VTPTopology([2, 4, 4])`` is ten ranks, ``[0, 1] [2 .. 5] [6 .. 9]``. With ``dp`` every stage has that many replicas,
side by side: ``VTPTopology([1, 2], dp=2)`` is ``[0], [1]`` and ``[2, 3], [4, 5]``. Replica ``d`` of a stage exchanges
with replica ``d`` of the next one.

A side of a boundary either holds copies of the tensor (tensor parallelism) or consecutive parts of its sequence
(sequence parallelism). Both are cases of the reshard plan, which is made for the tensor seen as ``[before, sequence,
after]``: see `Folded`. Activations and gradients are two edges, each with a source and a destination.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from attrs import field, frozen

from pipegrid.bridges.bridge.structure import Folded, require_parts
from pipegrid.bridges.bridge.wiring import BridgeWiring
from pipegrid.core import Count, Direction, Edge, Index, checked_fields
from pipegrid.reshard import BridgeError, Placement, Replicate, Shard, Side
from pipegrid.reshard.side import SideDim


@frozen
class VTPStage:
    """One replica of one stage: its ranks, and whether they hold parts of the sequence in place of copies."""

    name: str
    ranks: tuple[int, ...]
    cuts_sequence: bool = False

    @property
    def parts(self) -> int:
        """Number of parts in which the ranks hold the sequence."""
        return len(self.ranks) if self.cuts_sequence else 1

    @property
    def side(self) -> Side:
        """The stage as a side of a boundary."""
        placement: Placement = Shard("s") if self.cuts_sequence else Replicate()
        size = len(self.ranks)
        return Side(self.name, 0, (SideDim("tp", size, 1, placement),) if size > 1 else (), members=self.ranks)


@frozen
class VTPBoundary:
    """The boundary from ``source``, which makes the activation, to ``destination``; ``axis`` is the sequence's.

    ``edge`` is in numbers of plan stages: the edge that closes a ring of P stages is ``Edge(P - 1, P)``.
    """

    edge: Edge
    source: VTPStage
    destination: VTPStage
    axis: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both sides."""
        return (*self.source.ranks, *self.destination.ranks)

    def ends(self, direction: Direction) -> tuple[VTPStage, VTPStage]:
        """The side that sends in that direction, and the one that receives."""
        both = self.source, self.destination
        return both if direction is Direction.FORWARD else both[::-1]

    def tensor(self, direction: Direction) -> Folded:
        """The declaration of the tensor that is sent in that direction."""
        giver, taker = self.ends(direction)
        return Folded(f"boundary {self.edge}", self.axis, ((giver.name, giver.parts), (taker.name, taker.parts)))

    def wiring(self, label: str, rank: int, direction: Direction) -> BridgeWiring:
        """The lanes and groups of ``rank`` for that direction, named after ``label``."""
        ways = {Direction.FORWARD: f"{self.edge}", Direction.BACKWARD: f"{self.edge} gradients"}
        giver, taker = self.ends(direction)
        sides, axes = (giver.side, taker.side), self.tensor(direction).names
        return BridgeWiring(f"{label}/{ways[direction]}", *sides, axes, "direct", (Direction.FORWARD,), rank)


def _as_flags(value: bool | Sequence[bool]) -> bool | tuple[bool, ...]:
    return value if isinstance(value, bool) else tuple(value)


@frozen(slots=False, field_transformer=checked_fields(BridgeError))
class VTPTopology:
    """The ranks of each stage.

    Args:
        tp_sizes: tensor-parallel size of each stage.
        dp: replicas of the whole pipeline.
        ring: stage 0 also holds the last layers, so the last stage's activation goes round to it (a U-shape).
        ranks: the global ranks of each stage, replica after replica; default: consecutive from 0.
        world_size: ranks of the job, where they are to be checked now; a `VTPCommunicator` checks them in any case.
        layout: the layer layout, a list of its stages, or their number, to be checked against ``tp_sizes``. In a ring
            there is one stage more: stage 0 holds the first and the last of them.
        sequence_parallel: whether the ranks of a stage hold consecutive parts of the sequence at its boundaries, in
            place of copies; one value, or one per stage.
        sequence_length: of the whole sequence, to be checked now; each tensor is checked in any case.
        sequence_axis: the axis that sequence parallelism cuts; 0 is that of ``[sequence, batch, hidden]``.

    Raises:
        BridgeError: a size below 1, a ring of one stage, ranks that are missing, given twice or past the world, a
            world that has more ranks than the stages and no ``ranks``, a layout of another length.
        ShapeError: a sequence that a stage cannot cut.

    Examples:
        >>> VTPTopology([2, 1, 4], dp=2).stage_ranks
        ((0, 1, 2, 3), (4, 5), (6, 7, 8, 9, 10, 11, 12, 13))
    """

    tp_sizes: tuple[Count, ...]
    dp: Count = 1
    ring: bool = False
    ranks: tuple[tuple[Index, ...], ...] | None = field(default=None, kw_only=True)
    world_size: Count | None = field(default=None, kw_only=True)
    layout: Any = field(default=None, kw_only=True, repr=False)
    sequence_parallel: bool | tuple[bool, ...] = field(default=False, converter=_as_flags, kw_only=True)
    sequence_length: Count | None = field(default=None, kw_only=True)
    sequence_axis: Index = field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.num_stages < 1 + self.ring:
            raise BridgeError(f"tp_sizes is {list(self.tp_sizes)}; a chain has one stage or more, a ring two")
        listed = getattr(self.layout, "stages", self.layout)
        layout = self.placement if listed is None else range(listed) if isinstance(listed, int) else listed
        for what, given, needed in (
            ("ranks", self.stage_ranks, self.num_stages),
            ("sequence_parallel", self.cuts_sequence, self.num_stages),
            ("layout", layout, self.num_plan_stages),
        ):
            if len(given) != needed:
                raise BridgeError(
                    f"{what} has {len(given)} stages; tp_sizes {list(self.tp_sizes)}, ring={self.ring} has {needed}"
                )
        for stage, (ranks, size) in enumerate(zip(self.stage_ranks, self.tp_sizes, strict=True)):
            if len(ranks) != size * self.dp:
                raise BridgeError(f"stage {stage} has ranks {list(ranks)}; it needs tp {size} x dp {self.dp}")
        if len(self._place) != self.dp * sum(self.tp_sizes):
            raise BridgeError(f"ranks {self.ranks} name a rank twice")
        if self.world_size is not None:
            self.check_world(self.world_size)
        if self.sequence_length is not None:
            for part in self.replica(0):
                require_parts(self.sequence_length, part.parts, part.name)

    def check_world(self, world_size: int) -> None:
        """Raise unless the stages fit the world.

        Raises:
            BridgeError: the message says which world would.
        """
        needed = max(self._place) + 1
        if world_size < needed or (world_size > needed and self.ranks is None):
            raise BridgeError(
                f"tp_sizes {list(self.tp_sizes)} with dp={self.dp} need a world of {needed}, not of {world_size}; "
                "in a larger one say which ranks the stages have (ranks=)"
            )

    @property
    def num_stages(self) -> int:
        """Stages with ranks of their own."""
        return len(self.tp_sizes)

    @property
    def num_plan_stages(self) -> int:
        """Stages of a plan: a ring has one more, on the ranks of stage 0, which its last stage feeds."""
        return self.num_stages + self.ring

    @property
    def placement(self) -> tuple[int, ...]:
        """The stage whose ranks hold each plan stage: the placement of a plan for this pipeline."""
        return tuple(stage % self.num_stages for stage in range(self.num_plan_stages))

    @cached_property
    def cuts_sequence(self) -> tuple[bool, ...]:
        """Whether the ranks of each stage hold parts of the sequence."""
        flags = self.sequence_parallel
        return (flags,) * self.num_stages if isinstance(flags, bool) else flags

    @cached_property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage, replica after replica."""
        if self.ranks is not None:
            return self.ranks
        ends = itertools.accumulate((size * self.dp for size in self.tp_sizes), initial=0)
        return tuple(tuple(range(first, last)) for first, last in itertools.pairwise(ends))

    def replica(self, index: int) -> tuple[VTPStage, ...]:
        """The stages of one replica of the pipeline."""
        index, parts = range(self.dp)[index], zip(self.stage_ranks, self.tp_sizes, self.cuts_sequence, strict=True)
        return tuple(
            VTPStage(f"stage {stage}", ranks[index * size : (index + 1) * size], cuts)
            for stage, (ranks, size, cuts) in enumerate(parts)
        )

    @cached_property
    def _place(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (stage, index // self.tp_sizes[stage])
            for stage, ranks in enumerate(self.stage_ranks)
            for index, rank in enumerate(ranks)
        }

    def place_of(self, rank: int) -> tuple[int, int]:
        """The stage of the rank, and the replica.

        Raises:
            BridgeError: it has none.
        """
        if rank not in self._place:
            raise BridgeError(f"rank {rank} holds no stage; the stages are on ranks {self.stage_ranks}")
        return self._place[rank]

    def receives_forward(self, stage: int, *, is_end_stage: bool) -> bool:
        """Whether ``stage`` receives activations, and sends gradients: not stage 0, unless as the end of a ring."""
        return stage != 0 or is_end_stage

    def sends_forward(self, stage: int, *, is_end_stage: bool) -> bool:
        """Whether ``stage`` sends activations, and receives gradients: not the last, in a ring stage 0 as its end."""
        if self.ring:
            return stage != 0 or not is_end_stage
        return stage != self.num_stages - 1

    def boundaries(self, replica: int) -> tuple[VTPBoundary, ...]:
        """The boundaries of one replica, from the first; in a ring the last one leads round to stage 0."""
        stages = self.replica(replica)
        return tuple(
            VTPBoundary(Edge(stage, stage + 1), stages[here], stages[there], self.sequence_axis)
            for stage, (here, there) in enumerate(itertools.pairwise(self.placement))
        )
