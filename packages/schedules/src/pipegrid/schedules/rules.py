"""What each action needs, sets and waits for at one position, looked up once for all microbatches."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from attrs import Factory, define

from pipegrid.schedules.actions import ActionKind
from pipegrid.schedules.dependencies import Transfer
from pipegrid.schedules.marks import Marks
from pipegrid.schedules.plan import Lane
from pipegrid.transport.edge import Direction, Edge

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD

_KINDS = {
    FORWARD: (ActionKind.SEND_F, ActionKind.RECV_F),
    BACKWARD: (ActionKind.SEND_B, ActionKind.RECV_B),
}

Name: TypeAlias = tuple[str, ...]
"""Templates of the tokens that would do, with ``{}`` for the microbatch."""

RuleKey: TypeAlias = tuple[ActionKind, int] | tuple[ActionKind, int, int]
"""Kind and stage of a compute; kind, source and destination of an action along an edge."""


class Message(NamedTuple):
    """One message of an action, whatever the microbatch: each number is a base to add it to."""

    order: list[int]
    """Where the lane notes the messages of this end in order."""
    number: int
    """The message: the mark of its send."""
    sets: int
    awaits: int


class Rule(NamedTuple):
    """What holds for one kind of action at one position; flags are indexed by microbatch."""

    done: bytearray
    """Set by the action; whoever finds it set is a duplicate."""
    needs: tuple[bytearray, ...]
    """Flags that earlier actions of the position must have set."""
    also: bytearray | None
    """A second flag to set: ``B`` does the work of ``W`` too, and ``I`` opens the way for it."""
    messages: tuple[Message, ...]
    sets: tuple[int, ...]
    """Bases of further marks that the action sets when it is done."""
    awaits: tuple[int, ...]
    """Bases of further marks that it waits for first."""
    name: Name
    need_names: tuple[Name, ...]


@define
class Traffic:
    """Per lane, the messages in the order in which the sender, and the receiver, has them."""

    sent: dict[Lane, list[int]] = Factory(dict)
    received: dict[Lane, list[int]] = Factory(dict)


class Rules:
    """The rules of one position, and the flags behind them."""

    def __init__(self, marks: Marks, traffic: Traffic, position: int, *, rendezvous: bool) -> None:
        self._marks, self._traffic, self._position = marks, traffic, position
        self._plan = marks.plan
        self._rendezvous = rendezvous
        self.table: dict[RuleKey, Rule] = {}
        self.collectives: dict[tuple[Edge, Direction], Rule] = {}
        held = self._plan.stages_at[position]
        self.forwards = {stage: self._flags() for stage in held}
        self.gradients = {stage: self._flags() for stage in held}
        self.halves = {stage: self._flags() for stage in held}  # I without its W, or both
        self.weights = {stage: self._flags() for stage in held}
        self.reduced: set[str] = set()  # names of groups, and numbers of stages reduced without one
        self.tied = {
            group.name: stages
            for group in self._plan.groups
            if self._plan.communicates and (stages := [stage for stage in group.tied if stage in held])
        }
        self._add_communication()
        for stage in held:
            self._add_computes(stage)

    def _flags(self) -> bytearray:
        return bytearray(self._plan.num_microbatches)

    def _result(self, stage: int, direction: Direction) -> tuple[bytearray, Name]:
        """The flags of what ``stage`` makes here, and the actions that make it."""
        if direction is FORWARD:
            return self.forwards[stage], (f"{stage}F{{}}",)
        return self.gradients[stage], (f"{stage}B{{}}", f"{stage}I{{}}")

    def _add_communication(self) -> None:
        plan, position = self._plan, self._position
        if not plan.communicates:
            return
        for key, transfer in self._marks.transfers.items():
            edge, direction = key
            if edge in plan.collective_edges:
                if position in {*transfer.sources, *transfer.destinations} or self._in_group_of(edge):
                    self._add_collective(edge, direction)
                continue
            send, receive = _KINDS[direction]
            if position in transfer.senders:
                self._add_messages(send, transfer, self._flags())
            if position in transfer.receivers:
                self._add_messages(receive, transfer, self._flags())

    def _add_messages(self, kind: ActionKind, transfer: Transfer, done: bytearray) -> None:
        """The rule of one end of the edge's messages, which may have several partners."""
        edge, direction, position = transfer.edge, transfer.direction, self._position
        if kind.is_send:
            noted, ways = self._traffic.sent, [(position, other) for other in transfer.destinations]
            name = f"{transfer.producer}{kind.value}{{}}>{transfer.consumer}"
            need, makers = self._result(transfer.producer, direction)
        else:
            noted, ways = self._traffic.received, [(other, position) for other in transfer.sources]
            name = f"{transfer.consumer}{kind.value}{{}}<{transfer.producer}"
        ways = [way for way in ways if way != (position, position)]
        bases = [self._marks.sent(transfer, sender, receiver) for sender, receiver in ways]
        self.table[kind, edge.source, edge.destination] = Rule(
            done=done,
            needs=(need,) if kind.is_send else (),
            also=None,
            messages=tuple(
                Message(
                    noted.setdefault(Lane(sender, receiver, direction), []),
                    base,
                    base if kind.is_send else base + self._marks.received,
                    base + self._marks.received if kind.is_send else base,
                )
                for (sender, receiver), base in zip(ways, bases, strict=True)
            ),
            sets=(),
            awaits=(),
            name=(name,),
            need_names=(makers,) if kind.is_send else (),
        )

    def _in_group_of(self, edge: Edge) -> bool:
        name = self._plan.collective_edges[edge]
        return any(group.name == name and self._position in group.positions for group in self._plan.groups)

    def _add_collective(self, edge: Edge, direction: Direction) -> None:
        """Members of the group take part even where they hold neither stage."""
        transfer = self._marks.transfers[edge, direction]
        here = self._position in transfer.sources
        flags, makers = self._result(transfer.producer, direction) if here else (bytearray(), ())
        group = self._plan.collective_edges[edge]
        self.collectives[edge, direction] = Rule(
            done=self._flags(),
            needs=(flags,) if here else (),
            also=None,
            messages=(),
            sets=(),
            awaits=(),
            name=(f"{transfer.producer}COLLECTIVE{{}}>{transfer.consumer}@{group}",),
            need_names=(makers,) if here else (),
        )

    def _add_computes(self, stage: int) -> None:
        forward_only = stage in self._plan.forward_only
        self._add_compute(F, stage, self.forwards[stage], None)
        if not forward_only:
            self._add_compute(B, stage, self.gradients[stage], self.weights[stage])
            self._add_compute(I, stage, self.gradients[stage], self.halves[stage])
            self.table[W, stage] = Rule(
                done=self.weights[stage],
                needs=(self.halves[stage],),
                also=None,
                messages=(),
                sets=(),
                awaits=(),
                name=(f"{stage}W{{}}",),
                need_names=((f"{stage}I{{}}",),),
            )

    def _add_compute(self, kind: ActionKind, stage: int, done: bytearray, also: bytearray | None) -> None:
        direction = FORWARD if kind is F else BACKWARD
        needs: list[tuple[bytearray, Name]] = []
        awaits: list[int] = []
        if direction is BACKWARD:
            needs.append(self._result(stage, FORWARD))
        for edge in self._plan.graph.stage_edges:
            if direction is FORWARD and edge.destination == stage:
                self._need_from(edge.source, edge, direction, needs, awaits)
            elif direction is BACKWARD and edge.source == stage and edge in self._plan.gradient_edges:
                self._need_from(edge.destination, edge, direction, needs, awaits)
        sets: tuple[int, ...] = ()
        if not self._plan.communicates:
            sets = (self._marks.made(self._position, stage, forward=direction is FORWARD),)
        self.table[kind, stage] = Rule(
            done=done,
            needs=tuple(flags for flags, _ in needs),
            also=also,
            messages=(),
            sets=sets,
            awaits=tuple(awaits),
            name=(f"{stage}{kind.value}{{}}",),
            need_names=tuple(name for _, name in needs),
        )

    def _need_from(
        self,
        stage: int,
        edge: Edge,
        direction: Direction,
        needs: list[tuple[bytearray, Name]],
        awaits: list[int],
    ) -> None:
        """Add what a compute needs of ``stage`` along ``edge``: made here, received here, or awaited."""
        position = self._position
        transfer = self._marks.transfers.get((edge, direction))
        if transfer is None:  # colocated: each position keeps what it makes
            needs.append(self._result(stage, direction))
            return
        if (edge, direction) in self.collectives:
            rule = self.collectives[edge, direction]
            needs.append((rule.done, rule.name))
            return
        if position in transfer.sources:
            needs.append(self._result(stage, direction))
        others = [other for other in transfer.sources if other != position]
        if not self._plan.communicates:
            awaits += [self._marks.made(other, stage, forward=direction is FORWARD) for other in others]
        elif others:
            receive = self.table[_KINDS[direction][1], edge.source, edge.destination]
            needs.append((receive.done, receive.name))
            if not self._rendezvous:
                awaits += [self._marks.sent(transfer, other, position) for other in others]
