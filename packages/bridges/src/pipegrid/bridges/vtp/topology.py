"""Stages of one pipeline with different tensor-parallel sizes: which rank is where. Pure; no torch.

``VTPTopology([2, 4, 4])`` is ten ranks, ``[0, 1] [2 .. 5] [6 .. 9]``. With ``dp`` every stage has that many replicas,
side by side: ``VTPTopology([1, 2], dp=2)`` is ``[0], [1]`` and ``[2, 3], [4, 5]``. Replica ``d`` of a stage exchanges
with replica ``d`` of the next one.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any

from attrs import field, frozen

from pipegrid.bridges.checks import as_integer, as_tuple
from pipegrid.bridges.errors import ShapeError, VTPTopologyError
from pipegrid.bridges.vtp.boundary import VTPBoundary, VTPStage, check_sequence
from pipegrid.topology.fields import Count, Index, checked, checked_fields, index_of, shown
from pipegrid.transport.edge import Edge


def _as_flags(value: Any) -> bool | tuple[bool, ...]:
    if isinstance(value, bool):
        return value
    return as_tuple(value, "sequence_parallel", "flags, one per stage, or one flag for all", error=VTPTopologyError)


@frozen(slots=False, field_transformer=checked_fields(VTPTopologyError))
class VTPTopology:
    """Which ranks hold which stage.

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
        VTPTopologyError: a size below 1, a ring of one stage, ranks that are missing, given twice or past the world, a
            world that has more ranks than the stages and no ``ranks``, a layout of another length, a sequence that a
            stage cannot cut.
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
        if not self.tp_sizes:
            raise VTPTopologyError("tp_sizes is empty; give the tensor-parallel size of each stage, like [2, 4, 4]")
        if self.ring and self.num_stages < 2:
            raise VTPTopologyError(
                f"a ring of {self.num_stages} stage, tp_sizes {list(self.tp_sizes)}, would go round to itself; give "
                f"two stages or more, or ring=False"
            )
        self._check_ranks()
        if self.world_size is not None:
            self.check_world(self.world_size)
        self._check_layout()
        self._check_sequence()

    # -- checks -------------------------------------------------------------------------------------------

    def _check_ranks(self) -> None:
        if self.ranks is None:
            return
        if len(self.ranks) != self.num_stages:
            raise VTPTopologyError(
                f"ranks lists {len(self.ranks)} stages, but tp_sizes {list(self.tp_sizes)} has {self.num_stages}; give "
                f"one list per stage"
            )
        seen: dict[int, int] = {}
        for stage, (here, size) in enumerate(zip(self.ranks, self.tp_sizes, strict=True)):
            if len(here) != size * self.dp:
                raise VTPTopologyError(
                    f"stage {stage} was given the {len(here)} ranks {list(here)}, but its tp size {size} with "
                    f"dp={self.dp} needs {size * self.dp}"
                )
            for rank in here:
                if rank in seen:
                    raise VTPTopologyError(
                        f"rank {rank} is given twice, in stage {seen[rank]} and in stage {stage}; a rank holds one "
                        f"place"
                    )
                seen[rank] = stage

    def check_world(self, world_size: int) -> None:
        """Raise unless the stages fit the world.

        Raises:
            VTPTopologyError: the message says which world, or which ``dp``, would.
        """
        world_size = checked(world_size, Count, "world_size", VTPTopologyError)
        needed = self.dp * sum(self.tp_sizes)
        if self.ranks is not None:
            last = max(itertools.chain.from_iterable(self.ranks))
            if last >= world_size:
                raise VTPTopologyError(
                    f"rank {last} is given a stage, but the world has {world_size} ranks, 0 to {world_size - 1}; a "
                    f"world of {last + 1} would fit"
                )
            return
        if needed == world_size:
            return
        per_replica = sum(self.tp_sizes)
        remedy = f"a world of {needed} would fit"
        if world_size % per_replica == 0:
            remedy += f", and so would dp={world_size // per_replica}"
        if needed < world_size:
            remedy += (
                f"; to leave ranks {needed} to {world_size - 1} to others, say which ranks the stages have (ranks=)"
            )
        raise VTPTopologyError(
            f"tp_sizes {list(self.tp_sizes)} with dp={self.dp} need {needed} ranks, but the world has {world_size}; "
            f"{remedy}"
        )

    def _check_layout(self) -> None:
        if self.layout is None:
            return
        listed = getattr(self.layout, "stages", self.layout)
        stages = index_of(listed)
        if stages is None:
            stages = len(as_tuple(listed, "layout", "stages, or their number", error=VTPTopologyError))
        if stages != self.num_plan_stages:
            round_ = ", and one more for the way round of the ring" if self.ring else ""
            raise VTPTopologyError(
                f"the layout has {stages} stages, but tp_sizes {list(self.tp_sizes)} are of {self.num_stages}{round_}; "
                f"give a layout of {self.num_plan_stages} stages, or a tp size for each of its stages"
            )

    def _check_sequence(self) -> None:
        flags = self.sequence_parallel
        if not isinstance(flags, bool) and len(flags) != self.num_stages:
            raise VTPTopologyError(
                f"sequence_parallel has {len(flags)} values, {flags}, but there are {self.num_stages} stages; give one "
                f"per stage, or one for all"
            )
        if self.sequence_length is None:
            return
        for stage in self.replica(0):
            try:
                check_sequence(self.sequence_length, stage.name, stage.parts)
            except ShapeError as error:
                raise VTPTopologyError(str(error)) from None

    # -- who is where -------------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """Stages with ranks of their own."""
        return len(self.tp_sizes)

    @property
    def num_plan_stages(self) -> int:
        """Stages that a plan has: in a ring, those after the way round are one more, on the ranks of stage 0."""
        return self.num_stages + self.ring

    @property
    def placement(self) -> tuple[int, ...]:
        """Per plan stage, the stage whose ranks hold it: what a plan for this pipeline is placed on."""
        return tuple(stage % self.num_stages for stage in range(self.num_plan_stages))

    @cached_property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Per stage its ranks, replica after replica."""
        if self.ranks is not None:
            return self.ranks
        ends = itertools.accumulate((size * self.dp for size in self.tp_sizes), initial=0)
        return tuple(tuple(range(first, last)) for first, last in itertools.pairwise(ends))

    def replica(self, index: int) -> tuple[VTPStage, ...]:
        """The stages of one replica of the pipeline; `VTPTopologyError` where there is no such replica."""
        index = as_integer(index, "the index of a replica", least=0, most=self.dp - 1, error=VTPTopologyError)
        flags = self.sequence_parallel
        per_stage = (flags,) * self.num_stages if isinstance(flags, bool) else flags
        return tuple(
            VTPStage(f"stage {stage}", ranks[index * size : (index + 1) * size], cuts)
            for stage, (ranks, size, cuts) in enumerate(zip(self.stage_ranks, self.tp_sizes, per_stage, strict=True))
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
            VTPTopologyError: it has none.
        """
        number = index_of(rank)
        if number is None or number not in self._place:
            raise VTPTopologyError(
                f"rank {shown(rank)} holds no stage of tp_sizes {list(self.tp_sizes)} on ranks "
                f"{[list(ranks) for ranks in self.stage_ranks]}; only these make the communicator"
            )
        return self._place[number]

    def hears_forward(self, stage: int, *, is_end_stage: bool) -> bool:
        """Whether ``stage`` receives activations, and sends gradients: not stage 0, unless as the end of a ring."""
        stage = self._checked_stage(stage)
        return stage != 0 or is_end_stage

    def tells_forward(self, stage: int, *, is_end_stage: bool) -> bool:
        """Whether ``stage`` sends activations, and receives gradients: not the last, in a ring stage 0 as its end."""
        stage = self._checked_stage(stage)
        if self.ring:
            return stage != 0 or not is_end_stage
        return stage != self.num_stages - 1

    def _checked_stage(self, stage: int) -> int:
        return as_integer(stage, "stage", least=0, most=self.num_stages - 1, error=VTPTopologyError)

    def boundaries(self, replica: int) -> tuple[VTPBoundary, ...]:
        """The boundaries of one replica, from the first; in a ring the last one leads round to stage 0."""
        stages = self.replica(replica)
        return tuple(
            VTPBoundary(Edge(stage, stage + 1), stages[here], stages[there], self.sequence_axis)
            for stage, (here, there) in enumerate(itertools.pairwise(self.placement))
        )
