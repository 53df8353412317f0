"""From computes to computes and communications."""

from __future__ import annotations

import gc
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

from attrs import evolve, frozen

from pipegrid.schedules.arguments import as_number, require, require_choice, require_function, require_items
from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.plan.actions import Action, ActionKind
from pipegrid.schedules.plan.plan import Group, Plan, Step, require_plan
from pipegrid.schedules.verify.dataflow import Dates, F, Transfer, W, compute_dates, transfers, unit_duration
from pipegrid.schedules.verify.verify import verify
from pipegrid.transport.edge import Direction, Edge

Receives: TypeAlias = Literal["late", "early"]


def lower(
    plan: Plan,
    *,
    receives: Receives = "late",
    collectives: Mapping[Edge, str] | None = None,
    tied: Mapping[str, Sequence[int]] | None = None,
    duration: Callable[[Action], float] = unit_duration,
) -> Plan:
    """Add the communication to a plan of computes, so that it cannot deadlock even if sends block.

    Every activation and gradient that crosses positions becomes a ``SEND`` right after the compute that makes
    it (where several positions make it, after the last of them), and a ``RECV`` no later than the compute
    that needs it. What two neighbours exchange between the same two computes of both is one batch
    (``[SEND_F RECV_B]`` against ``[RECV_F SEND_B]``), so the result also holds with shared lanes.

    ``receives``: ``"late"`` posts a receive where its sender would otherwise start to wait, which batches
    most; ``"early"`` before the first compute that starts after the one that makes the message, which hides
    latency and buffers more. ``collectives`` names, for an edge, the group in which what travels along it
    goes by a ``COLLECTIVE`` in place of messages; the group is the positions of both stages. ``tied`` names
    groups of stages that share a parameter: each gets a ``REDUCE`` at the end of its positions. Both are added
    to the groups that the plan has, which are treated alike. ``duration`` guesses how long a compute takes; it
    moves receives, and cannot make the result wrong.

    Why it cannot deadlock: the computes get one order for the whole plan (by the date at which each starts),
    and each transfer a place in it, between those who make it and those who need it. Every position does its
    own in this order, so of all transfers that are not done, the first finds both its ends free. To issue
    neighbouring communications as one batch only posts them earlier.

    Raises:
        PlanError: the plan has communications already, its computes are wrong (every fault is listed, as by
            `verify`), or ``collectives`` or ``tied`` name what does not exist.
    """
    require_plan(plan)
    require_choice("receives", receives, ("late", "early"), error=PlanError)
    require_function("duration", duration, "give a function from an Action to its duration", error=PlanError)
    if plan.has_communication:
        raise PlanError("the plan has communications already; lower takes a plan of computes alone")
    groups = with_collectives(plan, {} if collectives is None else collectives)
    groups += tied_groups(plan, {} if tied is None else tied)
    untied = evolve(plan, groups=[evolve(group, tied=()) for group in groups], creation=None)
    with _collector_paused():
        verify(untied)  # each REDUCE is added below
        plan = evolve(plan, groups=groups, creation=None)
        dates = compute_dates(plan, unit_duration if duration is unit_duration else _checked(duration))
        if dates is None:  # verify refuses such plans
            raise PlanError("the computes of the plan wait for each other")
        steps = _steps(plan, dates, receives)
        positions = [own + reductions(position, plan, plan.groups) for position, own in enumerate(steps)]
        return evolve(plan, positions=positions, creation=None)


def _checked(duration: Callable[[Action], float]) -> Callable[[Action], float]:
    def checked(action: Action) -> float:
        remedy = "a duration is a number from 0"
        time = as_number(f"duration({action})", duration(action), remedy, error=PlanError)
        if time < 0:
            raise PlanError(f"duration({action}) is {time}; {remedy}")
        return time

    return checked


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No search for cyclic garbage inside: a plan is hundreds of thousands of objects, which all stay.

    Each search would walk through those made so far, which takes a third of the time. Where several threads
    do this at once the first to leave switches the collector on again, which is slower and does no harm.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_Event: TypeAlias = tuple[int, int, int, int]
"""A transfer of one microbatch: its place in the line, that of its last maker, which transfer, microbatch.

Plain tuples of numbers, as there are hundreds of thousands: the garbage collector does not visit those.
"""


class _Line:
    """All computes in one order: where in it each position's own stand, and where each result is made."""

    def __init__(self, plan: Plan, dates: Dates) -> None:
        self.dates = dates
        self.at: list[list[int]] = [[] for _ in plan.positions]
        # Per position, stage and direction, by microbatch.
        self._made: dict[tuple[int, int, Direction], list[int]] = {}
        for place, (position, index) in enumerate(dates.line):
            self.at[position].append(place)
            action = plan.positions[position][index]
            assert isinstance(action, Action)
            if action.kind is W or action.microbatch is None:
                continue
            key = (position, action.stage, Direction.FORWARD if action.kind is F else Direction.BACKWARD)
            places = self._made.get(key)
            if places is None:
                places = self._made[key] = [0] * plan.num_microbatches
            places[action.microbatch] = place

    def made(self, transfer: Transfer) -> list[int]:
        """Per microbatch, the place of the last compute that makes what ``transfer`` takes."""
        return self._each(max, transfer.sources, transfer.producer, transfer.direction)

    def needed(self, transfer: Transfer) -> list[int]:
        """Per microbatch, the place of the first compute that needs what ``transfer`` brings."""
        return self._each(min, transfer.destinations, transfer.consumer, transfer.direction)

    def _each(self, pick: Callable[..., int], positions: Sequence[int], stage: int, direction: Direction) -> list[int]:
        places = [self._made[position, stage, direction] for position in positions]
        return places[0] if len(places) == 1 else list(map(pick, *places))


