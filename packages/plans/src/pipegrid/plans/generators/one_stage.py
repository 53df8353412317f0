"""The schedules with one stage on each position: GPipe, 1F1B, and the zero-bubble ZB-H1 and ZB-H2.

The last two split the backward. ``I``, the half on which the stage before depends, runs where 1F1B runs ``B``; ``W``,
on which no stage depends, fills the bubbles.
"""

from __future__ import annotations

from pipegrid.core.fields import Count, checked_arguments
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators.shapes import Order, Steps, chain_plan, split_order
from pipegrid.plans.plan import Plan, backward, forward


@checked_arguments(PlanError)
def gpipe(num_positions: Count, num_microbatches: Count) -> Plan:
    """All forwards, then all backwards.

    Bubble ``(P-1)(F+B)`` for any ``M``; every microbatch is live at once::

        0: F0 F1 F2 F3 .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 --
        1: .  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 -- .  .
        2: .  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .  .  .

    Source: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", section 2.3, figure 2 (c). Backwards run in the order of the forwards (in that figure in reverse).
    """
    microbatches = range(num_microbatches)

    def order(position: int) -> Order:
        return [forward(position, m) for m in microbatches] + [backward(position, m) for m in microbatches]

    return chain_plan(order, num_positions, num_microbatches)


@checked_arguments(PlanError)
def one_f_one_b(num_positions: Count, num_microbatches: Count) -> Plan:
    """One forward, one backward in turn, after a warmup that fills the pipeline.

    Bubble ``(P-1)(F+B)`` for any ``M``, as GPipe, with at most ``P - p`` microbatches live at position p::

        0: F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
        1: .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .
        2: .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    section 2.2.1 (PipeDream-Flush); the order is that of Narayanan et al. 2019, "PipeDream", section 3.2.

    Examples:
        >>> simulate(one_f_one_b(4, 8)).bubble()
        0.2727272727272727
    """

    def order(position: int) -> Order:
        warmup = min(num_positions - position - 1, num_microbatches)
        actions = [forward(position, m) for m in range(warmup)]
        for m in range(num_microbatches - warmup):  # steady
            actions += [forward(position, warmup + m), backward(position, m)]
        return actions + [backward(position, m) for m in range(num_microbatches - warmup, num_microbatches)]

    return chain_plan(order, num_positions, num_microbatches)


@checked_arguments(PlanError)
def zero_bubble_h1(num_positions: Count, num_microbatches: Count) -> Plan:
    """1F1B's memory and a third of its bubble.

    Bubble ``(P-1)(F+I-W)`` for M of at least P, where ``I + W`` is the whole backward; at most P microbatches live on
    every position (1F1B has that on the first), since position p is p weight halves behind::

        0: F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1 (ZB-H1).
    """

    def order(position: int) -> Steps:
        return split_order(position, num_microbatches, warmup=num_positions - 1 - position, delay=position)

    return chain_plan(order, num_positions, num_microbatches)


@checked_arguments(PlanError)
def zero_bubble_h2(num_positions: Count, num_microbatches: Count) -> Plan:
    """No bubble within a position's span, for twice the memory of 1F1B.

    With ``F = I = W`` and M of at least 2P - 1 no position waits between its first action and its last (they
    start one after another, and end so: the bubble ``(P-1)(F+I-2W)`` vanishes where the optimizer's step need
    not wait for all); at most 2P - 1 microbatches are live::

        0: F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
        1: .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
        2: .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.2 (ZB-H2).

    Examples:
        >>> [simulate(schedule(4, 8)).bubble(of="span") for schedule in (zero_bubble_h1, zero_bubble_h2)]
        [0.05882352941176472, 0.0]
    """

    def order(position: int) -> Steps:  # the warmup lasts until the first gradient comes
        return split_order(position, num_microbatches, warmup=2 * (num_positions - 1 - position), delay=2 * position)

    return chain_plan(order, num_positions, num_microbatches)
