"""The schedules with one stage on each position: GPipe and 1F1B."""

from __future__ import annotations

from pipegrid.core.fields import Count, checked_arguments
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators.shapes import Order, chain_plan, looped_placement
from pipegrid.plans.plan import Plan, backward, forward


@checked_arguments(PlanError)
def gpipe(num_positions: Count, num_microbatches: Count) -> Plan:
    """All forwards, then all backwards.

    Bubble ``(P-1)(F+B)`` for any ``M``; every microbatch is live at once::

        0: F0 F1 F2 F3 .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 --
        1: .  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 -- .  .
        2: .  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .  .  .

    Source: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", section 2.3, figure 2 (c). Backwards run in the order of the forwards.
    """
    microbatches = range(num_microbatches)

    def order(position: int) -> Order:
        return [forward(position, m) for m in microbatches] + [backward(position, m) for m in microbatches]

    return chain_plan(
        map(order, range(num_positions)), looped_placement(num_positions, num_positions), num_microbatches
    )


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

    return chain_plan(
        map(order, range(num_positions)), looped_placement(num_positions, num_positions), num_microbatches
    )
