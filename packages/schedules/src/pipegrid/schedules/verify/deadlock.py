"""Who waits for whom: plays positions' marks against each other until all are done or none can go on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from attrs import Factory, define


@define(eq=False)
class Program:
    """What one position tells the others and waits for, in order, as numbered marks.

    ``operations``: a mark to set, or ``~mark`` for one to wait for. ``starts`` and ``steps``: at which
    operation the part of which step of the plan begins.
    """

    operations: list[int] = Factory(list)
    starts: list[int] = Factory(list)
    steps: list[int] = Factory(list)

    def begin(self, step: int) -> None:
        """What follows is part of ``step``."""
        self.starts.append(len(self.operations))
        self.steps.append(step)

    def step_of(self, operation: int) -> int:
        """The step that an operation is part of."""
        return self.steps[bisect_right(self.starts, operation) - 1]


class Wait(NamedTuple):
    """A position that cannot go on, the step it is in, and the mark that it waits for."""

    position: int
    step: int
    mark: int


def play(programs: Sequence[Program], num_marks: int) -> list[int]:
    """How many operations each position comes through.

    EventIds are set once and stay set, so the outcome does not depend on which position goes first; each
    operation is looked at once, and once more if it has to wait.
    """
    marks = bytearray(num_marks)
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
                marks[operation] = 1
                if operation in sleepers:
                    ready += sleepers.pop(operation)
            elif not marks[~operation]:
                sleepers.setdefault(~operation, []).append(position)
                break
            index += 1
        at[position] = index
    return at


def cycles(programs: Sequence[Program], at: Sequence[int]) -> list[list[Wait]]:
    """The cycles of positions that wait for each other, where `play` got no further than ``at``.

    Each wait in a cycle is for the position of the next. A position that stopped waits for a mark that
    another one, which stopped too, has yet to set; following these leads into a cycle.
    """
    setters = {
        operation: position
        for position, program in enumerate(programs)
        for operation in program.operations
        if operation >= 0
    }
    stopped = {
        position: Wait(position, program.step_of(at[position]), ~program.operations[at[position]])
        for position, program in enumerate(programs)
        if at[position] < len(program.operations)
    }
    found = []
    seen: set[int] = set()
    for first in stopped:
        way: list[int] = []
        position = first
        while position in stopped and position not in seen:
            seen.add(position)
            way.append(position)
            position = setters.get(stopped[position].mark, -1)
        if position in way:
            found.append([stopped[member] for member in way[way.index(position) :]])
    return found
