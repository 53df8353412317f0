"""The rule of each action at one position: what it needs, what it marks as done, and its events."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from attrs import frozen

from pipegrid.schedules.plan import Action, ActionKind, Lane
from pipegrid.schedules.plan.dataflow import BACKWARD, FORWARD, EdgeFlow
from pipegrid.schedules.verify.event_ids import MESSAGE_KINDS, EventIds, Route
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.sharing import Communicators

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W

Batches: TypeAlias = Literal["in_order", "simultaneous"]


@frozen
class Blocking:
    """How communication blocks: the arguments of `verify`."""

    rendezvous: bool = True
    lanes: Communicators = "separate"
    batches: Batches = "in_order"

    @property
    def in_order(self) -> bool:
        """Whether the messages of a batch block one after the other."""
        return self.rendezvous and self.lanes == "separate" and self.batches == "in_order"


RuleKey: TypeAlias = tuple[ActionKind, int] | tuple[ActionKind, int, int]
"""Kind and stage of a compute; kind, source and destination of an action along an edge."""


class MessageEnd(NamedTuple):
    """One end of one message of an action; ``message`` and ``waits`` are for piece 0."""

    order: int
    """The number, in `PositionTable.lanes`, of the lane on which this end is noted in order."""
    message: int
    """The id of its send, at both ends."""
    waits: int | None
    """``~event`` of the other end, which holds the position up at the end of the batch, or of the flow's part of it."""
    partner: int | None
    """With shared lanes, the number of the partner in `PositionTable.partners`."""


class ActionRule(NamedTuple):
    """The rule of one kind of action at one position; ``done``, ``needs``, ``also``: flags for piece 0."""

    action: Action
    """The action for microbatch 0."""
    done: int
    """The flag that the action sets; set before, the action is a duplicate."""
    needs: tuple[int, ...] = ()
    """The flags that earlier actions of the position must have set."""
    also: int | None = None
    """A second flag to set: ``B`` does the work of ``W`` as well, and ``I`` makes ``W`` possible."""
    flow: int = -1
    """The number of the flow whose message the action is."""
    messages: tuple[MessageEnd, ...] = ()
    events: tuple[int, ...] = ()
    """The events of the action for piece 0, in order: an id to set, or ``~id`` to wait for."""


