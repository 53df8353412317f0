"""From computes to computes and communications."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from attrs import evolve

from pipegrid.schedules.actions import Action, ActionKind
from pipegrid.schedules.dependencies import Dates, F, Transfer, W, compute_dates, transfers, unit_duration
from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.plan import Group, Plan, Step
from pipegrid.schedules.verification import verify
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
    if receives not in ("late", "early"):
        raise PlanError(f"receives is {receives!r}; choose 'late' or 'early'")
    if plan.has_communication:
        raise PlanError("the plan has communications already; lower takes a plan of computes alone")
    groups = _with_collectives(plan, collectives or {}) + tied_groups(plan, tied or {})
    plan = evolve(plan, groups=groups, creation=None)
    verify(plan)
    dates = compute_dates(plan, duration)
    if dates is None:  # verify refuses such plans
        raise PlanError("the computes of the plan wait for each other")
    gaps = _gaps(_Line(plan, dates), receives)
    positions: list[list[Step]] = []
    for position, steps in enumerate(plan.positions):
        own: list[Step] = []
        for index, step in enumerate(steps):
            own += gaps.get((position, index), ())
            own.append(step)
        own += gaps.get((position, len(steps)), ())
        positions.append(own + reductions(position, plan, plan.groups))
    return evolve(plan, positions=positions, creation=None)


class _Line:
    """All computes in one order, and where each position's own stand in it."""

    def __init__(self, plan: Plan, dates: Dates) -> None:
        self.plan = plan
        self.dates = dates
        self.at: list[list[int]] = [[] for _ in plan.positions]
        self.made: dict[tuple[int, bool, int, int], int] = {}
        for place, (position, index) in enumerate(dates.line):
            self.at[position].append(place)
            action = plan.positions[position][index]
            assert isinstance(action, Action)
            if action.kind is not W and action.microbatch is not None:
                self.made[position, action.kind is F, action.stage, action.microbatch] = place

    def gap(self, position: int, place: int) -> int:
        """How many computes of ``position`` come before ``place``."""
        return bisect_left(self.at[position], place)


class _Event(NamedTuple):
    """A transfer of one microbatch, just before ``place`` in the line."""

    place: int
    made: int
    transfer: int
    microbatch: int


def _events(line: _Line, all_transfers: Sequence[Transfer], receives: Receives) -> list[_Event]:
    events = []
    for number, transfer in enumerate(all_transfers):
        forward = transfer.direction is Direction.FORWARD
        for microbatch in range(line.plan.num_microbatches):
            made = max(line.made[p, forward, transfer.producer, microbatch] for p in transfer.sources)
            needed = min(line.made[p, forward, transfer.consumer, microbatch] for p in transfer.destinations)
            place = made + 1
            if receives == "late":
                place = _late_place(line, transfer, made, needed)
            events.append(_Event(place, made, number, microbatch))
    events.sort()
    return events


def _late_place(line: _Line, transfer: Transfer, made: int, needed: int) -> int:
    """The last place at which no sender and no receiver waits longer than it has to.

    That is before the sender's next compute, and before any compute of the receiver that would still run when
    the sender could go on.
    """
    place, resumes = needed, float("inf")
    for position in transfer.senders:
        index = bisect_right(line.at[position], made)
        if index < len(line.at[position]):
            place = min(place, line.at[position][index])
            resumes = min(resumes, line.dates.start[position][index])
    for position in transfer.receivers:
        at, end = line.at[position], line.dates.end[position]
        index = bisect_right(at, made)
        while index < len(at) and at[index] < place and end[index] <= resumes:
            index += 1
        if index < len(at):
            place = min(place, at[index])
    return place


class _Gap:
    """The batches that a position issues between two of its computes."""

    def __init__(self) -> None:
        self.batches: list[list[Action]] = []
        self.partners: set[int] | None = None  # of the last batch; None where nothing may join it

    def add(self, actions: list[Action], partners: set[int]) -> None:
        """Issue ``actions`` with the last batch, unless it already deals with one of ``partners``.

        Two exchanges with one partner stay apart, because that partner does them at different times; so the
        batches of any two positions match one to one.
        """
        if self.partners is None or self.partners & partners:
            self.batches.append([])
            self.partners = set()
        self.batches[-1] += actions
        self.partners |= partners

    def add_alone(self, action: Action) -> None:
        """Issue a collective, which is never part of a batch."""
        self.batches.append([action])
        self.partners = None

    def steps(self) -> list[Step]:
        """The batches; sends stand first, for the reader: sends and receives never share a lane."""
        return [batch[0] if len(batch) == 1 else tuple(sorted(batch, key=_sends_first)) for batch in self.batches]


def _gaps(line: _Line, receives: Receives) -> dict[tuple[int, int], list[Step]]:
    """Per position and number of computes done, the communication steps issued there."""
    collectives, all_transfers = line.plan.collective_edges, transfers(line.plan)
    members = {group.name: group.positions for group in line.plan.groups}
    # What the same positions exchange between the same computes goes together, at the place of the first.
    exchanges: dict[tuple[_Ends, _Event | None], list[_Event]] = {}
    for event in _events(line, all_transfers, receives):
        transfer = all_transfers[event.transfer]
        alone = transfer.edge in collectives
        parties = members[collectives[transfer.edge]] if alone else transfer.parties
        ends = tuple([(party, line.gap(party, event.place)) for party in parties])
        exchanges.setdefault((ends, event if alone else None), []).append(event)
    messages = {
        (number, party): _messages(transfer, party)
        for number, transfer in enumerate(all_transfers)
        for party in transfer.parties
    }
    gaps: dict[tuple[int, int], _Gap] = {}
    for (ends, alone_event), events in exchanges.items():
        for party, index in ends:
            gap = gaps.setdefault((party, index), _Gap())
            if alone_event is not None:
                transfer = all_transfers[alone_event.transfer]
                gap.add_alone(_collective(transfer, alone_event.microbatch, collectives[transfer.edge]))
                continue
            actions = [
                Action(kind, stage, microbatch, edge)
                for _, _, number, microbatch in events
                for kind, stage, edge in messages[number, party]
            ]
            gap.add(actions, {other for other, _ in ends if other != party})
    return {place: gap.steps() for place, gap in gaps.items()}


_Ends: TypeAlias = tuple[tuple[int, int], ...]
"""The positions that exchange something, and for each how many of its computes come before."""


def _sends_first(action: Action) -> bool:
    return action.kind in (ActionKind.RECV_F, ActionKind.RECV_B)


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


def _with_collectives(plan: Plan, collectives: Mapping[Edge, str]) -> tuple[Group, ...]:
    """The plan's groups, with those that carry ``collectives``: the positions of an edge's two stages."""
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
    """One group for each shared parameter: the positions of its stages."""
    for name, stages in tied.items():
        for stage in stages:
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
