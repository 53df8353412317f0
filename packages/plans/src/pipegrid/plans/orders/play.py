"""The engine of all proofs: plays programs of events against each other, and finds the cycles of those that hang."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from attrs import Factory, define


@define(eq=False)
class EventProgram:
    """The events of one position, in order: what `play` plays.

    `PositionVerifier` writes that of a position while it verifies its steps, `prove_order` one for each host, compute
    stream and line of a rank. Each takes the ids of events from one numbering for the whole plan.

    ``operations``: an event id to set, or ``~id`` to wait for. ``ends``: per step of the plan, the number of operations
    to its end.
    """

    operations: list[int] = Factory(list)
    ends: list[int] = Factory(list)

    def place_of(self, operation: int) -> tuple[int, int]:
        """The step of an operation, and the number of its part: each part sets its events, then waits."""
        step = bisect_right(self.ends, operation)
        before = self.operations[self.ends[step - 1] if step else 0 : operation + 1]
        return step, sum(one < 0 <= two for one, two in pairwise(before))


class Stall(NamedTuple):
    """A position that is stuck in a part of a step, and the event it waits for."""

    position: int
    step: int
    part: int
    event: int


def play(programs: Sequence[EventProgram], num_events: int) -> list[int]:
    """The number of operations that each position completes: the proof that none gets stuck, which knows of no clock.

    An event stays set, so the outcome is the same whichever runs first; each operation is looked at at most twice.
    """
    events = bytearray(num_events)
    sleepers: dict[int, list[int]] = {}
    at = [0] * len(programs)
    ready = list(range(len(programs)))
    while ready:
        position = ready.pop()
        operations = programs[position].operations
        index, end = at[position], len(operations)
        while index < end:
            operation = operations[index]
            if operation >= 0:
                events[operation] = 1
                if operation in sleepers:
                    ready += sleepers.pop(operation)
            elif not events[~operation]:
                sleepers.setdefault(~operation, []).append(position)
                break
            index += 1
        at[position] = index
    return at


def cycles(programs: Sequence[EventProgram], at: Sequence[int]) -> list[list[tuple[Stall, Stall]]]:
    """The cycles of positions that wait for each other, where `play` got no further than ``at``.

    Each entry is a wait, and where the event that it waits for would be set: by the position of the next entry. A stuck
    position waits for an event of another stuck position; following these leads into a cycle.
    """
    setters = {
        operation: Stall(position, *program.place_of(index), operation)
        for position, program in enumerate(programs)
        for index, operation in enumerate(program.operations)
        if operation >= 0
    }
    stuck = {
        position: Stall(position, *program.place_of(at[position]), ~program.operations[at[position]])
        for position, program in enumerate(programs)
        if at[position] < len(program.operations)
    }
    followed = {position: setters[wait.event].position for position, wait in stuck.items() if wait.event in setters}
    return [[(stuck[one], setters[stuck[one].event]) for one in ring] for ring in rings(followed)]


def rings(followed: Mapping[int, int]) -> Iterator[list[int]]:
    """Of numbers that each lead to one other, those that come round to themselves; each is in one ring at most."""
    seen: set[int] = set()
    for first in followed:
        way: list[int] = []
        number = first
        while number in followed and number not in seen:
            seen.add(number)
            way.append(number)
            number = followed[number]
        if number in way:
            yield way[way.index(number) :]
