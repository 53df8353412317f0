"""The schedules that loop: stage ``s`` lies on position ``s % P``, so each position holds several chunks."""

from __future__ import annotations

from collections import deque
from typing import Literal

from attrs import evolve

from pipegrid.core.fields import Count, Index, checked_arguments
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators.shapes import Order, Steps, chain_plan, looped_placement
from pipegrid.plans.plan import Action, ActionKind, Plan, backward, forward


@checked_arguments(PlanError)
def interleaved_1f1b(
    num_positions: Count,
    num_microbatches: Count,
    *,
    num_chunks: Count = 2,
    group_size: Count | None = None,
    num_stages: Count | None = None,
    extra_warmup: Index = 0,
    overlap: bool = False,
) -> Plan:
    """1F1B over chunks: groups of ``group_size`` microbatches pass through all chunks, one after another.

    Bubble ``(P-1)(F+B)/V`` (``F`` and ``B`` of a whole position) for ``group_size`` P and M a multiple of it;
    at most ``2(P-p-1) + (V-1)N + 1`` chunks live at position p. In capitals the first chunk of two::

        0: F0 F1 f0 f1 F2 .  b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .  b2 -- .  b3 -- B2 -- B3 --
        1: .  F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -- .  .

    ``group_size`` (default P) may be any, and so may M: a group with fewer than P microbatches (a small
    ``group_size``, or the last group) keeps its place as if it had P, since in a shorter round a chunk would
    be due before the round before has come about. ``num_stages`` (default ``P * V``) may be smaller: the last
    round then does not reach every position. ``extra_warmup`` forwards more run before the first backward, and as many
    chunks more are live: for models that compute one microbatch while another one's tokens travel between experts.
    With ``overlap`` a forward and the backward after it are a pair, with one forward more before the first backward.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    section 2.2.2; group sizes other than P as in Meta's Llama 3 report (Dubey et al. 2024, section 3.3.2).

    Examples:
        >>> interleaved_1f1b(2, 4, num_chunks=2).placement
        ((0,), (1,), (0,), (1,))
        >>> schedules = interleaved_1f1b, interleaved_zero_bubble, looped_bfs
        >>> [round(simulate(schedule(4, 8)).bubble(), 3) for schedule in schedules]
        [0.158, 0.059, 0.158]
    """
    return _interleaved(
        num_positions,
        num_microbatches,
        num_chunks=num_chunks,
        group_size=group_size,
        num_stages=num_stages,
        extra_warmup=extra_warmup + overlap,  # a pair's forward is not the one that its backward needs
        overlap=overlap,
    )


def _interleaved(
    num_positions: int,
    num_microbatches: int,
    *,
    num_chunks: int,
    group_size: int | None,
    num_stages: int | None,
    extra_warmup: int,
    warmup_per_hop: int = 2,
    overlap: bool = False,
) -> Plan:
    """The plan of `interleaved_1f1b`; a position has ``warmup_per_hop`` warmup forwards more than the one after it."""
    stages = _num_stages(num_positions, num_chunks, num_stages)
    size = num_positions if group_size is None else group_size
    forwards: list[tuple[int, int]] = []  # (chunk, microbatch); a microbatch that does not exist is a gap
    backwards: list[tuple[int, int]] = []
    for first in range(0, num_microbatches, size):
        real = min(size, num_microbatches - first)
        width = max(real, num_positions)
        group = [first + slot if slot < real else num_microbatches for slot in range(width)]
        forwards += [(chunk, m) for chunk in range(num_chunks) for m in group]
        backwards += [(chunk, m) for chunk in reversed(range(num_chunks)) for m in group]
    between = (num_chunks - 1) * max(size, num_positions) + extra_warmup  # the first backward's chunk comes last

    def order(position: int) -> Steps:
        """Warmup, steady and cooldown over the table of chunks."""
        warmup = min(warmup_per_hop * (num_positions - position - 1) + between, len(forwards))
        steps: Steps = []
        for index in range(len(forwards) + warmup):
            passes = [(forward, *forwards[index])] if index < len(forwards) else []
            passes += [(backward, *backwards[index - warmup])] if index >= warmup else []
            both = [
                make(chunk * num_positions + position, m)
                for make, chunk, m in passes
                if m < num_microbatches and chunk * num_positions + position < stages
            ]
            steps += [tuple(both)] if overlap and len(both) == 2 else both
        return steps

    return chain_plan(order, num_positions, num_microbatches, looped_placement(num_positions, stages))


