"""The rule of each action at one position: what it needs, what it marks as done, and its events.

An event is one integer per send, receive, result, joined compute, collective call and shared exchange of a plan. What
happens to each microbatch, or to each slice, has ids in a row, by the number of the piece (`Plan.piece_of`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from attrs import frozen

from pipegrid.core.edge import Direction, Edge
from pipegrid.core.lanes import Communicators
from pipegrid.plans.plan import MESSAGE_KINDS, Action, ActionKind, Lane, Plan, for_piece
from pipegrid.plans.plan.dataflow import BACKWARD, FORWARD, EdgeFlow, dataflow_of


class Route(NamedTuple):
    """The messages of one flow from one position to another; ``sent`` and ``received`` are the ids of piece 0."""

    flow: EdgeFlow
    lane: Lane
    sent: int
    received: int


class EventIds:
    """The event ids of a plan, which follow from its shape alone; each table entry is the id of piece 0.

    ``routes`` come first: all sends, then all receives. ``made``: in a plan of computes, the result of (position,
    stage, direction). ``joined``: that (position, stage, kind) has come to a compute of a shared stage. ``exchanges``:
    with shared lanes, the batches that a position exchanges with a partner, by (position, partner).
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.dataflow = plan, dataflow_of(plan)
        self.size = 0
        count, moved = plan.num_pieces, self.dataflow.between_positions if plan.has_communication else ()
        pairs = [(flow, *pair) for flow in moved for pair in flow.routes]
        bases = self._take(count, len(pairs)), self._take(count, len(pairs))
        self.routes = [
            Route(flow, Lane(sender, receiver, flow.direction), sent, received)
            for (flow, sender, receiver), sent, received in zip(pairs, *bases, strict=True)
        ]
        self.routes_of: dict[tuple[Edge, Direction], list[Route]] = {}
        traffic: dict[tuple[int, int], int] = {}
        for route in self.routes:
            self.routes_of.setdefault((route.flow.edge, route.flow.direction), []).append(route)
            ends = route.lane.source, route.lane.destination
            for pair in (ends, ends[::-1]):
                traffic[pair] = traffic.get(pair, 0) + len(route.flow.pieces)
        self.exchanges = {pair: self._take(most)[0] for pair, most in sorted(traffic.items())}
        self.made: dict[tuple[int, int, Direction], int] = {}
        if not plan.has_communication:
            made = [(p, s, way) for p, stages in enumerate(plan.stages_at) for s in stages for way in Direction]
            self.made = dict(zip(made, self._take(count, len(made)), strict=True))
        joined = [
            (position, stage, kind)
            for stage, places in self.dataflow.shared
            for position in places
            for kind in ((ActionKind.F,) if stage in plan.forward_only else tuple(ActionKind)[:4])
        ]
        self.joined = dict(zip(joined, self._take(count, len(joined)), strict=True))
        self._calls: dict[tuple[str, int, int], int] = {}

    def _take(self, each: int, times: int = 1) -> list[int]:
        first, self.size = self.size, self.size + each * times
        return list(range(first, self.size, each))

    def called(self, group: str, number: int, member: int) -> int:
        """The id of a member's part in the group's collective ``number``."""
        key = (group, number, member)
        if key not in self._calls:
            self._calls[key] = self._take(1)[0]
        return self._calls[key]

    def message(self, sent: int, *, sends: bool) -> Action:
        """The action at one of the two ends of the message whose send has the id ``sent``."""
        route, piece = divmod(sent, self.plan.num_pieces)
        flow = self.routes[route].flow
        kind, stage = MESSAGE_KINDS[flow.direction][0 if sends else 1], flow.producer if sends else flow.consumer
        return for_piece(Action(kind, stage, 0, flow.edge), piece, self.plan.num_slices)


F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W

Batches: TypeAlias = Literal["in_order", "simultaneous"]


@frozen
class Blocking:
    """The blocking of communication: arguments of `verify`."""

    rendezvous: bool = True
    lanes: Communicators = "separate"
    batches: Batches = "in_order"

    @property
    def in_order(self) -> bool:
        """Whether the messages of a batch block one after the other."""
        return self.rendezvous and self.lanes == "separate" and self.batches == "in_order"


RuleKey: TypeAlias = tuple[ActionKind, int] | tuple[ActionKind, int, int] | tuple[ActionKind, int, int, int]
"""Kind and stage of a compute; kind, source and destination of an action along an edge; with routes, then the unit."""


class LaneEnd(NamedTuple):
    """One end of one message of an action; ``message`` and ``waits`` are for the piece of the rule."""

    order: int
    """The number, in `PositionTable.lanes`, of the lane on which this end is noted in order."""
    message: int
    """The id of its send, at both ends."""
    waits: int | None
    """``~event`` of the other end, which holds the position up at the end of the batch, or of the flow's part of it."""
    partner: int | None
    """With shared lanes, the number of the partner in `PositionTable.partners`."""


