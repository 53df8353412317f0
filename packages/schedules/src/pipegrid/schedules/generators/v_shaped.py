"""The schedules shaped as a V: two chunks on each position, down through the positions and back up.

Position p holds stage p and stage 2P-1-p, so the loss is where the data came in, and the last position turns
a microbatch round without sending it.
"""

from __future__ import annotations

from pipegrid.schedules.generators.shapes import (
    Counter,
    Order,
    chain_plan,
    check_position,
    check_sizes,
    v_placement,
)
from pipegrid.schedules.plan.plan import Plan


def zero_bubble_v(num_positions: int, num_microbatches: int) -> Plan:
    """No bubble within a position's span, at 1F1B's memory.

    With ``F = I = W`` and M of at least 2P - 1 no position waits between its first action and its last; they
    start half a forward apart, so the whole takes ``M(F+I+W) + (P-1)F/2``. At most 2P chunks (P microbatches)
    are live on every position.

    In capitals the way down::

        0: F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 I3 W3 I4 W4 .  .
        1: .  F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 w3 I2 i4 I3 W2 I4 w4 W3 W4 .
        2: .  .  F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 I2 i3 I3 i4 I4 W2 w3 W3 w4 W4

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6 (ZB-V); Qi et al. 2024, "Pipeline
    Parallelism with Controllable Memory", section 4 (V-ZB).

    Raises:
        PlanError: a size below 1.
    """
    check_sizes(num_positions=num_positions, num_microbatches=num_microbatches)
    return chain_plan(
        lambda position: zero_bubble_v_order(position, num_positions, num_microbatches),
        num_positions=num_positions,
        num_microbatches=num_microbatches,
        placement=v_placement(num_positions),
    )


def zero_bubble_v_order(position: int, num_positions: int, num_microbatches: int) -> Order:
    """What ``position`` of `zero_bubble_v` does, phase by phase.

    In slots of one chunk's pass, with p the position: microbatch 0 comes down at p and back up at 2P-1-p, its
    gradient down at 2P+p and back up at 4P-1-p. Each phase fills the slots until the next of these.
    """
    check_position(position, num_positions, num_microbatches)
    down, up = position, 2 * num_positions - 1 - position
    above, below = position, num_positions - position  # positions before this one; this one and those after
    counter = Counter(num_microbatches)

    for _ in range(2 * below - 1):  # 1. forwards down, until the first comes back up
        counter.f(down)
    for _ in range(above):  # 2. forwards up and down, until its gradient comes down
        counter.f(up)
        counter.f(down)
    for _ in range(below):  # 3. the upward chunk whole, until the gradient comes back up
        counter.f(up)
        counter.i(up)
        counter.w()
    for _ in range(max(num_microbatches, 2 * num_positions - 1) - num_positions):  # 4. steady
        counter.f(down)
        counter.i(down)
        counter.w()
        counter.f(up)
        counter.i(up)
        counter.w()
    for _ in range(above):  # 5. gradients come as fast as they are sent on
        counter.i(down)
        counter.i(up)
    for _ in range(below):  # 6. every other slot is free
        counter.i(down)
        counter.w()
    while counter.owes:  # 7. nothing comes any more
        counter.w()
    return counter.order


def dualpipe_v(num_positions: int, num_microbatches: int) -> Plan:
    """A forward of one chunk beside a backward of the other, so that each can hide the other's communication.

    For M of at least 2P. If the pair ``F&B`` takes less time than its two halves one after the other, the
    bubble is ``(P-1)(F&B + B - 3W)`` of a chunk; a plan has no kind for the pair, so here it is ``F`` then
    ``B``, whole, next to each other. At most 2P + 1 chunks are live::

        0: F0 F1 F2 f0 i0 w0 f1 F3 b1 -- f2 B0 -- b2 -- f3 .  B1 -- b3 -- I2 W2 I3 W3
        1: .  F0 f0 F1 f1 F2 b0 -- f2 B0 -- F3 b1 -- f3 B1 -- b2 -- B2 -- i3 I3 w3 W3

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1 (DualPipe), cut in half as Qi et
    al. 2025, "DualPipe could be better without the Dual".

    Raises:
        PlanError: a size below 1.
    """
    check_sizes(num_positions=num_positions, num_microbatches=num_microbatches)
    return chain_plan(
        lambda position: dualpipe_v_order(position, num_positions, num_microbatches),
        num_positions=num_positions,
        num_microbatches=num_microbatches,
        placement=v_placement(num_positions),
    )


def dualpipe_v_order(position: int, num_positions: int, num_microbatches: int) -> Order:
    """What ``position`` of `dualpipe_v` does, in the eight phases of the paper's figure."""
    check_position(position, num_positions, num_microbatches)
    down, up = position, 2 * num_positions - 1 - position
    above, below = position + 1, num_positions - position - 1  # this position and those before; those after
    counter = Counter(num_microbatches)

    for _ in range(2 * below):  # 1. forwards down
        counter.f(down)
    for _ in range(above):  # 2. forwards down and up
        counter.f(down)
        counter.f(up)
    for _ in range(below):  # 3. the upward chunk, its backward split so that the gradient leaves early
        counter.i(up)
        counter.w()
        counter.f(up)
    for _ in range(max(num_microbatches, 2 * num_positions) - 2 * num_positions + above):  # 4. steady: pairs
        counter.f(down)
        counter.b(up)
        counter.f(up)
        counter.b(down)
    for _ in range(below):  # 5. no forwards down are left
        counter.b(up)
        counter.f(up)
        counter.b(down)
    for index in range(2 * above):  # 6. no forwards are left; the second half splits
        backward = counter.b if index < above else counter.i
        backward(up if index % 2 == 0 else down)
    for _ in range(below):  # 7. weight halves between the last gradients
        counter.w()
        counter.i(down)
    while counter.owes:  # 8. weight halves
        counter.w()
    return counter.order
