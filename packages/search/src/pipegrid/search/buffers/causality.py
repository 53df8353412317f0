"""When a position can know that what it has sent is there: once a result has come that could not be without it.

The start of a compute shows that its inputs have come, so that those who made them have run, and whatever these had
waited for. Counted are computes alone, whose order on a position is that of the plan: what holds for them holds under
every order of messages, and whenever a send completes.

Source: Mattern 1989, "Virtual Time and Global States of Distributed Systems" (vector clocks).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush

from pipegrid.core.edge import Direction
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Action, ActionKind, Plan, actions_of
from pipegrid.plans.plan.dataflow import BACKWARD, FORWARD, Dataflow
from pipegrid.search.buffers.messages import Buffered, sent_at


def arrivals_known(plan: Plan, flows: Dataflow, position: int) -> dict[Buffered, int | None]:
    """For each message that ``position`` sends, the step of the compute whose start shows that it has arrived.

    None: no compute of the step shows it.

    Raises:
        PlanError: computes wait for each other in a circle.
    """
    taken: dict[tuple[int, int, object, int], int] = {}  # by position, stage, direction and piece, the compute's step
    for here, steps in enumerate(plan.positions):
        for step, one in enumerate(steps):
            for action in actions_of(one):
                if action.kind.is_compute and action.kind is not ActionKind.W:
                    taken[here, action.stage, _direction(action), plan.piece_of(action)] = step
    waiting = defaultdict[int, list[tuple[int, int, Buffered]]](list)  # by receiver: its step, a number, the message
    sent = list(sent_at(plan, flows, position))
    found: dict[Buffered, int | None] = {one.message: None for one in sent}
    count = 0
    for step, clock in _clocks(plan, flows, taken, position):
        while count < len(sent) and sent[count].step <= step:
            message, _, flow, piece = sent[count]
            peer = message.peer
            uses = [taken[peer, flow.consumer, flow.direction, user] for user in flow.users(piece, peer)]
            heappush(waiting[peer], (min(uses), count, message))
            count += 1
        for peer, messages in waiting.items():
            while messages and messages[0][0] < clock[peer]:
                found[heappop(messages)[2]] = step
    return found


def _direction(compute: Action) -> Direction:
    return FORWARD if compute.kind is ActionKind.F else BACKWARD


def _clocks(
    plan: Plan, flows: Dataflow, taken: Mapping[tuple[int, int, object, int], int], position: int
) -> list[tuple[int, list[int]]]:
    """The steps of the computes of ``position``, each with how many steps of every position are known to be done."""
    count = plan.num_positions
    computes = [
        [step for step, one in enumerate(steps) if any(action.kind.is_compute for action in actions_of(one))]
        for steps in plan.positions
    ]
    done: list[dict[int, list[int]]] = [{} for _ in range(count)]  # the clock at the start, by step
    clocks, at = [[0] * count for _ in range(count)], [0] * count
    found: list[tuple[int, list[int]]] = []
    moved = True
    while moved:
        moved = False
        for here in range(count):
            while at[here] < len(computes[here]):
                step = computes[here][at[here]]
                makers = [(other, made) for other, made in _makers(plan, flows, taken, here, step) if other != here]
                if any(made not in done[other] for other, made in makers):
                    break
                clock = clocks[here]
                clock[here] = step
                for other, made in makers:
                    clock = list(map(max, clock, done[other][made]))
                    clock[other] = max(clock[other], made + 1)
                clocks[here] = clock
                done[here][step] = list(clock)
                if here == position:
                    found.append((step, list(clock)))
                at[here] += 1
                moved = True
    if any(number < len(own) for number, own in zip(at, computes, strict=True)):
        raise PlanError("computes of the plan wait for each other; verify(plan) says which")
    return found


def _makers(
    plan: Plan, flows: Dataflow, taken: Mapping[tuple[int, int, object, int], int], position: int, step: int
) -> Iterator[tuple[int, int]]:
    """The computes, by position and step, whose results those of ``step`` need by message."""
    for action in actions_of(plan.positions[position][step]):
        if action.kind.is_compute and action.kind is not ActionKind.W:
            way = _direction(action)
            for flow, piece in flows.arriving(action.stage, way, plan.piece_of(action)):
                for origin in flow.origins(position) if flow.group is None else ():
                    yield from ((origin, taken[origin, flow.producer, way, one]) for one in flow.makers(piece, origin))
