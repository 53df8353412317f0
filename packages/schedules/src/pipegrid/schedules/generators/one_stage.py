"""The schedules with one stage on each position: GPipe and 1F1B."""

from __future__ import annotations

from pipegrid.schedules.generators.shapes import (
    Order,
    chain_plan,
    check_position,
    check_sizes,
    looped_placement,
)
from pipegrid.schedules.plan.actions import backward, forward
from pipegrid.schedules.plan.plan import Plan


def gpipe(num_positions: int, num_microbatches: int) -> Plan:
    """All forwards, then all backwards.

    Bubble ``(P-1)(F+B)`` for any ``M``; every microbatch is live at once::

        0: F0 F1 F2 F3 .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 --
        1: .  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 -- .  .
        2: .  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .  .  .

    Source: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", section 2.3, figure 2 (c). Backwards run in the order of the forwards.

    Raises:
        PlanError: a size below 1.
    """
    check_sizes(num_positions=num_positions, num_microbatches=num_microbatches)
    return chain_plan(
        lambda position: gpipe_order(position, num_positions, num_microbatches),
        num_positions=num_positions,
        num_microbatches=num_microbatches,
        placement=looped_placement(num_positions, num_positions),
    )


def gpipe_order(position: int, num_positions: int, num_microbatches: int) -> Order:
    """What ``position`` of `gpipe` does."""
    check_position(position, num_positions, num_microbatches)
    microbatches = range(num_microbatches)
    return [forward(position, m) for m in microbatches] + [backward(position, m) for m in microbatches]


def one_f_one_b(num_positions: int, num_microbatches: int) -> Plan:
    """One forward, one backward in turn, after a warmup that fills the pipeline.

    Bubble ``(P-1)(F+B)`` for any ``M``, as GPipe, with at most ``P - p`` microbatches live at position p::

        0: F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
        1: .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .
        2: .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", section 2.2.1 (PipeDream-Flush); the order is that of Narayanan et al. 2019, "PipeDream",
    section 3.2.

    Raises:
        PlanError: a size below 1.
    """
    check_sizes(num_positions=num_positions, num_microbatches=num_microbatches)
    return chain_plan(
        lambda position: one_f_one_b_order(position, num_positions, num_microbatches),
        num_positions=num_positions,
        num_microbatches=num_microbatches,
        placement=looped_placement(num_positions, num_positions),
    )


def one_f_one_b_order(position: int, num_positions: int, num_microbatches: int) -> Order:
    """What ``position`` of `one_f_one_b` does: warmup, steady, cooldown."""
    check_position(position, num_positions, num_microbatches)
    warmup = min(num_positions - position - 1, num_microbatches)
    order = [forward(position, m) for m in range(warmup)]
    for m in range(num_microbatches - warmup):
        order += [forward(position, warmup + m), backward(position, m)]
    order += [backward(position, m) for m in range(num_microbatches - warmup, num_microbatches)]
    return order
