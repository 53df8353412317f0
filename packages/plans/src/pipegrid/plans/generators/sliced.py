"""The schedules of sequence slices: microbatches cut along the sequence, for long sequences and few microbatches.

With causal attention a slice needs of the earlier slices of its microbatch only their keys and values, and the
gradients of these come from the later slices. So forwards run in the order of the sequence and backwards in reverse,
and each slice passes through the pipeline like a small microbatch of its own: with k slices the bubble is that of k
times as many microbatches, and what is live is counted in slices. The price is k - 1 forwards more before the first
backward, which is that of a microbatch's last slice.

Source: Sun et al. 2024, "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training"
(arXiv 2406.03488). Slices of equal cost: `balanced_slices`.
"""

from __future__ import annotations

from pipegrid.core.fields import Count, checked_arguments
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators.looped import interleaved_1f1b
from pipegrid.plans.generators.shapes import OrderBuilder, Steps, chain_plan, split_order
from pipegrid.plans.plan import Action, ActionKind, Plan, compute_plan


@checked_arguments(PlanError)
def seq1f1b(num_positions: Count, num_microbatches: Count, *, num_slices: Count) -> Plan:
    """1F1B over slices: the bubble of 1F1B divided by k, and about 1/k of its memory.

    Bubble ``(P-1)(F+B)/k`` for slices of equal cost and any M, where ``F`` and ``B`` are of a microbatch; at most
    ``(P-p-1)/k + 1`` microbatches live at position p (k = 1 is `one_f_one_b`)::

        0: F0.0 F0.1 F1.0 .    .    B0.1 ---- F1.1 B0.0 ---- .    B1.1 ---- B1.0 ----
        1: .    F0.0 F0.1 B0.1 ---- F1.0 B0.0 ---- F1.1 B1.1 ---- B1.0 ---- .    .

    Source: Sun et al. 2024, "Seq1F1B".

    Examples:
        >>> schedules = seq1f1b, seq1f1b_interleaved, seq1f1b_zero_bubble
        >>> [round(simulate(schedule(4, 8, num_slices=2)).bubble(), 3) for schedule in schedules]
        [0.158, 0.086, 0.059]
    """
    pieces = num_microbatches * num_slices

    def order(position: int) -> Steps:
        builder = OrderBuilder(pieces)
        builder.f(position, num_positions - position - 1 + num_slices - 1)  # warmup
        for _ in range(pieces):  # steady; the forwards end first
            builder.f(position)
            builder.b(position)
        return builder.order

    return _sliced(chain_plan(order, num_positions, pieces), num_slices)


@checked_arguments(PlanError)
def seq1f1b_interleaved(
    num_positions: Count,
    num_microbatches: Count,
    *,
    num_slices: Count,
    num_chunks: Count = 2,
    num_stages: Count | None = None,
) -> Plan:
    """`interleaved_1f1b` over slices: V chunks divide the bubble again.

    Bubble ``(P-1)(F+B)/(kV)`` for slices of equal cost and ``M k`` a multiple of N, the least multiple of k that is at
    least P: the slices that pass through a chunk before the next one's turn. At most ``(2(P-p-1) + (V-1)N + k)/(kV)``
    microbatches are live at position p.

    Source: Sun et al. 2024, "Seq1F1B" (Seq1F1B-I).
    """
    whole = interleaved_1f1b(
        num_positions,
        num_microbatches * num_slices,
        num_chunks=num_chunks,
        group_size=-(-num_positions // num_slices) * num_slices,  # whole microbatches, for their backwards in reverse
        num_stages=num_stages,
        extra_warmup=num_slices - 1,
    )
    return _sliced(whole, num_slices)


@checked_arguments(PlanError)
def seq1f1b_zero_bubble(num_positions: Count, num_microbatches: Count, *, num_slices: Count) -> Plan:
    """`zero_bubble_h1` over slices: the memory of `seq1f1b` on position 0 and a third of its bubble.

    Bubble ``(P-1)(F+I-W)/k`` for slices of equal cost and ``M k`` of at least ``P + k - 1``; at most ``(P-1)/k + 1``
    microbatches live on every position.

    Source: Sun et al. 2024, "Seq1F1B", which joins it with ZB-H1 (Qi et al. 2023, section 2.1).
    """
    pieces, most = num_microbatches * num_slices, num_positions + num_slices - 2

    def order(position: int) -> Steps:
        return split_order(position, pieces, warmup=most - position, delay=position)

    return _sliced(chain_plan(order, num_positions, pieces), num_slices)


def _sliced(whole: Plan, num_slices: int) -> Plan:
    """The plan whose slices are the microbatches of ``whole``; the backwards of each ``num_slices`` run in reverse."""

    def slice_of(action: Action) -> Action:
        microbatch, part = divmod(action.microbatch or 0, num_slices)
        if action.kind is not ActionKind.F:
            part = num_slices - 1 - part
        return Action(action.kind, action.stage, microbatch, slice=part if num_slices > 1 else None)

    return compute_plan(
        [[slice_of(action) for action in whole.actions(position)] for position in range(whole.num_positions)],
        graph=whole.graph,
        placement=whole.placement,
        num_microbatches=whole.num_microbatches // num_slices,
        num_slices=num_slices,
    )
