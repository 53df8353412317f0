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

from attrs import frozen

from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.generators.shapes import Order, chain_plan, v_placement
from pipegrid.schedules.plan import Action, ActionKind, Plan, forward, input_backward, weight_backward
from pipegrid.topology.fields import Count, checked_arguments


@checked_arguments(PlanError)
def v_half(num_positions: Count, num_microbatches: Count) -> Plan:
    """Half the memory of 1F1B, and half its bubble.

    At most ``(P+2)//2`` microbatches live on a position (a chunk counts a half). With ``F = I = W`` the
    bubble is ``(3P-5)/2`` passes of a whole stage for even P of at least 4, ``(3P-4)/2`` for odd P of at
    least 3, and 1 for P = 2, for any M of at least P.

    Source: see this file's heading; the forward goes down one slot a hop and up two, and so does the
    gradient, which makes a microbatch's two lifetimes on every position equal in sum.

    Raises:
        PlanError: a size below 1.
    """
    turns = (0, 0, 0) if num_positions % 2 else (2, 0, 3)
    block = _Block((1, 2, 1, 2), turns)
    return _v_plan(num_positions, num_microbatches, block, limit=2 * ((num_positions + 2) // 2))


@checked_arguments(PlanError)
def v_min(num_positions: Count, num_microbatches: Count) -> Plan:
    """A third of the memory of 1F1B, and two thirds of its bubble.

    At most ``(P+4)//3`` microbatches live on a position (a chunk counts a half), the least that keeps the
    steady phase without bubbles. With ``F = I = W`` the bubble is ``2P - 5/2`` passes of a whole stage, for
    any M of at least P.

    Source: see this file's heading; every hop takes one slot. Where 3 divides P, a microbatch would meet
    another in the same slot, so it waits at two of its turns.

    Raises:
        PlanError: a size below 1.
    """
    turns = (0, 0, 0) if num_positions % 3 else (1, 0, 2)
    block = _Block((1, 1, 1, 1), turns)
    return _v_plan(num_positions, num_microbatches, block, limit=2 * ((num_positions + 4) // 3))


PERIOD = 6
"""Slots of work that a microbatch is on one position: F, I and W of two chunks."""


@frozen
class _Block:
    """Slots per hop in each of the four passes, and slots waited at each of the three turns between them."""

    hops: tuple[int, int, int, int]
    turns: tuple[int, int, int]

    def dates(self, position: int, num_positions: int) -> tuple[int, int, int, int]:
        """When microbatch 0 passes ``position``: F down, F up, I down, I up."""
        last = num_positions - 1
        starts = [0]
        for hop, turn in zip(self.hops, self.turns, strict=False):
            starts.append(starts[-1] + hop * last + 1 + turn)
        way = (position, last - position, position, last - position)
        first, second, third, fourth = (
            start + hop * steps for start, hop, steps in zip(starts, self.hops, way, strict=True)
        )
        return first, second, third, fourth


def _v_plan(num_positions: int, num_microbatches: int, block: _Block, *, limit: int) -> Plan:
    orders = []
    for position in range(num_positions):
        down, up = position, 2 * num_positions - 1 - position
        passes = zip(
            block.dates(position, num_positions),
            ((forward, down), (forward, up), (input_backward, up), (input_backward, down)),
            strict=True,
        )
        dated = [(date + PERIOD * m, make(stage, m)) for date, (make, stage) in passes for m in range(num_microbatches)]
        dated.sort(key=lambda entry: (entry[0], entry[1].kind, entry[1].stage))
        orders.append([action for _, action in dated])
    whole = _with_weight_halves(orders, limit=limit, num_stages=2 * num_positions)
    return chain_plan(whole, v_placement(num_positions), num_microbatches)


def _with_weight_halves(orders: list[Order], *, limit: int, num_stages: int) -> list[Order]:
    """Squeeze the empty slots out of ``orders`` and put each ``W`` where its position would wait.

    A position waits for what has not come yet, and before a forward that would make more than ``limit``
    activations live. Without the ``W`` the orders never hold more than that, so a wait for memory always
    ends.
    """
    done: dict[tuple[ActionKind, int, int | None], int] = {}  # the slot after the one in which it ran
    orders_left = [deque(order) for order in orders]
    owed: list[deque[Action]] = [deque() for _ in orders]
    live = [0] * len(orders)
    result: list[Order] = [[] for _ in orders]
    slot = 0
    while any(orders_left) or any(owed):
        for position, left in enumerate(orders_left):
            action = left[0] if left else None
            if action is not None and not (
                all(done.get(need, slot + 1) <= slot for need in _needs(action, num_stages))
                and (action.kind is not ActionKind.F or live[position] < limit)
            ):
                action = None
            if action is not None:
                left.popleft()
                done[action.kind, action.stage, action.microbatch] = slot + 1
                if action.kind is ActionKind.F:
                    live[position] += 1
                else:
                    owed[position].append(weight_backward(action.stage, action.microbatch or 0))
            elif owed[position]:
                action = owed[position].popleft()
                live[position] -= 1
            if action is not None:
                result[position].append(action)
        slot += 1
    return result


def _needs(action: Action, num_stages: int) -> list[tuple[ActionKind, int, int | None]]:
    stage, m = action.stage, action.microbatch
    if action.kind is ActionKind.F:
        return [(ActionKind.F, stage - 1, m)] if stage > 0 else []
    after = [(ActionKind.I, stage + 1, m)] if stage + 1 < num_stages else []
    return [(ActionKind.F, stage, m), *after]
