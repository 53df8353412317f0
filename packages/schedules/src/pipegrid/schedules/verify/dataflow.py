"""What each compute waits for, whoever holds it: the one place that knows how data flows in a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeAlias

from attrs import frozen

from pipegrid.schedules.plan.actions import COMPUTES, Action, ActionKind
from pipegrid.schedules.plan.plan import Plan, actions_of
from pipegrid.transport.edge import Direction, Edge

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W

Place: TypeAlias = tuple[int, Action]
"""A position, and an action on it."""


@frozen(slots=False)
class Transfer:
    """One activation or gradient on its way along an edge that is not inside one position.

    ``sources`` send to every one of ``destinations`` but themselves; what a position has made itself it
    keeps.
    """

    edge: Edge
    direction: Direction
    sources: tuple[int, ...]
    destinations: tuple[int, ...]

    @cached_property
    def producer(self) -> int:
        """The stage whose compute makes it."""
        return self.edge.source if self.direction is Direction.FORWARD else self.edge.destination

    @cached_property
    def consumer(self) -> int:
        """The stage whose compute waits for it."""
        return self.edge.destination if self.direction is Direction.FORWARD else self.edge.source

    @cached_property
    def senders(self) -> tuple[int, ...]:
        """The positions that send."""
        return tuple(p for p in self.sources if self.destinations != (p,))

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        """The positions that receive."""
        return tuple(p for p in self.destinations if self.sources != (p,))

    @cached_property
    def parties(self) -> tuple[int, ...]:
        """The positions that send or receive, ascending."""
        return tuple(sorted({*self.senders, *self.receivers}))


def transfers(plan: Plan) -> tuple[Transfer, ...]:
    """All kinds of transfer of the plan, edges ascending, forward before backward.

    A pair of stages that lie on the very same positions is colocated and has one only if a group carries its
    edge, because their ranks share the data in different ways.
    """
    found = []
    for edge in plan.graph.stage_edges:
        sources, destinations = plan.placement[edge.source], plan.placement[edge.destination]
        if sources == destinations and edge not in plan.collective_edges:
            continue
        found.append(Transfer(edge, Direction.FORWARD, sources, destinations))
        if edge in plan.gradient_edges:
            found.append(Transfer(edge, Direction.BACKWARD, destinations, sources))
    return tuple(found)


def unit_duration(action: Action) -> float:
    """One for ``F``, ``I`` and ``W``; two for ``B``, which is both halves; nothing for communications."""
    if action.kind is B:
        return 2.0
    return 1.0 if action.kind in COMPUTES else 0.0


@frozen
class Dates:
    """When each compute runs if every position does its own as soon as it can and messages take no time.

    ``start`` and ``end``: per position, per compute in order. ``line``: all computes as (position, index) in
    one order, by start, in which each comes after those it waits for.
    """

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    line: tuple[tuple[int, int], ...]


def compute_dates(plan: Plan, duration: Callable[[Action], float] = unit_duration) -> Dates | None:
    """The dates of a plan's computes, or None if they wait for each other or for one that is missing.

    Along an edge that a group carries, everyone waits for all positions of the stage before.
    """
    computes = [
        [action for step in steps for action in actions_of(step) if action.kind in COMPUTES] for steps in plan.positions
    ]
    rules = _rules(plan)
    start: list[list[float]] = [[] for _ in computes]
    end: list[list[float]] = [[] for _ in computes]
    line: list[tuple[float, int, int, int]] = []
    ready = list(range(len(computes)))
    while ready:
        position = ready.pop()
        own, starts, ends = computes[position], start[position], end[position]
        now = ends[-1] if ends else 0.0
        for index in range(len(ends), len(own)):
            action = own[index]
            microbatch = action.microbatch or 0
            needs, makes = rules.get((position, action.kind, action.stage), _FREE)
            missing = None
            for results in needs:
                date = results.dates[microbatch]
                if date is None:
                    missing = results
                    break
                now = max(now, date)
            if missing is not None:
                missing.waiting.setdefault(microbatch, []).append(position)
                break
            line.append((now, len(line), position, index))
            starts.append(now)
            now += duration(action)
            ends.append(now)
            if makes is not None:
                makes.dates[microbatch] = now
                if makes.waiting:
                    ready += makes.waiting.pop(microbatch, ())
    if len(line) < sum(map(len, computes)):
        return None
    line.sort()  # computes of one start are in the order in which they were found: causes first
    return Dates(
        tuple(map(tuple, start)),
        tuple(map(tuple, end)),
        tuple([(position, index) for _, _, position, index in line]),
    )


class _Results:
    """What a stage makes in one direction on one position: when, by microbatch, and which positions wait."""

    __slots__ = ("dates", "waiting")

    def __init__(self, num_microbatches: int) -> None:
        self.dates: list[float | None] = [None] * num_microbatches
        self.waiting: dict[int, list[int]] = {}


_Rule: TypeAlias = tuple[list[_Results], _Results | None]
"""What a compute needs, and what it makes that others may need."""

_FREE: _Rule = ([], None)


def _rules(plan: Plan) -> Mapping[tuple[int, ActionKind, int], _Rule]:
    """Per (position, kind, stage) of a compute its rule; a ``W`` has none, as it follows its ``I``."""
    results = {
        (position, forward, stage): _Results(plan.num_microbatches)
        for stage, places in enumerate(plan.placement)
        for position in places
        for forward in (True, False)
    }
    sources = _sources(plan)
    return {
        (position, kind, stage): (
            [results[key] for key in sources.get((position, kind, stage), ())],
            results[position, kind is F, stage],
        )
        for stage, places in enumerate(plan.placement)
        for position in places
        for kind in (F, B, I)
    }


def _sources(plan: Plan) -> Mapping[tuple[int, ActionKind, int], list[tuple[int, bool, int]]]:
    """Per (position, kind, stage) of a compute: the (position, whether forward, stage) of what it needs."""
    needs: dict[tuple[int, ActionKind, int], list[tuple[int, bool, int]]] = {}
    for stage, places in enumerate(plan.placement):
        for position in places:
            for kind in (B, I):
                needs[position, kind, stage] = [(position, True, stage)]
    for edge in plan.graph.stage_edges:
        before, after = plan.placement[edge.source], plan.placement[edge.destination]
        local = before == after and edge not in plan.collective_edges
        for position in after:
            origins = (position,) if local else before
            needs.setdefault((position, F, edge.destination), []).extend(
                (origin, True, edge.source) for origin in origins
            )
        if edge not in plan.gradient_edges:
            continue
        for position in before:
            origins = (position,) if local else after
            for kind in (B, I):
                needs[position, kind, edge.source] += [(o, False, edge.destination) for o in origins]
    return needs
