"""The zero-bubble schedules with one stage on each position: ZB-H1 and ZB-H2.

Both split the backward. ``I``, the half on which the stage before depends, runs where 1F1B runs ``B``; ``W``, on
which no stage depends, fills the bubbles.
"""

from __future__ import annotations

from pipegrid.core.fields import Count, checked_arguments
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators.shapes import chain_plan, looped_placement, split_order
from pipegrid.plans.plan import Plan


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
    last = num_positions - 1
    orders = [
        split_order(position, num_microbatches, warmup=last - position, delay=position) for position in range(last + 1)
    ]
    return chain_plan(orders, looped_placement(num_positions, num_positions), num_microbatches)


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
    last = num_positions - 1
    orders = [  # the warmup lasts until the first gradient comes
        split_order(p, num_microbatches, warmup=2 * (last - p), delay=2 * p) for p in range(num_positions)
    ]
    return chain_plan(orders, looped_placement(num_positions, num_positions), num_microbatches)
