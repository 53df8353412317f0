"""V-Half and V-Min: schedules made by repeating one block, whose shape bounds the memory.

The block is one microbatch's four passes through the V, as dates on each position in slots of one chunk's pass: ``F``
down, ``F`` up, ``I`` down (of the upward chunk) and ``I`` up. A new block starts every 6 slots, for 6 is the work of a
microbatch on a position (F, I, W of two chunks). How long a block keeps an activation live, divided by 6, is how many
are live at once: so slower hops between positions hold more, and allow less bubble.

Source of both: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", sections 3 (building blocks)
and 4 (V-Min, V-Half, V-ZB; appendix on squeezing and on placing ``W``).
"""

from __future__ import annotations

from attrs import frozen

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
        block = _Block(((1, 1), (1, 2), (1, 1), (1, 2)), (1, 1, 1), ahead=num_positions)
    elif num_positions == 2:
        block = _Block(((1, 1), (2, 2), (1, 1), (2, 2)), (2, 0, 3), ahead=num_positions)
    else:
        block = _Block(((1, 1), (1, 2), (2, 1), (1, 2)), (1, 3, 1), ahead=num_positions)
    return _v_plan(num_positions, num_microbatches, block, limit=2 * ((num_positions + 2) // 2))


@checked_arguments(PlanError)
def v_min(num_positions: Count, num_microbatches: Count) -> Plan:
    """A third of the memory of 1F1B, and two thirds of its bubble.

    At most ``(P+4)//3`` microbatches live on a position (a chunk counts a half), the least that keeps the steady phase
    without bubbles. With ``F = I = W`` the bubble is ``2P - x/2`` passes of a whole stage, with ``x`` 7, 5 and 9 for P
    of 3k, 3k+1 and 3k+2 (P = 2: 1/2), for any M of at least P. Source: see this file's heading; every hop takes one
    slot, or the first two or three, where two passes would have the same slot of a position.
    """
    first = (2, 1, 3)[num_positions % 3]
    block = _Block(((first, 1),) * 4, (0, 0, 0), ahead=num_positions // 3)
    return _v_plan(num_positions, num_microbatches, block, limit=2 * ((num_positions + 4) // 3))


@frozen
class _Block:
    """One microbatch's way through the V, in slots.

    ``hops``: for each of the four passes, the slots of the hop between the first two positions, and of every
    other hop. ``turns``: slots waited between one pass and the next. ``ahead``: of how many microbatches a
    position may take a forward out of turn in its warmup.
    """

    hops: tuple[tuple[int, int], ...]
    turns: tuple[int, int, int]
    ahead: int

    def dates(self, position: int, num_positions: int) -> tuple[int, int, int, int]:
        """The dates of microbatch 0 on ``position``: F down, F up, I down, I up."""

        def way(hop: tuple[int, int], to: int) -> int:  # slots from position 0 to position `to`, or back
            return hop[0] + hop[1] * (to - 1) if to > 0 else 0

        last = num_positions - 1
        starts = [0]
        for hop, turn in zip(self.hops, self.turns, strict=False):
            starts.append(starts[-1] + way(hop, last) + 1 + turn)
        down, up, gradient_down, gradient_up = self.hops
        return (
            starts[0] + way(down, position),
            starts[1] + way(up, last) - way(up, position),
            starts[2] + way(gradient_down, position),
            starts[3] + way(gradient_up, last) - way(gradient_up, position),
        )


def _v_plan(num_positions: int, num_microbatches: int, block: _Block, *, limit: int) -> Plan:
    """The block of every microbatch, squeezed where F, I and W take a slot each and at most ``limit`` chunks are live.

    No deadlock: what runs out of turn has its inputs already, and leaves the memory that those before it need.
    """
    num_stages, placement = 2 * num_positions, v_placement(num_positions)
    activation = (1.0,) * num_stages
    problem = Problem(chain(num_stages), as_placement(placement), num_microbatches, Costs(), activation, limit)
    network = as_network(problem)
    dates = [0] * (2 * num_stages)
    for position in range(num_positions):
        down, up = position, num_stages - 1 - position
        passes = (down, up, num_stages + down, num_stages + up)
        for number, date in zip(passes, block.dates(position, num_positions), strict=True):
            dates[number] = date
    found = squeezed(network, dates, Squeeze(block.ahead, "backward", patience=0.0, careful=True))
    assert found is not None
    computes = [one for each in network.passes for one in for_microbatches(Action(*each, 0), num_microbatches)]
    orders = [[computes[operation] for operation in order] for order in found[1]]
    return chain_plan(orders, placement, num_microbatches)
