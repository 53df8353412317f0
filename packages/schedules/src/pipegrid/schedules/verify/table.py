"""What each action needs, sets and waits for at one position, looked up once for all microbatches."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from pipegrid.schedules.plan.actions import Action, ActionKind
from pipegrid.schedules.plan.plan import Lane
from pipegrid.schedules.verify.dataflow import Transfer
from pipegrid.schedules.verify.event_ids import EventIds, Route
from pipegrid.transport.edge import Direction, Edge

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD

_KINDS = {
    FORWARD: (ActionKind.SEND_F, ActionKind.RECV_F),
    BACKWARD: (ActionKind.SEND_B, ActionKind.RECV_B),
}

RuleKey: TypeAlias = tuple[ActionKind, int] | tuple[ActionKind, int, int]
"""Kind and stage of a compute; kind, source and destination of an action along an edge."""


class Message(NamedTuple):
    """One message of an action, whatever the microbatch: each number but the first is a base to add it to."""

    lane: int
    """The number, in `PositionTable.lanes`, of where this end is noted in order."""
    number: int
    """The message: the mark of its send."""
    sets: int
    awaits: int


class Rule(NamedTuple):
    """What holds for one kind of action at one position.

    ``done``, ``needs`` and ``also`` are bases of flags of this position, to which the microbatch is added.
    """

    action: Action
    """The action for microbatch 0."""
    done: int
    """Set by the action; whoever finds it set is a duplicate."""
    needs: tuple[int, ...] = ()
    """Flags that earlier actions of the position must have set."""
    also: int | None = None
    """A second flag to set: ``B`` does the work of ``W`` too, and ``I`` opens the way for it."""
    messages: tuple[Message, ...] = ()
    sets: tuple[int, ...] = ()
    """Bases of further marks that the action sets when it is done."""
    awaits: tuple[int, ...] = ()
    """Bases of further marks that it waits for first."""


class PositionTable:
    """The rules of one position: they follow from the plan's shape, whatever the steps.

    ``num_flags``: how many flags they speak of; ``makers``: by base of flags, the actions that set them, for
    microbatch 0; ``lanes``: the lanes on which the position sends, and on which it receives.
    """

    def __init__(self, marks: EventIds, position: int, *, rendezvous: bool) -> None:
        self.marks, self.position, self.rendezvous = marks, position, rendezvous
        self.plan = marks.plan
        self.num_flags = 0
        self.table: dict[RuleKey, Rule] = {}
        self.collectives: dict[tuple[Edge, Direction], Rule] = {}
        self.lanes: dict[tuple[Lane, bool], int] = {}
        self.makers: dict[int, tuple[Action, ...]] = {}
        self.stages = self.plan.stages_at[position]
        self.forwards = {stage: self._flags() for stage in self.stages}
        self.gradients = {stage: self._flags() for stage in self.stages}
        self.halves = {stage: self._flags() for stage in self.stages}  # I without its W, or both
        self.weights = {stage: self._flags() for stage in self.stages}
        for stage in self.stages:
            self.makers[self.forwards[stage]] = (Action(F, stage, 0),)
            self.makers[self.gradients[stage]] = (Action(B, stage, 0), Action(I, stage, 0))
            self.makers[self.halves[stage]] = (Action(I, stage, 0),)
        self.tied = {
            group.name: stages
            for group in self.plan.groups
            if (stages := [stage for stage in group.tied if stage in self.stages])
        }
        self._add_communication()
        for stage in self.stages:
            self._add_computes(stage)

    def _flags(self) -> int:
        self.num_flags += self.plan.num_microbatches
        return self.num_flags - self.plan.num_microbatches

    def _result(self, stage: int, direction: Direction) -> int:
        """The flags of what ``stage`` makes here."""
        return self.forwards[stage] if direction is FORWARD else self.gradients[stage]

    def _add_communication(self) -> None:
        for transfer in self.marks.transfers_at[self.position]:
            if transfer.edge in self.plan.collective_edges:
                self._add_collective(transfer)
                continue
            routes = self.marks.routes_of[transfer.edge, transfer.direction]
            sent = [route for route in routes if route.lane.source == self.position]
            received = [route for route in routes if route.lane.destination == self.position]
            if sent:
                self._add_messages(transfer, sent, sends=True)
            if received:
                self._add_messages(transfer, received, sends=False)

    def _add_messages(self, transfer: Transfer, routes: list[Route], *, sends: bool) -> None:
        """The rule of one end of the edge's messages, which may have several partners."""
        received, done = self.marks.received, self._flags()
        send, receive = _KINDS[transfer.direction]
        kind = send if sends else receive
        action = Action(kind, transfer.producer if sends else transfer.consumer, 0, transfer.edge)
        self.makers[done] = (action,)
        self.table[kind, transfer.edge.source, transfer.edge.destination] = Rule(
            action,
            done,
            needs=(self._result(transfer.producer, transfer.direction),) if sends else (),
            messages=tuple(
                Message(
                    self.lanes.setdefault((route.lane, sends), len(self.lanes)),
                    route.base,
                    route.base if sends else route.base + received,
                    route.base + received if sends else route.base,
                )
                for route in routes
            ),
        )

    def _add_collective(self, transfer: Transfer) -> None:
        """Members of the group take part even where they hold neither stage."""
        edge, direction = transfer.edge, transfer.direction
        action = Action(ActionKind.COLLECTIVE, transfer.producer, 0, edge, self.plan.collective_edges[edge])
        done = self._flags()
        needs = (self._result(transfer.producer, direction),) if self.position in transfer.sources else ()
        self.makers[done] = (action,)
        self.collectives[edge, direction] = Rule(action, done, needs)

    def _add_computes(self, stage: int) -> None:
        self._add_compute(F, stage, self.forwards[stage], None)
        if stage not in self.plan.forward_only:
            self._add_compute(B, stage, self.gradients[stage], self.weights[stage])
            self._add_compute(I, stage, self.gradients[stage], self.halves[stage])
            self.table[W, stage] = Rule(Action(W, stage, 0), self.weights[stage], needs=(self.halves[stage],))

    def _add_compute(self, kind: ActionKind, stage: int, done: int, also: int | None) -> None:
        direction = FORWARD if kind is F else BACKWARD
        needs: list[int] = []
        awaits: list[int] = []
        if direction is BACKWARD:
            needs.append(self.forwards[stage])
        for edge in self.plan.graph.stage_edges:
            if direction is FORWARD and edge.destination == stage:
                self._need_from(edge.source, edge, direction, needs, awaits)
            elif direction is BACKWARD and edge.source == stage and edge in self.plan.gradient_edges:
                self._need_from(edge.destination, edge, direction, needs, awaits)
        sets: tuple[int, ...] = ()
        if not self.plan.communicates:
            sets = (self.marks.made(self.position, stage, forward=direction is FORWARD),)
        self.table[kind, stage] = Rule(
            Action(kind, stage, 0), done, tuple(needs), also, sets=sets, awaits=tuple(awaits)
        )

    def _need_from(self, stage: int, edge: Edge, direction: Direction, needs: list[int], awaits: list[int]) -> None:
        """Add what a compute needs of ``stage`` along ``edge``: made here, received here, or awaited."""
        key, position = (edge, direction), self.position
        transfer = self.marks.transfers.get(key)
        if transfer is None:  # colocated: each position keeps what it makes
            needs.append(self._result(stage, direction))
            return
        if key in self.collectives:
            needs.append(self.collectives[key].done)
            return
        if position in transfer.sources:
            needs.append(self._result(stage, direction))
        others = [other for other in transfer.sources if other != position]
        if not self.plan.communicates:
            awaits += [self.marks.made(other, stage, forward=direction is FORWARD) for other in others]
        elif others:
            needs.append(self.table[_KINDS[direction][1], edge.source, edge.destination].done)
            if not self.rendezvous:
                awaits += [route.base for route in self.marks.routes_of[key] if route.lane.destination == position]