def _events(line: _Line, all_transfers: Sequence[Transfer], receives: Receives) -> list[_Event]:
    events: list[_Event] = []
    for number, transfer in enumerate(all_transfers):
        made = line.made(transfer)
        if receives == "late":
            places = _late_places(line, transfer, made, line.needed(transfer))
        else:
            places = [place + 1 for place in made]
        events += [(place, made[microbatch], number, microbatch) for microbatch, place in enumerate(places)]
    events.sort()
    return events


def _late_places(line: _Line, transfer: Transfer, made: Sequence[int], needed: Sequence[int]) -> list[int]:
    """Per microbatch, the last place at which no sender and no receiver waits longer than it has to.

    That is before the sender's next compute, and before any compute of the receiver that would still run when
    the sender could go on.
    """
    senders = [(line.at[position], line.dates.start[position]) for position in transfer.senders]
    receivers = [(line.at[position], line.dates.end[position]) for position in transfer.receivers]
    places = []
    for maker, place in zip(made, needed, strict=True):
        resumes = math.inf
        for at, start in senders:
            index = bisect_right(at, maker)
            if index < len(at):
                place = min(place, at[index])  # noqa: PLW2901 -- it starts at the latest and comes down
                resumes = min(resumes, start[index])
        for at, end in receivers:
            index = bisect_right(at, maker)
            while index < len(at) and at[index] < place and end[index] <= resumes:
                index += 1
            if index < len(at):
                place = min(place, at[index])  # noqa: PLW2901
        places.append(place)
    return places


class _Writer:
    """Writes one position's steps: its computes, and between them the batches of what it communicates."""

    def __init__(self, computes: Sequence[Step]) -> None:
        self._computes = computes
        self._done = 0
        self._steps: list[Step] = []
        self._batch: list[Action] = []  # the one that may still grow
        self._partners: frozenset[int] = frozenset()

    def exchange(self, after: int, actions: list[Action], partners: frozenset[int]) -> None:
        """Issue ``actions`` after as many computes, with the last batch unless that deals with a partner too.

        Two exchanges with one partner stay apart, because that partner does them at different times; so the
        batches of any two positions match one to one.
        """
        if after == self._done and self._batch and self._partners.isdisjoint(partners):
            self._batch += actions
            self._partners |= partners
            return
        self._close(after)
        self._batch, self._partners = actions, partners

    def collective(self, after: int, action: Action) -> None:
        """Issue a collective after as many computes, which is never part of a batch."""
        self._close(after)
        self._steps.append(action)

    def _close(self, after: int) -> None:
        batch = self._batch
        if batch:
            if len(batch) > 1:
                batch.sort(key=_is_receive)  # sends first, for the reader: they never share a lane with receives
            self._steps.append(batch[0] if len(batch) == 1 else tuple(batch))
            self._batch = []
        if after > self._done:
            self._steps += self._computes[self._done : after]
            self._done = after

    def finish(self) -> list[Step]:
        """All steps, when there is no more to communicate."""
        self._close(len(self._computes))
        return self._steps


@frozen
class _Party:
    """A position's part in a transfer: where its computes stand in the line, and its messages per microbatch."""

    position: int
    at: list[int]
    messages: list[tuple[ActionKind, int, Edge]]
    partners: frozenset[int]


def _steps(plan: Plan, dates: Dates, receives: Receives) -> list[list[Step]]:
    """Per position its computes, and between them what it communicates."""
    line, all_transfers = _Line(plan, dates), transfers(plan)
    members = {group.name: group.positions for group in plan.groups}
    groups = [plan.collective_edges.get(transfer.edge) for transfer in all_transfers]
    parties = [
        _parties(line, transfer, transfer.parties if group is None else members[group])
        for transfer, group in zip(all_transfers, groups, strict=True)
    ]
    writers = [_Writer(steps) for steps in plan.positions]
    # Exchanges are in the order of their places, so each position's come in the order of its computes.
    for ends, events in _exchanges(_events(line, all_transfers, receives), parties, groups):
        _, _, number, microbatch = events[0]
        group = groups[number]
        for slot, party in enumerate(parties[number]):
            if group is not None:
                action = _collective(all_transfers[number], microbatch, group)
                writers[party.position].collective(ends[slot], action)
                continue
            actions = [
                Action(kind, stage, microbatch, edge)
                for _, _, number, microbatch in events
                for kind, stage, edge in parties[number][slot].messages
            ]
            writers[party.position].exchange(ends[slot], actions, party.partners)
    return [writer.finish() for writer in writers]


