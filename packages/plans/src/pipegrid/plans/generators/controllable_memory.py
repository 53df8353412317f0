"""V-Half and V-Min: schedules made by repeating one block, whose shape bounds the memory.

The block is one microbatch's four passes through the V, as dates on each position in slots of one chunk's pass: ``F``
down, ``F`` up, ``I`` down (of the upward chunk) and ``I`` up. A new block starts every 6 slots, for 6 is the work of a
microbatch on a position (F, I, W of two chunks). How long a block keeps an activation live, divided by 6, is how many
are live at once: so slower hops between positions hold more, and allow less bubble.

Source of both: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", sections 3 (building blocks)
and 4 (V-Min, V-Half, V-ZB; appendix on squeezing and on placing ``W``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from pipegrid.core.fields import Count, checked_arguments
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators.shapes import chain_plan, v_placement
from pipegrid.plans.network.network import as_network
from pipegrid.plans.network.problem import Problem
from pipegrid.plans.network.squeeze import Squeeze, squeezed
from pipegrid.plans.plan import Action, Plan, as_placement, chain, for_microbatches
from pipegrid.plans.simulate import Costs


@checked_arguments(PlanError)
def v_half(num_positions: Count, num_microbatches: Count) -> Plan:
    """Half the memory of 1F1B, and half its bubble.

    At most ``(P+2)//2`` microbatches live on a position (a chunk counts a half). With ``F = I = W`` the bubble is
    ``(3P-7)/2`` passes of a whole stage for even P of at least 4, ``(3P-4)/2`` for odd P of at least 3, and 1/2 for
    P = 2, for any M of at least P. Source: see this file's heading; the hops of the upward forward and of the last pass
    take two slots, so that a microbatch's two lifetimes on a position have the same sum on every position.

    Examples:
        >>> [verify(schedule(4, 8)).peak_live[0] for schedule in (one_f_one_b, v_half, v_min)]
        [4.0, 3.0, 2.0]
    """
    if num_positions % 2:
        hops, turns = ((1, 1), (1, 2), (1, 1), (1, 2)), (1, 1, 1)
    elif num_positions == 2:
        hops, turns = ((1, 1), (2, 2), (1, 1), (2, 2)), (2, 0, 3)
    else:
        hops, turns = ((1, 1), (1, 2), (2, 1), (1, 2)), (1, 3, 1)
    limit = 2 * ((num_positions + 2) // 2)
    return _v_plan(num_positions, num_microbatches, hops, turns, ahead=num_positions, limit=limit)


@checked_arguments(PlanError)
def v_min(num_positions: Count, num_microbatches: Count) -> Plan:
    """A third of the memory of 1F1B, and two thirds of its bubble.

    At most ``(P+4)//3`` microbatches live on a position (a chunk counts a half), the least that keeps the steady phase
    without bubbles. With ``F = I = W`` the bubble is ``2P - x/2`` passes of a whole stage, with ``x`` 7, 5 and 9 for P
    of 3k, 3k+1 and 3k+2 (P = 2: 1/2), for any M of at least P. Source: see this file's heading; every hop takes one
    slot, or the first two or three, where two passes would have the same slot of a position.
    """
    hops = (((2, 1, 3)[num_positions % 3], 1),) * 4
    limit = 2 * ((num_positions + 4) // 3)
    return _v_plan(num_positions, num_microbatches, hops, (0, 0, 0), ahead=num_positions // 3, limit=limit)


def _v_plan(
    num_positions: int,
    num_microbatches: int,
    hops: Sequence[tuple[int, int]],
    turns: Sequence[int],
    *,
    ahead: int,
    limit: int,
) -> Plan:
    """The block of every microbatch, squeezed where F, I and W take a slot each and at most ``limit`` chunks are live.

    ``hops``: for each of the four passes, the slots of the hop between the first two positions, and of every other
    hop. ``turns``: slots waited between one pass and the next. ``ahead``: of how many microbatches a position may take
    a forward out of turn in its warmup. No deadlock: what runs out of turn has its inputs already, and leaves the
    memory that those before it need.
    """

    def way(number: int, to: int) -> int:  # slots of a pass from position 0 to position `to`, or back
        first, other = hops[number]
        return first + other * (to - 1) if to > 0 else 0

    last, num_stages, placement = num_positions - 1, 2 * num_positions, v_placement(num_positions)
    steps = [way(number, last) + 1 + turn for number, turn in enumerate(turns)]
    starts = list(accumulate(steps, initial=0))
    dates = [0] * (2 * num_stages)  # of microbatch 0, by pass: F down, F up, I down, I up
    for position in range(num_positions):
        passes = (position, num_stages - 1 - position, num_stages + position, 2 * num_stages - 1 - position)
        for number, one in enumerate(passes):
            there = way(number, position)
            dates[one] = starts[number] + (way(number, last) - there if number % 2 else there)
    activation = (1.0,) * num_stages
    problem = Problem(chain(num_stages), as_placement(placement), num_microbatches, Costs(), activation, limit)
    network = as_network(problem)
    found = squeezed(network, dates, Squeeze(ahead, "backward", patience=0.0, careful=True))
    assert found is not None
    computes = [one for each in network.passes for one in for_microbatches(Action(*each, 0), num_microbatches)]
    orders = [[computes[operation] for operation in order] for order in found[1]]
    return chain_plan(orders.__getitem__, num_positions, num_microbatches, placement)
