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
from pipegrid.bridges.bridge.shape_exchange import Announcement, Passage, ShapeExchange
from pipegrid.bridges.bridge.structure import Packed, kind_of
from pipegrid.bridges.bridge.traffic import EdgeTraffic
from pipegrid.bridges.errors import CompletionError, NoBackwardError, ShapeError
from pipegrid.bridges.reshard import RankPart
from pipegrid.bridges.steps import broadcast_text
from pipegrid.topology.fields import Index, checked
from pipegrid.transport.edge import Direction
from pipegrid.transport.handle import Transfer
from pipegrid.transport.protocol import Handle, ReceiveHandle

_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD


@frozen
class _Agreed:
    """The agreed shape of activations without samples, its plans, and the ranks that receive a part."""

    shape: torch.Size
    passage: Passage
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
        self._arriving: Passage | None = None
        self._sent: PendingGradients[Passage] = PendingGradients(
            f"{self.name}: recv_backward on rank {self.rank}", "activation that was sent", self.variable
        )
        self._received: PendingGradients[PendingReceive[Passage]] = PendingGradients(
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
            and tensor.dtype is agreed.passage.dtype
            and (self.backward or not tensor.requires_grad)
        ):
            known = agreed.passage
            given = tensor.detach() if tensor.requires_grad else tensor
            return _one(self._traffic.send(known.there, given, _FORWARD, dtype=known.wire_dtype, peers=agreed.peers))
        if isinstance(tensor, Packed):
            tensor, samples = tensor.tensor, tensor.samples
        announced = self._announcement(tensor, samples)
        known = self._shapes.own_passage(announced)
        # Every rank that may get something must hear of the sizes; gradients need no such message.
        sending = self._traffic.send(
            known.there, tensor.detach(), _FORWARD, dtype=known.wire_dtype, note=announced.encode()
        )
        # Only now: after a lane's error nothing was sent, and no gradient of it will come.
        self._announced = announced
        if not self.variable and samples is None:
            self._sending = _Agreed(tensor.shape, known, known.there.sends if self._skips_empty else None)
        self._sent.add(known, has_gradient=self.backward and torch.is_grad_enabled())
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
            raise NoBackwardError(f"{self.name} was declared without backward, but the tensor requires grad; detach it")
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
            whole = self._receive_whole(self._arriving, self._arriving.there, _FORWARD, expected)
            if whole is not None:
                return whole
        is_first = self._received.first is None
        incoming: PendingReceive[Passage] = PendingReceive()

        def peers() -> Iterable[int] | None:
            if is_first or not self._skips_empty:
                return self._wiring.senders
            return None if self._arriving is None else self._arriving.there.receives

        def land(handles: PostedReceives) -> Landed:
            known = incoming.told = self._passage({peer: _note(handle) for peer, handle in handles.items()})
            return self._landed(known, known.there, handles, _FORWARD, expected)

        incoming.receive = receive = self._traffic.receive(
            _FORWARD,
            land,
            peers=peers,
            requires_grad=self.backward,
            blocks=None if self._wiring.teller is None else self._asks_its_leader,
        )
        self._received.add(incoming, has_gradient=self.backward and torch.is_grad_enabled())
        return receive

    def _passage(self, notes: Mapping[int, str]) -> Passage:
        """The plans for the source ranks' announcements; a copy without a lane gets these from its leader."""
        if self._arriving is not None:
            return self._arriving
        teller = self._wiring.teller
        if teller is not None:
            notes = self._told(teller, notes)
        known = self._shapes.passage({rank: Announcement.decode(text) for rank, text in notes.items()})
        if not self.variable:
            # In place of the first receive, which would keep its tensor for as long as the bridge lives.
            self._arriving, self._received.first = known, PendingReceive(known)
        return known

    def _told(self, teller: int, notes: Mapping[int, str]) -> dict[int, str]:
        copies, traffic = self._wiring.copies(_FORWARD), self._traffic
        group = traffic.groups[self._wiring.completion_group(copies, _FORWARD)]
        try:
            text = broadcast_text(
                json.dumps(sorted(notes.items())),
                teller,
                group,
                traffic.device,
                lambda work: traffic.waits.wait(work, copies, host=True),
            )
        except RuntimeError as error:
            raise CompletionError(
                f"rank {self.rank}, {self.name}: rank {teller} did not pass on the source's sizes before the "
                f"deadline ({error})"
            ) from error
        return dict(json.loads(text))

    def _asks_its_leader(self) -> bool:
        """Whether `_passage` still has to talk to the copies of this rank, and so may block."""
        return self._arriving is None and self._wiring.teller is not None

    # -- gradients ---------------------------------------------------------------------------------------------

    def isend_backward(self, grad: Any) -> Handle:
        """See `BridgeCommunicator.isend_backward`."""
        oldest = self._received.oldest
        known = oldest.told or oldest.wait()
        given = known.back.given
        if grad is None:
            grad = torch.zeros(given, dtype=known.dtype, device=self._traffic.device)
        if not isinstance(grad, torch.Tensor) or grad.shape != given or grad.dtype is not known.dtype:
            raise ShapeError(
                f"{self.name}: the gradient is {kind_of(grad)}, its activation was of shape {given} of {known.dtype}"
            )
        whole = grad.detach() if grad.requires_grad else grad
        sending = self._traffic.send(known.back, whole, _BACKWARD, dtype=known.wire_dtype, peers=known.back.sends)
        self._received.answer()  # only now: after an error the same activation still waits
        return _one(sending)

    def irecv_backward(self, shape: Sequence[int] | None = None) -> ReceiveHandle:
        """See `BridgeCommunicator.irecv_backward`."""
        known = self._sent.oldest
        expected = _expected(shape)
        receive = self._receive_whole(known, known.back, _BACKWARD, expected)
        if receive is None:
            receive = self._traffic.receive(
                _BACKWARD,
                lambda handles: self._landed(known, known.back, handles, _BACKWARD, expected),
                peers=lambda: known.back.receives,
                requires_grad=False,
            )
        self._sent.answer()
        return receive

    # -- both --------------------------------------------------------------------------------------------------

    def _receive_whole(
        self, known: Passage, part: RankPart, direction: Direction, expected: tuple[int, ...] | None
    ) -> ReceiveHandle | None:
        """A receive that is its lane's alone, where the sizes are known; None where there is more to do."""
        if known.wire_dtype is not known.dtype or expected not in {None, part.taken}:
            return None
        requires_grad = direction is _FORWARD and self.backward
        return self._traffic.receive_whole(part, direction, requires_grad=requires_grad)

    def _landed(
        self,
        known: Passage,
        part: RankPart,
        handles: PostedReceives,
        direction: Direction,
        expected: tuple[int, ...] | None,
    ) -> Landed:
        if expected not in {None, part.taken}:
            raise ShapeError(f"{self.name}: rank {self.rank} expects shape {expected}, but {part.taken} comes")
        tensor, completing = self._traffic.fill(
            part, handles, direction, dtype=known.dtype, wire_dtype=known.wire_dtype
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
