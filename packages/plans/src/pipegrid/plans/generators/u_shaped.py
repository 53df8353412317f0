"""The schedule shaped as a U: the first position holds the first and the last stage of the chain.

P positions hold P + 1 stages: position 0 the head (stage 0) and the tail (stage P, with labels and loss),
positions 1..P-1 one stage each. Neither data nor labels leave position 0.

Source: the cut is that of Vepakomma et al. 2018, "Split learning for health: Distributed deep learning without
sharing raw patient data", there the U-shaped configuration without label sharing; the order on positions
1..P-1 is 1F1B (see `one_f_one_b`); that on position 0 and its counts are ours, derived in
docs/examples/edge_cloud/README.md.
"""

from __future__ import annotations

import math

from attrs import frozen

from pipegrid.core.edge import Edge
from pipegrid.core.fields import Count, checked_arguments
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators.shapes import OrderBuilder, Steps, chain_plan, looped_placement
from pipegrid.plans.plan import Plan
from pipegrid.plans.simulate.costs import Costs, CostsError, GivenCosts

SLACK = 1e-9  # a quotient this close to a whole number is that number: measured costs are not exact


@checked_arguments(PlanError)
def u_shape(
    num_positions: Count,
    num_microbatches: Count,
    *,
    costs: Costs | None = None,
    in_flight: Count | None = None,
    forward_only: bool = False,
) -> Plan:
    """1F1B through a U, with head and tail passes where position 0 would wait for the others.

    Head forwards go on while the first microbatch travels to the tail, and ``2(P-1)//3 + 1`` extra tail passes are done
    while the first gradient travels back to the head. At unit costs (every position has the same work, so the head and
    the tail are half a stage each) the bubble is ``3P - 4`` for M of at least 2, one less than 1F1B's; at most
    ``(P+2)/2`` microbatches live on position 0, ``P + 1 - p`` on position p. The tail in small letters, two columns per
    unit::

        0: F0 F1 F2 f0 b0 -- f1 b1 -- .  B0 -- F3 f2 b2 -- B1 -- f3 b3 -- .  B2 -- .  .  B3 --
        1: .  F0 -- F1 -- .  B0 -- -- -- F2 -- B1 -- -- -- F3 -- B2 -- -- -- B3 -- -- -- .  .

    ``costs`` (per stage, P + 1 of them, and per edge) fits the counts to other stages and to slow links: as many
    microbatches are then under way as hide the links (see `u_shape_counts`, also for their memory). ``in_flight`` caps
    that number, at the price of idle time. ``forward_only``: head and tail passes in turn, once the first microbatch is
    back; bubble ``(P-1)F``. Source: see this file's heading.
    """
    counts = u_shape_counts(num_positions, costs=costs, in_flight=in_flight, forward_only=forward_only)

    def order(position: int) -> Steps:
        if position == 0:
            edge_order = _edge_forward_order if forward_only else _edge_order
            return edge_order(num_positions, num_microbatches, counts)
        builder = OrderBuilder(num_microbatches)
        builder.f(position, 0 if forward_only else min(counts.in_flight[position] - 1, num_microbatches))
        for _ in range(num_microbatches):
            builder.f(position)
            if not forward_only:
                builder.b(position)
        return builder.order

    placement = looped_placement(num_positions, num_positions + 1)
    return chain_plan(order, num_positions, num_microbatches, placement, forward_only=forward_only)


@frozen
class UShapeCounts:
    """Microbatches that the parts of a U run ahead of each other, if there are as many.

    Attributes:
        in_flight: per position, the microbatches between the forward and the backward of its stage (of the head, on
            position 0), which is what it holds in memory.
        head_warmup: head forwards before the first tail pass.
        tail_extra: tail passes after the first and before the first head backward.
    """

    in_flight: tuple[int, ...]
    head_warmup: int
    tail_extra: int


