"""The schedules shaped as a V: two chunks on each position, down through the positions and back up.

Position p holds stage p and stage 2P-1-p, so the loss is where the data came in, and the last position turns
a microbatch round without sending it.
"""

from __future__ import annotations

from functools import partial

from pipegrid.core.fields import Count, checked_arguments
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators.shapes import OrderBuilder, Steps, chain_plan, v_placement
from pipegrid.plans.plan import Plan


@checked_arguments(PlanError)
def zero_bubble_v(num_positions: Count, num_microbatches: Count, *, overlap: bool = False) -> Plan:
    """No bubble within a position's span, at 1F1B's memory.

    With ``F = I = W`` and M of at least 2P - 1 no position waits between its first action and its last; they start half
    a forward apart, so the whole takes ``M(F+I+W) + (P-1)F/2``. At most 2P chunks (P microbatches) are live on every
    position. In capitals the way down::

        0: F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 I3 W3 I4 W4 .  .
        1: .  F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 w3 I2 i4 I3 W2 I4 W3 w4 W4 .
        2: .  .  F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 I2 i3 I3 i4 I4 W2 w3 w4 W3 W4

    With ``overlap`` each forward comes one ``I`` earlier and is a pair with it (ours): one chunk more is live, and
    it takes ``(P-1)F`` longer, less what the pairs hide.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6 (ZB-V); Qi et al. 2024, "Pipeline
    Parallelism with Controllable Memory", section 4 (V-ZB).

    Examples:
        >>> simulate(zero_bubble_v(4, 8)).bubble(of="span")
        0.0
    """
    order = partial(_zero_bubble_v_order, num_positions, num_microbatches, overlap)
    return chain_plan(order, num_positions, num_microbatches, v_placement(num_positions))


def _zero_bubble_v_order(num_positions: int, num_microbatches: int, overlap: bool, position: int) -> Steps:
    """The order of ``position`` in `zero_bubble_v`, phase by phase.

    In slots of one chunk's pass, with p the position: microbatch 0 comes down at p and back up at 2P-1-p, its
    gradient down at 2P+p and back up at 4P-1-p. Each phase fills the slots until the next of these. With ``overlap``
    the forward beside an input half is the one that would follow it.
    """
    down, up = position, 2 * num_positions - 1 - position
    above, below = position, num_positions - position  # positions before this one; this one and those after
    after_down, after_up = (up, down) if overlap else (down, up)
    builder = OrderBuilder(num_microbatches)

    builder.f(down, 2 * below - 1)  # 1. forwards down, until the first comes back up
    for _ in range(above):  # 2. forwards up and down, until its gradient comes down
        builder.f(up)
        builder.f(down)
    if overlap:
        builder.f(up)
    for left in reversed(range(below)):  # 3. the upward chunk whole, until the gradient comes back up
        builder.pair(up if left else after_up, up, split=True, apart=not overlap)
        builder.w()
    for _ in range(max(num_microbatches, 2 * num_positions - 1) - num_positions):  # 4. steady
        builder.pair(after_down, down, split=True, apart=not overlap)
        builder.w()
        builder.pair(after_up, up, split=True, apart=not overlap)
        builder.w()
    for _ in range(above):  # 5. gradients come as fast as they are sent on
        builder.i(down)
        builder.i(up)
    for _ in range(below):  # 6. every other slot is free
        builder.i(down)
        builder.w(down)
    return builder.finish(up)  # 7. nothing comes any more


@checked_arguments(PlanError)
def dualpipe_v(num_positions: Count, num_microbatches: Count, *, overlap: bool = False) -> Plan:
    """A forward of one chunk beside a backward of the other, so that each can hide the other's communication.

    For M of at least 2P. If the pair ``F&B`` takes less time than its two halves one after the other, the
    bubble is ``(P-1)(F&B + B - 3W)`` of a chunk. With ``overlap`` these are pairs, otherwise ``F`` then ``B``, whole,
    next to each other. At most 2P + 1 chunks are live::

        0: F0 F1 F2 f0 i0 w0 f1 F3 b1 -- f2 B0 -- b2 -- f3 .  B1 -- b3 -- I2 W2 I3 W3
        1: .  F0 f0 F1 f1 F2 b0 -- f2 B0 -- F3 b1 -- f3 B1 -- b2 -- B2 -- i3 I3 w3 W3

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1 (DualPipe), cut in half as Qi et
    al. 2025, "DualPipe could be better without the Dual".

    Examples:
        >>> round(simulate(dualpipe_v(4, 8)).bubble(), 3), verify(dualpipe_v(4, 8)).peak_live
        (0.059, (4.5, 4.5, 4.5, 4.5))
    """
    order = partial(_dualpipe_v_order, num_positions, num_microbatches, overlap)
    return chain_plan(order, num_positions, num_microbatches, v_placement(num_positions))


def _dualpipe_v_order(num_positions: int, num_microbatches: int, overlap: bool, position: int) -> Steps:
    """The order of ``position`` in `dualpipe_v`, in the eight phases of the paper's figure."""
    down, up = position, 2 * num_positions - 1 - position
    above, below = position + 1, num_positions - position - 1  # this position and those before; those after
    builder = OrderBuilder(num_microbatches)

    builder.f(down, 2 * below)  # 1. forwards down
    for _ in range(above):  # 2. forwards down and up
        builder.f(down)
        builder.f(up)
    for _ in range(below):  # 3. the upward chunk, its backward split so that the gradient leaves early
        builder.i(up)
        builder.w()
        builder.f(up)
    for index in range(max(num_microbatches, 2 * num_positions) - 2 * num_positions + above):  # 4. steady: pairs
        builder.pair(down, up, apart=not overlap or (below == 0 and index == 0))  # the first turns round at once
        builder.pair(up, down, apart=not overlap)
    for _ in range(below):  # 5. no forwards down are left
        builder.b(up)
        builder.pair(up, down, apart=not overlap)
    for index in range(2 * above):  # 6. no forwards are left; the second half splits
        backward = builder.b if index < above else builder.i
        backward(up if index % 2 == 0 else down)
    for _ in range(below):  # 7. weight halves between the last gradients
        builder.w()
        builder.i(down)
    return builder.finish()  # 8. weight halves
