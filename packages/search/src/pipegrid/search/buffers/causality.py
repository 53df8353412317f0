"""When a position can know that what it has sent is there: once a result has come that could not be without it.

The start of a compute shows that its inputs have come, so that those who made them have run, and whatever these had
waited for. Counted are computes alone, whose order on a position is that of the plan: what holds for them holds under
every order of messages, and whenever a send completes.

Source: Mattern 1989, "Virtual Time and Global States of Distributed Systems" (vector clocks).
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush

from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import ActionKind, Plan, actions_of
from pipegrid.plans.plan.dataflow import BACKWARD, FORWARD, Dataflow
from pipegrid.search.buffers.messages import Buffered, Placed, sent_at


def arrivals_known(plan: Plan, flows: Dataflow, position: int) -> dict[Buffered, int | None]:
    """For each message that ``position`` sends, the step of the compute whose start shows that it has arrived.

    None: no compute of the step shows it.

    Raises:
        PlanError: computes wait for each other in a circle.
    """
    clocks = _Clocks(plan, flows)
    taken = clocks.taken_at
    waiting: dict[int, list[tuple[int, int, Buffered]]] = {}  # by receiver: its step, a number, the message
    sent: dict[int, list[Placed]] = defaultdict(list)
    for one in sent_at(plan, flows, position):
        sent[one.step].append(one)
    found: dict[Buffered, int | None] = {one.message: None for several in sent.values() for one in several}
    starts = dict(clocks.starts(position))
    count = 0
    for step in range(len(plan.positions[position])):
        for message, _, flow, piece in sent.get(step, ()):
            peer = message.peer
            uses = [taken[peer, flow.consumer, flow.direction, user] for user in flow.users(piece, peer)]
            heappush(waiting.setdefault(peer, []), (min(uses), count, message))
            count += 1
        clock = starts.get(step)
        for peer, messages in waiting.items() if clock is not None else ():
            assert clock is not None
            while messages and messages[0][0] < clock[peer]:
                found[heappop(messages)[2]] = step
    return found


class _Clocks:
    """Per position, after the start of each compute: how many steps of every position are known to be done."""

    def __init__(self, plan: Plan, flows: Dataflow) -> None:
        self.plan, self.flows = plan, flows
        # By position, stage, direction and piece, the step of the compute.
        self.taken_at: dict[tuple[int, int, object, int], int] = {}
        self._computes: list[list[int]] = []
        for position, steps in enumerate(plan.positions):
            own = []
            for step, one in enumerate(steps):
                for action in actions_of(one):
                    if action.kind.is_compute:
                        own.append(step)
                        if action.kind is not ActionKind.W:
                            way = FORWARD if action.kind is ActionKind.F else BACKWARD
                            self.taken_at[position, action.stage, way, plan.piece_of(action)] = step
            self._computes.append(list(dict.fromkeys(own)))

    def starts(self, position: int) -> list[tuple[int, list[int]]]:
        """The steps of the computes of ``position``, each with the clock at its start."""
        count = self.plan.num_positions
        done: list[dict[int, list[int]]] = [{} for _ in range(count)]  # the clock at the start, by step
        clocks, at = [[0] * count for _ in range(count)], [0] * count
        found: list[tuple[int, list[int]]] = []
        moved = True
        while moved:
            moved = False
            for here in range(count):
                while at[here] < len(self._computes[here]):
                    step = self._computes[here][at[here]]
                    makers = [(other, made) for other, made in self._makers(here, step) if other != here]
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
        if any(number < len(own) for number, own in zip(at, self._computes, strict=True)):
            raise PlanError("computes of the plan wait for each other; verify(plan) says which")
        return found

    def _makers(self, position: int, step: int) -> list[tuple[int, int]]:
        """The computes, by position and step, whose results those of ``step`` need by message."""
        found: list[tuple[int, int]] = []
        for action in actions_of(self.plan.positions[position][step]):
            if not action.kind.is_compute or action.kind is ActionKind.W:
                continue
            way = FORWARD if action.kind is ActionKind.F else BACKWARD
            for flow, piece in self.flows.arriving(action.stage, way, self.plan.piece_of(action)):
                if flow.group is None:
                    found += [
                        (origin, self.taken_at[origin, flow.producer, way, maker])
                        for origin in flow.origins(position)
                        for maker in flow.makers(piece, origin)
                    ]
        return found