@checked_arguments(PlanError)
def u_shape_counts(
    num_positions: Count, *, costs: GivenCosts | None = None, in_flight: Count | None = None, forward_only: bool = False
) -> UShapeCounts:
    """The counts of `u_shape` at ``costs``, by default unit costs.

    A *period* is what the slowest position or link needs for a microbatch. A position holds as many microbatches as
    there are periods in the way from it to the tail and back, rounded up; the head one more, so that the passes of
    position 0 need not fit like a puzzle. Tail passes come one a period, so the first head backward is due after as
    many as there are periods in the gradient's way back, rounded down, and the one that was already waiting.

    Examples:
        >>> u_shape_counts(4), u_shape(4, 8).placement
        (UShapeCounts(in_flight=(5, 4, 3, 2), head_warmup=5, tail_extra=3), ((0,), (1,), (2,), (3,), (0,)))
    """
    if costs is None:  # every position has the same work, and position 0 two stages
        shares = (0.5, *[1.0] * (num_positions - 1), 0.5)
        costs = Costs(F=shares, I=shares, W=shares)
    travel = list(
        costs.travel(Edge(stage, stage + 1) for stage in range(num_positions if num_positions > 1 else 0)).values()
    )
    links = [sum(each) for each in travel]
    per_stage = (costs.per_stage(kind, num_positions + 1) for kind in ("F", "B"))
    forwards, backwards = ([time + costs.overhead for time in times] for times in per_stage)
    backwards = [0.0] * len(backwards) if forward_only else backwards
    work = [forward + backward for forward, backward in zip(forwards, backwards, strict=True)]
    period = max(work[0] + work[-1], *work[1:-1], *(occupied for occupied, _ in travel), 0.0)
    if period <= 0:
        raise CostsError("no stage takes any time by these costs; give F or B of at least one stage")
    held = []
    for position in range(num_positions):  # from the start of a forward to the end of its backward, without waiting
        there = math.fsum((*forwards[position:], *links[position:]))
        back = math.fsum((*backwards[position:], *links[position:])) if any(backwards) else 0.0
        held.append(max(1, math.ceil((there + back) / period * (1 - SLACK) - SLACK)))
    held[0] += num_positions > 1
    if in_flight is not None:
        held = [min(number, in_flight) for number in held]
    out = math.fsum((*forwards[1:-1], *links))  # from the end of a head forward to its tail forward
    back = math.fsum((*backwards[1:-1], *links))  # from the end of a tail backward to its head backward
    fitting = _floor(out / forwards[0]) if forwards[0] > 0 else held[0]
    return UShapeCounts(
        tuple(held), head_warmup=min(1 + fitting, held[0]), tail_extra=min(1 + _floor(back / period), held[0] - 1)
    )


def _floor(quotient: float) -> int:
    return math.floor(quotient * (1 + SLACK) + SLACK)


def _edge_order(tail: int, num_microbatches: int, counts: UShapeCounts) -> Steps:
    """The order of position 0, phase by phase; the tail is stage ``tail``."""
    builder = OrderBuilder(num_microbatches)
    held = min(counts.in_flight[0], num_microbatches)
    warmup = min(counts.head_warmup, held)
    passes = min(1 + counts.tail_extra, held)

    builder.f(0, warmup)  # 1. head forwards, while the first microbatch travels to the tail
    for number in range(passes):  # 2. tail passes, while its gradient travels back; heads as there is room
        builder.f(tail)
        builder.b(tail)
        if warmup + number < held:
            builder.f(0)
    builder.f(0, held - warmup - passes)  # 3. heads that the others count on before the first backward
    for _ in range(num_microbatches):  # 4. steady: one out, one in, one round; at last only out
        builder.b(0)
        builder.f(0)
        builder.f(tail)
        builder.b(tail)
    return builder.order


def _edge_forward_order(tail: int, num_microbatches: int, counts: UShapeCounts) -> Steps:
    """The order of position 0 in evaluation: heads until the first microbatch is back, then tail and head in turn."""
    builder = OrderBuilder(num_microbatches)
    builder.f(0, min(counts.head_warmup, num_microbatches))
    for _ in range(num_microbatches):
        builder.f(tail)
        builder.f(0)
    return builder.order
