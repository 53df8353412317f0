"""One tensor per message over a bridge: activations one way, the gradient of the oldest one back.

A source announces the shape of its tensor, and the plans of both directions follow from it. Where shapes are fixed that
is once; a message after the first has as much to do as a message of its lane.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from pipegrid.bridges.bridge.pending import PendingGradients, PendingReceive
from pipegrid.bridges.bridge.receive import BridgeSend, Landed, PostedReceives
from pipegrid.bridges.bridge.shape_exchange import Announcement, PlanPair, ShapeExchange
from pipegrid.bridges.bridge.structure import Packed, kind_of
from pipegrid.bridges.bridge.traffic import EdgeTraffic
from pipegrid.bridges.errors import BridgeError, CompletionError, ShapeError
from pipegrid.bridges.reshard import RankPart
from pipegrid.bridges.steps import broadcast_text
from pipegrid.topology.fields import Index, checked
from pipegrid.transport.edge import Direction
from pipegrid.transport.messages.handle import Transfer
from pipegrid.transport.protocol import Handle, ReceiveHandle

_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD


@frozen
class _Agreed:
    """The agreed shape of activations without samples, its plans, and the ranks that receive a part."""

    shape: torch.Size
    plans: PlanPair
    peers: Iterable[int] | None


class TensorExchange:
    """The tensors of one edge on a rank of its boundary.

    Args:
        shapes: the plans of shapes.
        traffic: of the edge.
        backward: whether gradients come back.
        variable: whether shapes may change from message to message.
        comm_dtype: on the wire; None is the tensor's own.
        skips_empty: lanes that carry nothing are left out from the second activation on: sizes are fixed by then. Only
            where a strategy leaves lanes unused; otherwise a message without bytes, for a tensor with fewer elements
            than ranks, costs less than waiting for the first one before a second receive is posted.
    """

    def __init__(
        self,
        shapes: ShapeExchange,
        traffic: EdgeTraffic,
        *,
        backward: bool,
        variable: bool,
        comm_dtype: torch.dtype | None,
        skips_empty: bool,
    ) -> None:
        self.name, self.rank, self.backward, self.variable = traffic.name, traffic.wiring.rank, backward, variable
        self._shapes, self._wiring, self._traffic = shapes, traffic.wiring, traffic
        self._comm_dtype, self._skips_empty = comm_dtype, skips_empty
        self.forget()

    def forget(self) -> None:
        """Forget what was agreed: the next message announces anew."""
        self._announced: Announcement | None = None
        self._sending: _Agreed | None = None
        self._arriving: PlanPair | None = None
        self._sent: PendingGradients[PlanPair] = PendingGradients(
            f"{self.name}: recv_backward on rank {self.rank}", "activation that was sent", self.variable
        )
        self._received: PendingGradients[PendingReceive[PlanPair]] = PendingGradients(
            f"{self.name}: send_backward on rank {self.rank}", "activation that was received", self.variable
        )

    # -- activations -------------------------------------------------------------------------------------------

    def isend_forward(self, tensor: Any, *, samples: Sequence[int] | None = None) -> Handle:
        """See `BridgeCommunicator.isend_forward`."""
        agreed = self._sending
        if (
            agreed is not None
            and samples is None
            and isinstance(tensor, torch.Tensor)
            and tensor.shape == agreed.shape
            and tensor.dtype is agreed.plans.dtype
            and (self.backward or not tensor.requires_grad)
        ):
            plans = agreed.plans
            given = tensor.detach() if tensor.requires_grad else tensor
            return _one(
                self._traffic.send(plans.forward_part, given, _FORWARD, dtype=plans.wire_dtype, peers=agreed.peers)
            )
        if isinstance(tensor, Packed):
            tensor, samples = tensor.tensor, tensor.samples
        announced = self._announcement(tensor, samples)
        if self.variable or self._announced is None:
            self._traffic.compare_announced(announced.encode(), announced)
        plans = self._shapes.own_plans(announced)
        # Every rank that may get something must hear of the sizes; gradients need no such message.
        sending = self._traffic.send(
            plans.forward_part, tensor.detach(), _FORWARD, dtype=plans.wire_dtype, note=announced.encode()
        )
        # Only now: after a lane's error nothing was sent, and no gradient of it will come.
        self._announced = announced
        if not self.variable and samples is None:
            self._sending = _Agreed(tensor.shape, plans, plans.forward_part.sends if self._skips_empty else None)
        self._sent.add(plans, has_gradient=self.backward and torch.is_grad_enabled())
        return _one(sending)

    def _announcement(self, tensor: Any, samples: Sequence[int] | None) -> Announcement:
        """The announcement of this rank's tensor."""
        if not isinstance(tensor, torch.Tensor):
            raise ShapeError(
                f"{self.name} carries one tensor, got {type(tensor).__name__}; declare several with payload={{...}}, "
                "and send a tensor without rows where there is nothing to send"
            )
        if self._comm_dtype is not None and not tensor.is_floating_point():
            raise ShapeError(f"{self.name} travels as {self._comm_dtype}, which rounds {tensor.dtype} values")
        if tensor.requires_grad and not self.backward:
            raise BridgeError(f"{self.name} was declared without backward, but the tensor requires grad; detach it")
        announced = Announcement.of(tensor, samples)
        if self._announced is not None and not self.variable and announced != self._announced:
            raise ShapeError(
                f"{self.name}: rank {self.rank} sends {announced}, but {self._announced} was agreed with the first "
                "message; sizes that change need shapes='variable', or renew_shapes()"
            )
        return announced

    def irecv_forward(self, shape: Sequence[int] | None = None) -> ReceiveHandle:
        """See `BridgeCommunicator.irecv_forward`."""
        expected = _expected(shape)
        if self._arriving is not None:
            whole = self._receive_whole(self._arriving, self._arriving.forward_part, _FORWARD, expected)
            if whole is not None:
                return whole
        is_first = self._received.first is None
        incoming: PendingReceive[PlanPair] = PendingReceive()

        def peers() -> Iterable[int] | None:
            if is_first:
                return self._wiring.senders(_FORWARD)
            return None if self._arriving is None else self._arriving.forward_part.receives

        def land(handles: PostedReceives) -> Landed:
            plans = incoming.plans = self._plans_of({peer: _note(handle) for peer, handle in handles.items()})
            return self._landed(plans, plans.forward_part, handles, _FORWARD, expected)

        incoming.receive = receive = self._traffic.receive(
            _FORWARD,
            land,
            peers=peers if self._skips_empty else None,
            requires_grad=self.backward,
            blocks=None if self._wiring.sizes_from is None else self._waits_for_leader,
        )
        self._received.add(incoming, has_gradient=self.backward and torch.is_grad_enabled())
        return receive

    def _plans_of(self, notes: Mapping[int, str]) -> PlanPair:
        """The plans for the source ranks' announcements; a copy without a lane gets these from the leader."""
        if self._arriving is not None:
            return self._arriving
        leader = self._wiring.sizes_from
        if leader is not None:
            notes = self._notes_of_leader(leader, notes)
        plans = self._shapes.plans({rank: Announcement.decode(text) for rank, text in notes.items()})
        if not self.variable:
            # In place of the first receive, which would keep its tensor for as long as the bridge lives.
            self._arriving, self._received.first = plans, PendingReceive(plans)
        return plans

    def _notes_of_leader(self, leader: int, notes: Mapping[int, str]) -> dict[int, str]:
        copies, traffic = self._wiring.copies(_FORWARD), self._traffic
        group = traffic.groups[self._wiring.completion_group(copies, _FORWARD)]
        try:
            text = broadcast_text(
                json.dumps(sorted(notes.items())),
                leader,
                group,
                traffic.device,
                lambda work: traffic.waits.wait(work, copies, group, host=True),
            )
        except RuntimeError as error:
            raise CompletionError(
                f"rank {self.rank}, {self.name}: rank {leader} did not pass on the source's sizes before the "
                f"deadline ({error})"
            ) from error
        return dict(json.loads(text))

    def _waits_for_leader(self) -> bool:
        """Whether `_plans_of` still has to talk to the copies of this rank, and so may block."""
        return self._arriving is None and self._wiring.sizes_from is not None

    # -- gradients ---------------------------------------------------------------------------------------------

    def isend_backward(self, grad: Any) -> Handle:
        """See `BridgeCommunicator.isend_backward`."""
        oldest = self._received.oldest
        plans = oldest.plans or oldest.wait()
        given = plans.backward_part.source_shape
        if grad is None:
            grad = torch.zeros(given, dtype=plans.dtype, device=self._traffic.device)
        if not isinstance(grad, torch.Tensor) or grad.shape != given or grad.dtype is not plans.dtype:
            raise ShapeError(
                f"{self.name}: the gradient is {kind_of(grad)}, its activation was of shape {given} of {plans.dtype}"
            )
        whole = grad.detach() if grad.requires_grad else grad
        sending = self._traffic.send(
            plans.backward_part, whole, _BACKWARD, dtype=plans.wire_dtype, peers=plans.backward_part.sends
        )
        self._received.answer()  # only now: after an error the same activation still waits
        return _one(sending)

    def irecv_backward(self, shape: Sequence[int] | None = None) -> ReceiveHandle:
        """See `BridgeCommunicator.irecv_backward`."""
        plans = self._sent.oldest
        expected = _expected(shape)
        receive = self._receive_whole(plans, plans.backward_part, _BACKWARD, expected)
        if receive is None:
            receive = self._traffic.receive(
                _BACKWARD,
                lambda handles: self._landed(plans, plans.backward_part, handles, _BACKWARD, expected),
                peers=lambda: plans.backward_part.receives,
                requires_grad=False,
            )
        self._sent.answer()
        return receive

    # -- both --------------------------------------------------------------------------------------------------

    def _receive_whole(
        self, plans: PlanPair, part: RankPart, direction: Direction, expected: tuple[int, ...] | None
    ) -> ReceiveHandle | None:
        """A receive that is its lane's alone, where the sizes are known; None where there is more to do."""
        if plans.wire_dtype is not plans.dtype or expected not in {None, part.destination_shape}:
            return None
        requires_grad = direction is _FORWARD and self.backward
        return self._traffic.receive_whole(part, direction, requires_grad=requires_grad)

    def _landed(
        self,
        plans: PlanPair,
        part: RankPart,
        handles: PostedReceives,
        direction: Direction,
        expected: tuple[int, ...] | None,
    ) -> Landed:
        if expected not in {None, part.destination_shape}:
            raise ShapeError(
                f"{self.name}: rank {self.rank} expects shape {expected}, but {part.destination_shape} comes"
            )
        tensor, completing = self._traffic.fill(
            part, handles, direction, dtype=plans.dtype, wire_dtype=plans.wire_dtype
        )
        return [tensor], completing


def _one(sending: Sequence[Transfer]) -> Handle:
    return sending[0] if len(sending) == 1 else BridgeSend(sending)


def _expected(shape: Sequence[int] | None) -> tuple[int, ...] | None:
    if shape is None:
        return None
    expected: tuple[int, ...] = checked(shape, tuple[Index, ...], "the expected shape", ShapeError)
    return expected


def _note(handle: Any) -> str:
    note: str = handle.note
    return note