@checked_arguments(PlanError)
def interleaved_zero_bubble(
    num_positions: Count,
    num_microbatches: Count,
    *,
    num_chunks: Count = 2,
    group_size: Count | None = None,
    num_stages: Count | None = None,
    extra_warmup: Index = 0,
    delayed: bool = True,
    warmup_per_hop: Literal[1, 2] | None = None,
) -> Plan:
    """ZB-H1 over chunks: the gradient leaves after ``I``, and a ``W`` runs while it travels.

    Bubble ``(P-1)(F+I-W)/V`` for ``group_size`` P, M a multiple of it and W of at most F and I, at the memory of 1F1B:
    at most P microbatches live on every position, since position p is p weight halves behind. One chunk is
    `zero_bubble_h1`. In capitals the first chunk of two::

        0: F0 F1 F2 f0 f1 f2 .  .  i0 w0 i1 w1 i2 w2 I0 W0 I1 W1 I2 W2
        1: .  F0 F1 F2 f0 f1 .  i0 f2 i1 w0 i2 w1 I0 w2 I1 W0 I2 W1 W2
        2: .  .  F0 F1 F2 f0 i0 f1 i1 f2 i2 w0 I0 w1 I1 w2 I2 W0 W1 W2

    ``warmup_per_hop``: the warmup forwards that a position has more than the one after it, here 1. With 2, as in
    `interleaved_1f1b`, each hop has the time of a chunk to hide a slow link, and at most ``(2(P-1) + (V-1)N + 1)/V``
    are live. ``delayed=False`` runs each ``W`` right after its own ``I``, with 2 a hop, and the bubble is
    ``(P-1)(F+I)/V``; with ``extra_warmup`` too, that is the schedule of Kimi K2. The other arguments are those of
    `interleaved_1f1b`.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1 (ZB-H1), over the chunks of
    `interleaved_1f1b`, as torch's ``ScheduleInterleavedZeroBubble``; Kimi Team 2025, "Kimi K2: Open Agentic
    Intelligence", section 2.4.2 (the weight gradient decoupled from each backward, beside its communication).
    """
    whole = _interleaved(
        num_positions,
        num_microbatches,
        num_chunks=num_chunks,
        group_size=group_size,
        num_stages=num_stages,
        extra_warmup=extra_warmup,
        warmup_per_hop=warmup_per_hop or (1 if delayed else 2),
    )

    def order(position: int) -> Order:
        split: Order = []
        owed: deque[Action] = deque()
        for action in whole.actions(position):
            if action.kind is ActionKind.F:
                split.append(action)
                continue
            split.append(evolve(action, kind=ActionKind.I))
            owed.append(evolve(action, kind=ActionKind.W))
            if len(owed) > (position if delayed else 0):
                split.append(owed.popleft())
        return [*split, *owed]

    return chain_plan(order, num_positions, num_microbatches, looped_placement(num_positions, whole.num_stages))


@checked_arguments(PlanError)
def looped_bfs(
    num_positions: Count, num_microbatches: Count, *, num_chunks: Count = 2, num_stages: Count | None = None
) -> Plan:
    """Breadth first: all microbatches through a chunk before the next chunk, then backwards likewise.

    Bubble ``(P-1)(F+B)/V`` for M of at least P; every microbatch of every chunk is live at once. In capitals the first
    chunk of two::

        0: F0 F1 F2 f0 f1 f2 .  .  .  b0 -- b1 -- b2 -- B0 -- B1 -- B2 --
        1: .  F0 F1 F2 f0 f1 f2 b0 -- b1 -- b2 -- B0 -- B1 -- B2 -- .  .

    Source: Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism", section 4. Backwards run in the order of
    the forwards (in torch's ``ScheduleLoopedBFS`` in reverse). ``num_stages`` as in `interleaved_1f1b`.
    """
    stages = _num_stages(num_positions, num_chunks, num_stages)
    microbatches = range(num_microbatches)

    def order(position: int) -> Order:
        own = range(position, stages, num_positions)
        return [forward(stage, m) for stage in own for m in microbatches] + [
            backward(stage, m) for stage in reversed(own) for m in microbatches
        ]

    return chain_plan(order, num_positions, num_microbatches, looped_placement(num_positions, stages))


@checked_arguments(PlanError)
def forward_only(
    num_positions: Count, num_microbatches: Count, *, num_chunks: Count = 1, num_stages: Count | None = None
) -> Plan:
    """The forwards of `interleaved_1f1b` alone; bubble ``(P-1)F/V`` for M a multiple of P or one chunk.

    Examples:
        >>> [str(step) for step in forward_only(2, 3).positions[1]]
        ['1F0', '1F1', '1F2']
    """
    stages = _num_stages(num_positions, num_chunks, num_stages)

    def order(position: int) -> Order:
        return [
            forward(stage, m)
            for first in range(0, num_microbatches, num_positions)
            for stage in range(position, stages, num_positions)
            for m in range(first, min(first + num_positions, num_microbatches))
        ]

    return chain_plan(
        order, num_positions, num_microbatches, looped_placement(num_positions, stages), forward_only=True
    )


def _num_stages(num_positions: int, num_chunks: int, num_stages: int | None) -> int:
    most = num_positions * num_chunks
    few = most - num_positions + 1
    if num_stages is not None and not few <= num_stages <= most:
        what = f"{num_chunks} chunks on {num_positions} positions"
        raise PlanError(f"num_stages is {num_stages}; {what} are {few}..{most}")
    return most if num_stages is None else num_stages
