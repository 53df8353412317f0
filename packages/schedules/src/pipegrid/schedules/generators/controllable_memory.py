"""V-Half and V-Min: schedules made by repeating one block, whose shape bounds the memory.

The block is one microbatch's four passes through the V, as dates on each position in slots of one chunk's
pass: ``F`` down, ``F`` up, ``I`` down (of the upward chunk) and ``I`` up. A new block starts every 6 slots,
for 6 is the work of a microbatch on a position (F, I, W of two chunks). How long a block keeps an activation
live, divided by 6, is how many are live at once: so slower hops between positions hold more, and allow less
bubble.

Source of both: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", sections 3 (building blocks)
and 4 (V-Min, V-Half, V-ZB; appendix on squeezing and on placing ``W``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from attrs import Factory, define, field, frozen

from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.generators.shapes import Order, chain_plan, v_placement
from pipegrid.schedules.plan import Action, Plan, forward, input_backward, weight_backward
from pipegrid.topology.fields import Count, checked_arguments


@checked_arguments(PlanError)
def v_half(num_positions: Count, num_microbatches: Count) -> Plan:
    """Half the memory of 1F1B, and half its bubble.

    At most ``(P+2)//2`` microbatches live on a position (a chunk counts a half). With ``F = I = W`` the
    bubble is ``(3P-7)/2`` passes of a whole stage for even P of at least 4, ``(3P-4)/2`` for odd P of at
    least 3, and 1/2 for P = 2, for any M of at least P.

    Source: see this file's heading; the hops of the upward forward and of the last pass take two slots, so
    that a microbatch's two lifetimes on a position have the same sum on every position.
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

    At most ``(P+4)//3`` microbatches live on a position (a chunk counts a half), the least that keeps the
    steady phase without bubbles. With ``F = I = W`` the bubble is ``2P - x/2`` passes of a whole stage, with
    ``x`` 7, 5 and 9 for P of 3k, 3k+1 and 3k+2 (P = 2: 1/2), for any M of at least P.

    Source: see this file's heading; every hop takes one slot. Where that would put two passes into the same
    slot of a position, the hop between the first two positions takes two slots, or three.
    """
    first = (2, 1, 3)[num_positions % 3]
    block = _Block(((first, 1),) * 4, (0, 0, 0), ahead=num_positions // 3)
    return _v_plan(num_positions, num_microbatches, block, limit=2 * ((num_positions + 4) // 3))


PERIOD = 6
"""Slots of work that a microbatch is on one position: F, I and W of two chunks."""


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
        """When microbatch 0 passes ``position``: F down, F up, I down, I up."""

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


_Pass: TypeAlias = tuple[int, int]
"""A pass and its microbatch: ``s`` is ``F`` of stage ``s``, ``4P-1-s`` its ``I``; each waits for the pass before."""


def _v_plan(num_positions: int, num_microbatches: int, block: _Block, *, limit: int) -> Plan:
    orders = []
    for position in range(num_positions):
        down, up = position, 2 * num_positions - 1 - position
        numbers = (down, up, 2 * num_positions + down, 2 * num_positions + up)
        dates = block.dates(position, num_positions)
        dated = [
            (date + PERIOD * m, number, m)
            for date, number in zip(dates, numbers, strict=True)
            for m in range(num_microbatches)
        ]
        orders.append([(number, m) for _, number, m in sorted(dated)])
    whole = _squeezed(orders, limit=limit, ahead=block.ahead)
    return chain_plan(whole, v_placement(num_positions), num_microbatches)


def _squeezed(orders: list[list[_Pass]], *, limit: int, ahead: int) -> list[Order]:
    """``orders`` without their empty slots, each ``W`` where its position would wait.

    A position waits for an input that has not come yet, and before a forward that would make more than
    ``limit`` chunks live. In its warmup (until its first backward) it then takes a forward out of turn, of a
    microbatch at most ``ahead`` after the next one on its way up; in its cooldown (no forward left) any
    backward that is ready. Both fill slots that only blocks before the first or after the last microbatch
    would have used.

    No deadlock: an action out of turn has its inputs already, and a forward is taken only where the order
    with that forward moved to the front still holds at most ``limit`` chunks, each ``W`` next to its ``I``.
    `search` squeezes patterns at any costs without this guarantee, and drops those that get stuck.
    """
    done: dict[_Pass, int] = {}  # the slot after the one in which it ran
    positions = [_Position(deque(order), len(orders), limit, ahead) for order in orders]
    slot = 0

    def ready(one: _Pass) -> bool:
        number, m = one
        return number == 0 or done.get((number - 1, m), slot + 1) <= slot

    while any(at.pending or at.owed for at in positions):
        for at in positions:
            chosen = at.next_pass(ready)
            if chosen is not None:
                at.run(chosen)
                done[chosen] = slot + 1
            elif at.owed:
                at.run_weight()
        slot += 1
    return [at.order for at in positions]


@define(eq=False)
class _Position:
    """What a position has left to do, and holds.

    ``num_positions`` has the pipeline; ``limit`` and ``ahead``: see `_squeezed`. ``owed``: the ``W`` of the backwards
    done. ``passed_up``: microbatches whose upward forward ran.
    """

    pending: deque[_Pass]
    num_positions: int
    limit: int
    ahead: int
    owed: deque[Action] = Factory(deque)
    order: Order = Factory(list)
    live: int = 0
    passed_up: int = 0
    warmup: bool = True
    forwards_left: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.forwards_left = sum(number < 2 * self.num_positions for number, _ in self.pending)

    def next_pass(self, ready: Callable[[_Pass], bool]) -> _Pass | None:
        """The pass to run in this slot, in turn or out of it; None to wait."""
        order, room = self.pending, self.live < self.limit
        if order and ready(order[0]) and (room or order[0][0] >= 2 * self.num_positions):
            return order[0]
        if self.warmup and room:
            return self._early_forward(ready)
        return None if self.forwards_left else next(filter(ready, order), None)

    def _early_forward(self, ready: Callable[[_Pass], bool]) -> _Pass | None:
        held = self.live - len(self.owed)
        for one in self.pending:
            number, m = one
            if number >= 2 * self.num_positions:
                held -= 1
            elif ready(one) and m <= self.passed_up + self.ahead:
                return one
            else:
                held += 1
                if held == self.limit:  # with another forward in front of it, it would not fit
                    return None
        return None

    def run(self, one: _Pass) -> None:
        """Run a forward, or the ``I`` of a backward."""
        number, m = one
        self.pending.remove(one)
        if number < 2 * self.num_positions:
            self.order.append(forward(number, m))
            self.live += 1
            self.passed_up += number >= self.num_positions
            self.forwards_left -= 1
        else:
            stage = 4 * self.num_positions - 1 - number
            self.order.append(input_backward(stage, m))
            self.owed.append(weight_backward(stage, m))
            self.warmup = False

    def run_weight(self) -> None:
        """Run the oldest ``W`` that is owed."""
        self.order.append(self.owed.popleft())
        self.live -= 1
