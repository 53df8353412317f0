"""The messages that one position receives, in the order of its plan, and where they may arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple

from attrs import frozen

from pipegrid.core.edge import Direction
from pipegrid.core.fields import Index, checked_fields, instance, integer
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Action, ActionKind, Plan, actions_of
from pipegrid.plans.plan.dataflow import Dataflow, EdgeFlow


class ReceivedMessage(NamedTuple):
    """A message at the rank that receives it.

    Attributes:
        receive: its ``RECV_F`` or ``RECV_B``.
        sender: the position (with routes, the actor) that it comes from.

    Examples:
        >>> from pipegrid.plans import lower, one_f_one_b
        >>> str(plan_buffers(lower(one_f_one_b(2, 1))).positions[1].arrivals[0].message.receive)
        '1RECV_F0<0'
    """

    receive: Action
    sender: int


@frozen(field_transformer=checked_fields(PlanError))
class SlotArrival:
    """Where and when a message may arrive.

    Attributes:
        message: which one.
        posted: the step of the position in which its receive is posted, from when on it may be written; -1 is before
            the first.
        slot: the number of its slot on the position.
        nbytes: of the message; 0 where that is not known.

    Examples:
        >>> from pipegrid.plans import lower, one_f_one_b
        >>> plan_buffers(lower(one_f_one_b(2, 1)), nbytes=8).positions[1].arrivals[0].nbytes
        8
    """

    message: Annotated[ReceivedMessage, instance(ReceivedMessage, "a ReceivedMessage(receive, sender)")]
    posted: Annotated[int, integer(-1)]
    slot: Index
    nbytes: Index = 0


class Received(NamedTuple):
    """A message with its place: the ``step`` of its receive, and the flow and the piece of it."""

    message: ReceivedMessage
    step: int
    flow: EdgeFlow
    piece: int


def received_at(plan: Plan, flows: Dataflow, position: int) -> Iterator[Received]:
    """What the receives of ``position`` receive; several messages for a receive from a stage on several positions."""
    by_way: dict[tuple[object, Direction], list[EdgeFlow]] = {}
    for flow in flows.crossing:
        if position in flow.receivers:
            by_way.setdefault((flow.edge, flow.direction), []).append(flow)
    senders = {
        id(flow): [sender for sender, receiver in flow.routes if receiver == position]
        for found in by_way.values()
        for flow in found
    }
    for step, one in enumerate(plan.positions[position]):
        for action in actions_of(one):
            if not action.kind.is_receive or action.direction is None:
                continue
            piece = plan.piece_of(action)
            for flow in by_way.get((action.edge, action.direction), ()):
                if piece in flow.pieces:
                    yield from (
                        Received(ReceivedMessage(action, each), step, flow, piece) for each in senders[id(flow)]
                    )


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
