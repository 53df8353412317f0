"""What one position has in buffers, in the order of its plan: messages received and sent, copies, what is offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, TypeAlias

from attrs import frozen

from pipegrid.core.edge import Direction
from pipegrid.core.fields import Index, checked_fields, instance, integer
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Action, ActionKind, Plan, actions_of
from pipegrid.plans.plan.actions import for_piece
from pipegrid.plans.plan.dataflow import Dataflow, EdgeFlow

BufferKind: TypeAlias = Literal["receives", "copies", "sends", "offload"]
"""What takes slots: messages that come, copies of local values, messages that leave, activations on the host."""


class Buffered(NamedTuple):
    """A message at one of its ends, or another thing that has a buffer.

    Attributes:
        action: ``RECV_F``, ``RECV_B``, ``SEND_F`` or ``SEND_B`` of a message; ``OFFLOAD`` of activations; of a copy of
            a value that stays on its position, the ``RECV_F`` that it would have elsewhere.
        peer: the position (with routes, the actor) at the other end; the position itself of a copy or an ``OFFLOAD``.

    Examples:
        >>> from pipegrid.plans import lower, one_f_one_b
        >>> str(plan_buffers(lower(one_f_one_b(2, 1))).positions[1].arrivals[0].message.action)
        '1RECV_F0<0'
    """

    action: Action
    peer: int

    @property
    def on_host(self) -> bool:
        """Whether the buffer is in the memory of the host."""
        return self.action.kind is ActionKind.OFFLOAD


@frozen(field_transformer=checked_fields(PlanError))
class SlotArrival:
    """Where and when a message, or another buffered thing, comes into memory.

    Attributes:
        message: which one.
        posted: the step of the position from which on it may be written, in which a receive is posted, a send or an
            offload starts; -1 is before the first.
        slot: the number of its slot on the position.
        nbytes: of the message; 0 where that is not known.

    Examples:
        >>> from pipegrid.plans import lower, one_f_one_b
        >>> plan_buffers(lower(one_f_one_b(2, 1)), nbytes=8).positions[1].arrivals[0].nbytes
        8
    """

    message: Annotated[Buffered, instance(Buffered, "a Buffered(action, peer)")]
    posted: Annotated[int, integer(-1)]
    slot: Index
    nbytes: Index = 0


class Placed(NamedTuple):
    """A buffered thing with its place: the ``step`` that first has it, and the flow and the piece of a message."""

    message: Buffered
    step: int
    flow: EdgeFlow
    piece: int


def received_at(plan: Plan, flows: Dataflow, position: int) -> Iterator[Placed]:
    """What the receives of ``position`` receive; several messages for a receive from a stage on several positions."""
    return _messages(plan, flows, position, sent=False)


def sent_at(plan: Plan, flows: Dataflow, position: int) -> Iterator[Placed]:
    """What the sends of ``position`` send; several messages for a send to a stage on several positions."""
    return _messages(plan, flows, position, sent=True)


def _messages(plan: Plan, flows: Dataflow, position: int, *, sent: bool) -> Iterator[Placed]:
    by_way: dict[tuple[object, Direction], list[tuple[EdgeFlow, list[int]]]] = {}
    for flow in flows.between_positions:
        ends = [route if sent else route[::-1] for route in flow.routes]
        if peers := [peer for here, peer in ends if here == position]:
            by_way.setdefault((flow.edge, flow.direction), []).append((flow, peers))
    for step, one in enumerate(plan.positions[position]):
        for action in actions_of(one):
            if action.direction is None or not (action.kind.is_send if sent else action.kind.is_receive):
                continue
            piece = plan.piece_of(action)
            for flow, peers in by_way.get((action.edge, action.direction), ()):
                if piece in flow.pieces:
                    yield from (Placed(Buffered(action, peer), step, flow, piece) for peer in peers)


def copies_at(plan: Plan, flows: Dataflow, position: int) -> Iterator[Placed]:
    """What stages of ``position`` without a backward give to later stages there, which keep it for theirs.

    (What a trained stage gives to its own position is part of its activations, which it keeps for longer.)
    """
    for step, one in enumerate(plan.positions[position]):
        for action in actions_of(one):
            if action.kind is not ActionKind.F or action.stage not in plan.forward_only:
                continue
            for flow, piece in flows.leaving(action.stage, Direction.FORWARD, plan.piece_of(action)):
                if flow.group is None and (position, position) in flow.links:
                    taken = for_piece(Action(ActionKind.RECV_F, flow.consumer, 0, flow.edge), piece, plan.num_slices)
                    yield Placed(Buffered(taken, position), step, flow, piece)


def outputs_taken(plan: Plan, flows: Dataflow, position: int, action: Action) -> Iterator[tuple[int, int]]:
    """The stages here, each with the microbatch, that make or give an output in ``action``.

    A forward makes its own and takes those of the stages of this position that feed it; a send takes one.
    """
    if action.microbatch is None:
        return
    if action.kind is ActionKind.F:
        yield action.stage, action.microbatch
        for flow, piece in flows.arriving(action.stage, Direction.FORWARD, plan.piece_of(action)):
            if flow.group is None and (position, position) in flow.links:
                yield from ((flow.producer, made // plan.num_slices) for made in flow.makers(piece, position))
    elif action.edge is not None and action.direction is Direction.FORWARD and not action.kind.is_receive:
        yield action.edge.source, action.microbatch