class PositionTable:
    """The rules of one position, which follow from the plan's shape alone.

    ``num_flags``: number of flags; ``makers``: per flag of piece 0, the actions that set it; ``lanes``: the lanes
    on which the position sends (True) or receives (False); ``partners``: with shared lanes, the positions that it
    exchanges with; ``tied``: per group, the tied stages of the position.
    """

    def __init__(self, ids: EventIds, position: int, blocking: Blocking) -> None:
        self.ids, self.position, self.blocking = ids, position, blocking
        self.plan = ids.plan
        self.num_flags = 0
        self.table: dict[RuleKey, ActionRule] = {}
        self.collectives: dict[tuple[Edge, Direction], ActionRule] = {}
        self.lanes: dict[tuple[Lane, bool], int] = {}
        self.partners: dict[int, int] = {}
        self.makers: dict[int, tuple[Action, ...]] = {}
        self.stages = self.plan.stages_at[position]
        self.forwards = {stage: self._flags(Action(F, stage, 0)) for stage in self.stages}
        self.gradients = {stage: self._flags(Action(B, stage, 0), Action(I, stage, 0)) for stage in self.stages}
        self.halves = {stage: self._flags(Action(I, stage, 0)) for stage in self.stages}  # I without its W, or both
        self.weights = {stage: self._flags() for stage in self.stages}
        self.tied = {
            group.name: stages
            for group in self.plan.groups
            if (stages := [stage for stage in group.tied if stage in self.stages])
        }
        for number, flow in enumerate(ids.dataflow.crossing if self.plan.has_communication else ()):
            if flow.group is not None:
                self._add_collective(flow)
            else:
                self._add_messages(number, flow)
        for stage in self.stages:
            self._add_computes(stage)

    def _flags(self, *makers: Action) -> int:
        first = self.num_flags
        self.num_flags += self.plan.num_pieces
        if makers:
            self.makers[first] = makers
        return first

    def _result(self, stage: int, direction: Direction) -> int:
        """The flags of the result of ``stage`` at this position."""
        return self.forwards[stage] if direction is FORWARD else self.gradients[stage]

    def _add_messages(self, number: int, flow: EdgeFlow) -> None:
        """The rules of a send and of a receive, each of which may have several partners."""
        routes = self.ids.routes_of[flow.edge, flow.direction]
        own = [route for route in routes if self.position in (route.lane.source, route.lane.destination)]
        blocks = self.blocking.rendezvous and self.blocking.lanes == "separate"
        at_once = self.blocking.in_order and len(own) == 1  # nothing else belongs to the flow's part of a batch
        for kind, stage, sends in zip(
            MESSAGE_KINDS[flow.direction], (flow.producer, flow.consumer), (True, False), strict=True
        ):
            ends, events = [], []
            for route in own:
                if self.position != (route.lane.source if sends else route.lane.destination):
                    continue
                here, there = (route.sent, route.received) if sends else (route.received, route.sent)
                if blocks or (sends and not self.blocking.rendezvous):
                    events.append(here)
                if at_once:
                    events.append(~there)
                ends.append(self._end(route, ~there if blocks and not at_once else None, sends=sends))
            if ends:
                action = Action(kind, stage, 0, flow.edge)
                self.table[kind, flow.edge.source, flow.edge.destination] = ActionRule(
                    action,
                    self._flags(action),
                    needs=(self._result(stage, flow.direction),) if sends else (),
                    flow=number,
                    messages=tuple(ends),
                    events=tuple(events),
                )

    def _end(self, route: Route, waits: int | None, *, sends: bool) -> MessageEnd:
        order = self.lanes.setdefault((route.lane, sends), len(self.lanes))
        partner = route.lane.destination if sends else route.lane.source
        shared = self.blocking.lanes == "shared"
        number = self.partners.setdefault(partner, len(self.partners)) if shared else None
        return MessageEnd(order, route.sent, waits, number)

    def _add_collective(self, flow: EdgeFlow) -> None:
        """The rule of a member, which may hold neither stage."""
        if self.position in flow.members:
            action = Action(ActionKind.COLLECTIVE, flow.producer, 0, flow.edge, flow.group)
            needs = (self._result(flow.producer, flow.direction),) if self.position in flow.sources else ()
            self.collectives[flow.edge, flow.direction] = ActionRule(action, self._flags(action), needs)

    def _add_computes(self, stage: int) -> None:
        self._add_compute(F, stage, self.forwards[stage])
        if stage not in self.plan.forward_only:
            self._add_compute(B, stage, self.gradients[stage], also=self.weights[stage])
            self._add_compute(I, stage, self.gradients[stage], also=self.halves[stage])
            joins = self._joins(W, stage)
            self.table[W, stage] = ActionRule(
                Action(W, stage, 0), self.weights[stage], needs=(self.halves[stage],), events=joins
            )

    def _add_compute(self, kind: ActionKind, stage: int, done: int, also: int | None = None) -> None:
        direction = FORWARD if kind is F else BACKWARD
        needs = [] if direction is FORWARD else [self.forwards[stage]]
        events: list[int] = []
        for flow in self.ids.dataflow.inputs(stage, direction):
            self._add_input(flow, needs, events)
        events += self._joins(kind, stage)
        if not self.plan.has_communication:
            events.append(self.ids.made[self.position, stage, direction])
        self.table[kind, stage] = ActionRule(Action(kind, stage, 0), done, tuple(needs), also, events=tuple(events))

    def _add_input(self, flow: EdgeFlow, needs: list[int], events: list[int]) -> None:
        """Add one input of a compute: made here, received here, or (in a plan of computes) awaited."""
        position, key = self.position, (flow.edge, flow.direction)
        if key in self.collectives:
            needs.append(self.collectives[key].done)
            return
        origins = flow.origins(position)
        if position in origins:
            needs.append(self._result(flow.producer, flow.direction))
        others = [origin for origin in origins if origin != position]
        if not self.plan.has_communication:
            events += [~self.ids.made[other, flow.producer, flow.direction] for other in others]
        elif others:
            receive = MESSAGE_KINDS[flow.direction][1]
            needs.append(self.table[receive, flow.edge.source, flow.edge.destination].done)
            if not self.blocking.rendezvous:
                routes = self.ids.routes_of[key]
                events += [~route.sent for route in routes if route.lane.destination == position]

    def _joins(self, kind: ActionKind, stage: int) -> tuple[int, ...]:
        """The events of a compute of a shared stage: this position has come to it, and waits for the others."""
        places = self.ids.dataflow.shared.get(stage, ())
        joined = [self.ids.joined[place, stage, kind] for place in places if place != self.position]
        return (self.ids.joined[self.position, stage, kind], *(~event for event in joined)) if places else ()