def _exchanges(
    events: Sequence[_Event], parties: Sequence[Sequence[_Party]], groups: Sequence[str | None]
) -> Iterator[tuple[tuple[int, ...], list[_Event]]]:
    """For each exchange how many computes of each party come before it, and its events, by their first.

    What the same positions exchange between the same computes goes together, at the place of the first;
    a collective is alone.
    """
    who: dict[tuple[int, ...], int] = {}
    same = [who.setdefault(tuple([party.position for party in own]), len(who)) for own in parties]
    ats = [[party.at for party in own] for own in parties]
    numbers: dict[tuple[int, ...], int] = {}
    exchange_of = []
    for place, _, number, microbatch in events:
        # The parties come first: with them the length of a key says whether it is a collective's.
        key = (same[number], *[bisect_left(at, place) for at in ats[number]])
        if groups[number] is not None:
            key = (*key, number, microbatch)
        exchange_of.append(numbers.setdefault(key, len(numbers)))
    together = [event for _, event in sorted(zip(exchange_of, events, strict=True))]
    begin = 0
    for key, size in zip(numbers, _sizes(exchange_of, len(numbers)), strict=True):
        yield key[1:], together[begin : begin + size]
        begin += size


def _sizes(indices: Iterable[int], count: int) -> list[int]:
    sizes = [0] * count
    for index in indices:
        sizes[index] += 1
    return sizes


def _parties(line: _Line, transfer: Transfer, positions: Sequence[int]) -> list[_Party]:
    return [
        _Party(position, line.at[position], _messages(transfer, position), frozenset(positions) - {position})
        for position in positions
    ]


def _is_receive(action: Action) -> bool:
    return action.kind.is_receive


def _messages(transfer: Transfer, position: int) -> list[tuple[ActionKind, int, Edge]]:
    """What ``position`` does for each microbatch of the transfer: send, receive, or both."""
    forward = transfer.direction is Direction.FORWARD
    send, receive = (ActionKind.SEND_F, ActionKind.RECV_F) if forward else (ActionKind.SEND_B, ActionKind.RECV_B)
    ends = []
    if position in transfer.senders:
        ends.append((send, transfer.producer, transfer.edge))
    if position in transfer.receivers:
        ends.append((receive, transfer.consumer, transfer.edge))
    return ends


def _collective(transfer: Transfer, microbatch: int, group: str) -> Action:
    return Action(ActionKind.COLLECTIVE, transfer.producer, microbatch, transfer.edge, group)


def with_collectives(plan: Plan, collectives: Mapping[Edge, str]) -> tuple[Group, ...]:
    """The plan's groups, with those that carry ``collectives``: the positions of an edge's two stages.

    Raises:
        PlanError: an edge that the graph does not have, or a group with other positions than its edge.
    """
    require("collectives", collectives, Mapping, "give a dict from an Edge to its group's name", error=PlanError)
    groups = {group.name: group for group in plan.groups}
    for edge, name in collectives.items():
        if edge not in plan.graph.stage_edges:
            known = ", ".join(map(str, plan.graph.stage_edges)) or "none"
            raise PlanError(f"collectives names edge {edge}; the graph has {known}")
        places = {*plan.placement[edge.source], *plan.placement[edge.destination]}
        group = groups.setdefault(name, Group(name, places))
        if set(group.positions) != places:
            raise PlanError(
                f"edge {edge} lies on positions {sorted(places)} and its group {name!r} has {list(group.positions)}; "
                "give it a group of exactly its own positions"
            )
        groups[name] = evolve(group, edges={*group.edges, edge})
    return tuple(groups.values())


def tied_groups(plan: Plan, tied: Mapping[str, Sequence[int]]) -> tuple[Group, ...]:
    """One group for each shared parameter: the positions of its stages.

    Raises:
        PlanError: a stage that the plan does not have.
    """
    require("tied", tied, Mapping, "give a dict from a group's name to the stages that share it", error=PlanError)
    for name, stages in tied.items():
        remedy = "give the list of stages that share the parameter"
        for stage in require_items(f"tied[{name!r}]", stages, int, remedy, error=PlanError):
            if not 0 <= stage < plan.num_stages:
                raise PlanError(f"tied {name!r} names stage {stage}; the plan has stages 0..{plan.num_stages - 1}")
    return tuple(
        Group(name, {place for stage in stages for place in plan.placement[stage]}, tied=stages)
        for name, stages in tied.items()
    )


def reductions(position: int, plan: Plan, groups: Sequence[Group]) -> list[Step]:
    """The ``REDUCE`` of each shared parameter that ``position`` holds, in one order for all positions."""
    return [
        Action(ActionKind.REDUCE, min(held), group=group.name)
        for group in groups
        if (held := [stage for stage in group.tied if position in plan.placement[stage]])
    ]