class ActionRule(NamedTuple):
    """The rule of one kind of action at one position; ``done``, ``needs``, ``also``: flags for piece 0.

    Those of another piece are as far away as its number; with routes, a rule is of one piece.
    """

    action: Action
    """The action for microbatch 0, or for the unit of the rule."""
    done: int
    """The flag that the action sets; set before, the action is a duplicate."""
    needs: tuple[int, ...] = ()
    """The flags that earlier actions of the position must have set."""
    also: int | None = None
    """A second flag to set: ``B`` does the work of ``W`` as well, and ``I`` makes ``W`` possible."""
    flow: int = -1
    """The number of the flow whose message the action is."""
    messages: tuple[LaneEnd, ...] = ()
    events: tuple[int, ...] = ()
    """The events of the action for piece 0, in order: an id to set, or ``~id`` to wait for."""


class PositionTable:
    """The rules of one position, which follow from the plan's shape alone.

    ``span``: the number of pieces that a rule serves; ``num_flags``: number of flags; ``lanes``: the lanes on which the
    position sends (True) or receives (False); ``partners``: with shared lanes, the positions that it exchanges with;
    ``pieces``: per stage, what the position computes of it; ``tied``: per group, the tied stages of the position;
    ``averaged``: the stages whose gradients it reduces with its replicas, where these differ.
    """

    def __init__(self, ids: EventIds, position: int, blocking: Blocking) -> None:
        self.ids, self.position, self.blocking = ids, position, blocking
        self.plan, self.routed = ids.plan, ids.dataflow.routed
        self.num_pieces, self.sliced = self.plan.num_pieces, self.plan.num_slices > 1
        self.span = 1 if self.routed else self.num_pieces
        self.num_flags = 0
        self.table: dict[RuleKey, ActionRule] = {}
        self.collectives: dict[tuple[Edge, Direction], ActionRule] = {}
        self.lanes: dict[tuple[Lane, bool], int] = {}
        self.partners: dict[int, int] = {}
        self._makers: dict[int, tuple[Action, ...]] = {}  # per flag of piece 0, the actions that set it
        self._ends: dict[tuple[ActionKind, Edge], int] = {}  # per end of an edge, the flag of piece 0
        self.stages = self.plan.stages_at[position]
        self.pieces = {stage: self.plan.pieces_at(stage, position) for stage in self.stages}
        self.forwards = {stage: self._flags(Action(F, stage, 0)) for stage in self.stages}
        self.gradients = {stage: self._flags(Action(B, stage, 0), Action(I, stage, 0)) for stage in self.stages}
        self.halves = {stage: self._flags(Action(I, stage, 0)) for stage in self.stages}  # I without its W, or both
        self.weights = {stage: self._flags() for stage in self.stages}
        tied = {group.name: [stage for stage in group.tied if stage in self.stages] for group in self.plan.groups}
        self.tied = {name: stages for name, stages in tied.items() if stages}
        trained = [stage for stage in self.stages if stage not in self.plan.forward_only]
        self.averaged = trained if self.plan.num_replicas > 1 and self.plan.has_communication else []
        for number, flow in enumerate(ids.dataflow.between_positions if self.plan.has_communication else ()):
            if flow.group is not None and position in flow.members:  # it may hold neither stage
                action = Action(ActionKind.COLLECTIVE, flow.producer, 0, flow.edge, flow.group)
                made = (self._result(flow.producer, flow.direction),) if position in flow.sources else ()
                self.collectives[flow.edge, flow.direction] = ActionRule(action, self._flags(action), made)
            elif flow.group is None and position in flow.parties:
                for piece in flow.pieces if self.routed else (0,):
                    self._add_messages(number, flow, piece)
        for stage in self.stages:
            for piece in self.pieces[stage] if self.routed else (0,):
                self._add_compute(F, stage, piece, self.forwards[stage])
                if stage not in self.plan.forward_only:
                    self._add_compute(B, stage, piece, self.gradients[stage], also=self.weights[stage])
                    self._add_compute(I, stage, piece, self.gradients[stage], also=self.halves[stage])
                    needs, joins = (self.halves[stage] + piece,), self._joins(W, stage, piece)
                    self._add(ActionRule(Action(W, stage, piece), self.weights[stage] + piece, needs, events=joins))

    def _flags(self, *makers: Action) -> int:
        """The flag of piece 0; those of the others are behind it, so the number of a flag tells its piece."""
        first = self.num_flags
        self.num_flags += self.num_pieces
        if makers:
            self._makers[first] = makers
        return first

    def makers_of(self, flag: int) -> list[Action]:
        """The actions that set ``flag``."""
        piece = flag % self.num_pieces
        return [for_piece(maker, piece, self.plan.num_slices) for maker in self._makers.get(flag - piece, ())]

    def _result(self, stage: int, direction: Direction) -> int:
        """The flags of the result of ``stage`` at this position."""
        return self.forwards[stage] if direction is FORWARD else self.gradients[stage]

    def _add(self, rule: ActionRule) -> None:
        action, edge = rule.action, rule.action.edge
        key: RuleKey = (action.kind, action.stage) if edge is None else (action.kind, edge.source, edge.destination)
        assert action.microbatch is not None
        self.table[(*key, action.microbatch) if self.routed else key] = rule

    def _add_messages(self, number: int, flow: EdgeFlow, piece: int) -> None:
        """The rules of a send and of a receive, each of which may have several partners."""
        routes = (route for route in self.ids.routes_of[flow.edge, flow.direction] if route.flow is flow)
        own = [route for route in routes if self.position in (route.lane.source, route.lane.destination)]
        blocks = self.blocking.rendezvous and self.blocking.lanes == "separate"
        at_once = self.blocking.in_order and len(own) == 1  # nothing else belongs to the flow's part of a batch
        for sends, stage in ((True, flow.producer), (False, flow.consumer)):
            kind = MESSAGE_KINDS[flow.direction][0 if sends else 1]
            ends: list[LaneEnd] = []
            events: list[int] = []
            for route in own:
                place, other = route.lane.source, route.lane.destination
                if not sends:
                    place, other = other, place
                if self.position != place:
                    continue
                here, there = (route.sent, route.received) if sends else (route.received, route.sent)
                if blocks or (sends and not self.blocking.rendezvous):
                    events.append(here + piece)
                if at_once:
                    events.append(~(there + piece))
                waits = ~(there + piece) if blocks and not at_once else None
                order = self.lanes.setdefault((route.lane, sends), len(self.lanes))
                shared = self.blocking.lanes == "shared"
                partner = self.partners.setdefault(other, len(self.partners)) if shared else None
                ends.append(LaneEnd(order, route.sent + piece, waits, partner))
            if ends:
                result = self._result(stage, flow.direction) if sends else 0
                self._add(
                    ActionRule(
                        Action(kind, stage, piece, flow.edge),
                        self._end_flags(kind, stage, flow.edge) + piece,
                        needs=tuple([result + made for made in flow.makers(piece, self.position)] if sends else ()),
                        flow=number,
                        messages=tuple(ends),
                        events=tuple(events),
                    )
                )

    def _end_flags(self, kind: ActionKind, stage: int, edge: Edge) -> int:
        if (kind, edge) not in self._ends:
            self._ends[kind, edge] = self._flags(Action(kind, stage, 0, edge))
        return self._ends[kind, edge]

    def _add_compute(self, kind: ActionKind, stage: int, piece: int, done: int, also: int | None = None) -> None:
        direction = FORWARD if kind is F else BACKWARD
        needs = [] if direction is FORWARD else [self.forwards[stage] + piece]
        events: list[int] = []
        for flow, message in self.ids.dataflow.arriving(stage, direction, piece):
            self._add_input(flow, message, needs, events)
        events += self._joins(kind, stage, piece)
        if not self.plan.has_communication:
            events.append(self.ids.made[self.position, stage, direction] + piece)
        second = None if also is None else also + piece
        self._add(ActionRule(Action(kind, stage, piece), done + piece, tuple(needs), second, events=tuple(events)))

    def _add_input(self, flow: EdgeFlow, message: int, needs: list[int], events: list[int]) -> None:
        """Add one input of a compute: made here, received here, or (in a plan of computes) awaited."""
        position, key = self.position, (flow.edge, flow.direction)
        if key in self.collectives:
            needs.append(self.collectives[key].done)
            return
        origins = flow.origins(position)
        if position in origins:
            needs += [self._result(flow.producer, flow.direction) + made for made in flow.makers(message, position)]
        others = [origin for origin in origins if origin != position]
        if not self.plan.has_communication:
            for other in others:
                first = self.ids.made[other, flow.producer, flow.direction]
                events += [~(first + made) for made in flow.makers(message, other)]
        elif others:
            needs.append(self._end_flags(MESSAGE_KINDS[flow.direction][1], flow.consumer, flow.edge) + message)
            if not self.blocking.rendezvous:
                routes = [route for route in self.ids.routes_of[key] if route.flow is flow]
                events += [~(route.sent + message) for route in routes if route.lane.destination == position]

    def _joins(self, kind: ActionKind, stage: int, piece: int) -> tuple[int, ...]:
        """The events of a compute of a shared stage: this position has come to it, and waits for the others."""
        places = self.ids.dataflow.together(stage, self.position)
        joined = [self.ids.joined[place, stage, kind] + piece for place in places if place != self.position]
        here = self.ids.joined[self.position, stage, kind] + piece if places else 0
        return (here, *(~event for event in joined)) if places else ()
