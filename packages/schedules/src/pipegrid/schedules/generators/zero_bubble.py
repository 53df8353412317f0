"""The zero-bubble schedules with one stage on each position: ZB-H1 and ZB-H2.

Both split the backward. ``I``, the half that the stage before waits for, runs as ``B`` does in 1F1B; ``W``,
for which nobody waits, fills what would be bubbles.
"""

from __future__ import annotations

from collections.abc import Callable

from pipegrid.schedules.generators.shapes import (
    Counter,
    Order,
    chain_plan,
    check_position,
    check_sizes,
    looped_placement,
)
from pipegrid.schedules.plan.plan import Plan


def zero_bubble_h1(num_positions: int, num_microbatches: int) -> Plan:
    """1F1B's memory and a third of its bubble.

    Bubble ``(P-1)(F+I-W)`` for M of at least P, where ``I + W`` is the whole backward; at most P microbatches
    live on every position (1F1B has that on the first)::

        0: F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    Position p is p weight halves behind: as many as the microbatches that 1F1B would hold less than P.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1 (ZB-H1).

    Raises:
        PlanError: a size below 1.
    """
    return _split_plan(num_positions, num_microbatches, zero_bubble_h1_order)


def zero_bubble_h1_order(position: int, num_positions: int, num_microbatches: int) -> Order:
    """What ``position`` of `zero_bubble_h1` does."""
    check_position(position, num_positions, num_microbatches)
    return _split_order(position, num_microbatches, warmup=num_positions - 1 - position, delay=position)


def zero_bubble_h2(num_positions: int, num_microbatches: int) -> Plan:
    """No bubble within a position's span, for twice the memory of 1F1B.

    With ``F = I = W`` and M of at least 2P - 1 no position waits between its first action and its last (they
    start one after another, and end so: the bubble ``(P-1)(F+I-2W)`` vanishes where the optimizer's step need
    not wait for all); at most 2P - 1 microbatches are live::

        0: F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
        1: .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
        2: .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.2 (ZB-H2).

    Raises:
        PlanError: a size below 1.
    """
    return _split_plan(num_positions, num_microbatches, zero_bubble_h2_order)


def zero_bubble_h2_order(position: int, num_positions: int, num_microbatches: int) -> Order:
    """What ``position`` of `zero_bubble_h2` does: warms up until the first gradient comes."""
    check_position(position, num_positions, num_microbatches)
    return _split_order(position, num_microbatches, warmup=2 * (num_positions - 1 - position), delay=2 * position)


def _split_order(stage: int, num_microbatches: int, *, warmup: int, delay: int) -> Order:
    """``warmup`` forwards, then F, I and W in turn, the W always ``delay`` microbatches behind the I."""
    counter = Counter(num_microbatches)
    for _ in range(warmup):
        counter.f(stage)
    for microbatch in range(num_microbatches):
        counter.f(stage)
        counter.i(stage)
        if microbatch >= delay:
            counter.w()
    while counter.owes:
        counter.w()
    return counter.order


def _split_plan(num_positions: int, num_microbatches: int, order: Callable[[int, int, int], Order]) -> Plan:
    check_sizes(num_positions=num_positions, num_microbatches=num_microbatches)
    return chain_plan(
        lambda position: order(position, num_positions, num_microbatches),
        num_positions=num_positions,
        num_microbatches=num_microbatches,
        placement=looped_placement(num_positions, num_positions),
    )
