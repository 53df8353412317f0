"""The traffic of one edge on a rank of its boundary: activations one way, the gradients of the oldest one back.

A source announces the shape of each leaf, and the plans of both directions follow from it. All leaves of a microbatch
travel in one message per lane. Where shapes are fixed the first message alone announces; an edge of one tensor then has
as much to do for a message as its lane.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from attrs import define, field, frozen

from pipegrid.bridges.bridge.leaves import LeafTransfer, Leaves, Microbatch, peers_of, tensor_of
from pipegrid.bridges.bridge.plans import LeafNote, decode, encode
from pipegrid.bridges.bridge.receive import BridgeReceive, BridgeSend, Filled, PostedReceives, with_gradient
from pipegrid.bridges.bridge.traffic import EdgeTraffic
from pipegrid.bridges.steps import Completing
from pipegrid.core.edge import Direction
from pipegrid.reshard import SPLIT_SIZES, BridgeError, RankPart, ShapeError
from pipegrid.transport.messages.handle import Transfer
from pipegrid.transport.protocol import Handle, ReceiveHandle

_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD
Sent = TypeVar("Sent")


@define(eq=False)
class PendingGradients(Generic[Sent]):
    """Activations that were sent, or received, and whose gradients are still due.

    Attributes:
        call: the edge, verb and rank that answer them, for errors.
        what: the name of the pending object, for errors, such as ``"activation that was sent"``.
        variable: whether activations differ. Where they do not, a gradient belongs to any of them: to ``first``.
    """

    call: str
    what: str
    variable: bool
    first: Sent | None = field(default=None, init=False)
    _waiting: deque[Sent] = field(factory=deque, init=False)

    def add(self, activation: Sent, *, has_gradient: bool) -> None:
        """Add an activation; ``has_gradient``: its gradient will follow."""
        if self.first is None and not self.variable:
            self.first = activation
        if self.variable and has_gradient:
            self._waiting.append(activation)

    @property
    def oldest(self) -> Sent:
        """The activation that the next gradient belongs to; `BridgeError` where no gradient is due."""
        found = self._waiting[0] if self._waiting else self.first
        if found is None:
            raise BridgeError(f"{self.call}: no {self.what} waits for its gradient")
        return found

    def answer(self) -> None:
        """Remove the oldest activation: the send, or the receive, of its gradient has started."""
        if self.variable:
            self._waiting.popleft()


@define(eq=False)
class Arrival:
    """A microbatch that is being received: ``leaves`` is None until its messages, which announce it, are there."""

    leaves: Microbatch | None = None
    receive: BridgeReceive | None = None

    def wait(self) -> Microbatch:
        """The leaves; waits for the messages."""
        if self.leaves is None:
            assert self.receive is not None
            self.receive.wait_filled()
        assert self.leaves is not None
        return self.leaves


@frozen
class _Steady:
    """The values that later messages reuse, on an edge of one tensor of fixed shape, in one direction.

    Attributes:
        shape, dtype: of the tensor.
        view: the shape with which it travels; None is its own.
        part: this rank's in the plan.
        wire_dtype: of the message.
        peers: the ranks that get a message; None is every rank with a lane.
    """

    shape: torch.Size
    dtype: torch.dtype
    view: tuple[int, ...] | None
    part: RankPart
    wire_dtype: torch.dtype
    peers: Iterable[int] | None

    @classmethod
    def of(cls, tensor: torch.Tensor, leaf: LeafTransfer, direction: Direction, *, every: bool) -> _Steady | None:
        """The values for messages like ``tensor`` (``every``: to every rank with a lane); None where none travels."""
        part = leaf.part(direction)
        if part is None or leaf.plans is None:
            return None
        view = None if tensor.shape == part.source_shape else part.source_shape
        return cls(tensor.shape, tensor.dtype, view, part, leaf.plans.wire_dtype, None if every else part.sends)


class Exchange:
    """The microbatches of one edge on a rank of its boundary.

    Args:
        variable: whether shapes and numbers may change from message to message.
        skips_empty: lanes that carry nothing are left out from the second activation on: sizes are fixed by then. Only
            where a strategy leaves lanes unused; otherwise a message without bytes, for a tensor with fewer elements
            than ranks, costs less than waiting for the first one before a second receive is posted.
        tied: whether gradients return on this edge, each for an earlier activation. If not, this exchange carries one
            direction, and the other direction, if there is one, has an exchange of its own.
    """

    def __init__(
        self, traffic: EdgeTraffic, leaves: Leaves, *, variable: bool, skips_empty: bool = False, tied: bool = True
    ) -> None:
        self.name, self.rank, self.backward, self.variable = leaves.name, leaves.rank, leaves.backward, variable
        self._tied = tied and self.backward
        self.traffic, self._wiring, self._leaves = traffic, traffic.wiring, leaves
        self._is_tensor, self._skips_empty = leaves.structure.is_tensor, skips_empty
        self.forget()

    def forget(self) -> None:
        """Forget what was agreed: the next message announces anew."""
        self._announced: list[LeafNote] | None = None
        self._steady: _Steady | None = None
        self._steady_gradient: _Steady | None = None
        self._arriving: Microbatch | None = None
        what = "activation" if self._is_tensor else "payload"
        self._sent: PendingGradients[Microbatch] = PendingGradients(
            f"{self.name}: recv_backward on rank {self.rank}", f"{what} that was sent", self.variable
        )
        self._received: PendingGradients[Arrival] = PendingGradients(
            f"{self.name}: send_backward on rank {self.rank}", f"{what} that was received", self.variable
        )

    def isend_forward(self, payload: Any, *, samples: Sequence[int] | None = None) -> Handle:
        """Start sending this rank's part of an activation; ``samples``: rows of each sample of a packed one."""
        steady = self._steady
        unpacked = samples is None and isinstance(payload, torch.Tensor) and not hasattr(payload, SPLIT_SIZES)
        if (
            steady is not None
            and unpacked
            and payload.shape == steady.shape
            and payload.dtype is steady.dtype
            and (self.backward or not payload.requires_grad)
        ):
            given = payload.detach() if payload.requires_grad else payload
            if steady.view is not None:
                given = given.reshape(steady.view)
            return _one(self.traffic.send(steady.part, given, _FORWARD, dtype=steady.wire_dtype, peers=steady.peers))
        values = self._leaves.values(payload, samples)
        notes = self._leaves.notes(values)
        if self._announced is not None and not self.variable:
            self._leaves.require_agreed(notes, self._announced)
        announced = encode(notes)
        if self.variable or self._announced is None:
            self.traffic.compare_announced(announced, ", ".join(map(str, notes)))
        leaves = self._leaves.outgoing(notes)
        # Every rank that may get something must know the sizes; gradients need no such message.
        sending = self._send(leaves, [tensor_of(value) for value in values], _FORWARD, note=announced)
        # Only now: after a lane's error nothing was sent, and no gradient of it will follow.
        self._announced = notes
        if self._is_tensor and unpacked and not self.variable:
            self._steady = _Steady.of(payload, leaves[0], _FORWARD, every=not self._skips_empty)
        self._sent.add(leaves, has_gradient=self._tied and torch.is_grad_enabled())
        return sending

    def irecv_forward(self, shape: Sequence[int] | None = None) -> ReceiveHandle:
        """Start receiving the next activation, of ``shape`` if given."""
        expected = None if shape is None else self._leaves.expected(shape)
        if self._arriving is not None:
            whole = self._receive_whole(self._arriving, _FORWARD, expected)
            if whole is not None:
                return whole
        return self._receive_forward(expected)

    def irecv_into(self, tensor: torch.Tensor) -> BridgeReceive:
        """Start receiving the next activation into ``tensor``, of its shape and dtype."""
        return self._receive_forward(self._leaves.expected(tensor.shape), tensor)

    def _receive_forward(self, expected: tuple[int, ...] | None, into: torch.Tensor | None = None) -> BridgeReceive:
        is_first = self._received.first is None
        incoming = Arrival()

        def peers() -> Iterable[int] | None:
            if is_first:
                return self._wiring.senders(_FORWARD)
            return None if self._arriving is None else peers_of(self._arriving, _FORWARD, sends=False)

        def fill(handles: PostedReceives) -> Filled:
            notes = {peer: handle.note for peer, handle in handles.items()}  # type: ignore[attr-defined]  # lanes' own
            incoming.leaves = leaves = self._announced_leaves(notes)
            return self._fill(leaves, handles, _FORWARD, expected, into)

        incoming.receive = receive = self.traffic.receive(
            _FORWARD,
            fill,
            peers=peers if self._skips_empty else None,
            into=into,
            # Filling waits for the leader as long as sizes are not known.
            blocks=None if self._wiring.sizes_from is None else lambda: self._arriving is None,
        )
        self._received.add(incoming, has_gradient=self._tied and torch.is_grad_enabled())
        return receive

    def _announced_leaves(self, texts: Mapping[int, str]) -> Microbatch:
        """The leaves that the source ranks have announced; a copy without a lane gets the notes from the leader."""
        if self._arriving is not None:
            return self._arriving
        leader = self._wiring.sizes_from
        if leader is not None:
            copies, waits = self._wiring.copies(_FORWARD), self.traffic.waits
            group = self.traffic.groups[self._wiring.completion_group(copies, _FORWARD)]
            own = json.dumps(sorted(texts.items())) if self.rank == leader else ""
            task = f"rank {leader} did not pass on the source's sizes"
            texts = dict(json.loads(waits.gather_text(own, copies, group, task=task)[leader]))
        leaves = self._leaves.incoming({peer: decode(text) for peer, text in texts.items()})
        if not self.variable:
            # In place of the first receive, which would keep its tensors for as long as the bridge lives.
            self._arriving, self._received.first = leaves, Arrival(leaves)
        return leaves

    def isend_backward(self, gradients: Any) -> Handle:
        """Start sending the gradient of the oldest activation that has none yet."""
        steady = self._steady_gradient
        if (
            steady is not None
            and isinstance(gradients, torch.Tensor)
            and gradients.shape == steady.shape
            and gradients.dtype is steady.dtype
        ):
            given = gradients.detach() if gradients.requires_grad else gradients
            if steady.view is not None:
                given = given.reshape(steady.view)
            return _one(self.traffic.send(steady.part, given, _BACKWARD, dtype=steady.wire_dtype, peers=steady.peers))
        oldest = self._received.oldest
        leaves = oldest.leaves or oldest.wait()
        handle = self._send(leaves, self._leaves.due(leaves, gradients), _BACKWARD)
        if self._is_tensor and isinstance(gradients, torch.Tensor) and not self.variable:
            self._steady_gradient = _Steady.of(gradients, leaves[0], _BACKWARD, every=False)
        self._received.answer()  # only now: after an error the same activation still waits
        return handle

    def irecv_backward(self, shape: Sequence[int] | None = None) -> ReceiveHandle:
        """Start receiving the gradient of the oldest activation that was sent and has none yet."""
        leaves = self._sent.oldest
        expected = None if shape is None else self._leaves.expected(shape)
        receive = self._receive_whole(leaves, _BACKWARD, expected)
        if receive is None:
            receive = self.traffic.receive(
                _BACKWARD,
                lambda handles: self._fill(leaves, handles, _BACKWARD, expected),
                peers=lambda: peers_of(leaves, _BACKWARD, sends=False),
            )
        self._sent.answer()
        return receive

    def _send(
        self,
        leaves: Microbatch,
        tensors: Sequence[torch.Tensor | None],
        direction: Direction,
        *,
        note: str | None = None,
    ) -> Handle:
        """Send one message to each receiving rank: its boxes of every leaf, in the order of leaves.

        With a note every rank that may get something gets a message, be it one without bytes.
        """
        peers = None if note is not None else peers_of(leaves, direction, sends=True)
        shares = []
        for one, tensor, wired in zip(leaves, tensors, self._wiring.leaves, strict=True):
            part = one.part(direction)
            if part is None or tensor is None or one.plans is None:
                continue
            given = tensor.detach() if tensor.requires_grad else tensor
            view = given if given.shape == part.source_shape else given.reshape(part.source_shape)
            dtype = one.plans.wire_dtype
            if self._is_tensor:
                return _one(self.traffic.send(part, view, direction, dtype=dtype, peers=peers, note=note))
            shares.append((part, view, dtype, wired.receivers(direction)))
        return BridgeSend(self.traffic.send_shares(shares, direction, peers=peers, note=note))

    def _receive_whole(
        self, leaves: Microbatch, direction: Direction, expected: tuple[int, ...] | None
    ) -> ReceiveHandle | None:
        """The receive of one tensor of known sizes straight from its lane; None where that is not possible."""
        if not self._is_tensor:
            return None
        (leaf,) = leaves
        plans, part = leaf.plans, leaf.part(direction)
        if plans is None or part is None or plans.wire_dtype is not plans.dtype:
            return None
        if leaf.shape != part.destination_shape or expected not in {None, leaf.shape}:
            return None
        return self.traffic.receive_whole(part, direction, requires_grad=direction is _FORWARD and self.backward)

    def _fill(
        self,
        leaves: Microbatch,
        handles: PostedReceives,
        direction: Direction,
        expected: tuple[int, ...] | None,
        into: torch.Tensor | None = None,
    ) -> Filled:
        """The tensors of all leaves with a part on this rank, their completions, and the payload of both."""
        first = leaves[0]
        if expected not in {None, first.shape} or (into is not None and into.dtype is not first.dtype):
            wanted = expected if into is None else f"{expected} of {into.dtype}"
            found = f"{first.shape} of {first.dtype}"
            raise ShapeError(f"{self.name}: rank {self.rank} expects shape {wanted}, but {found} comes")
        pieces = {peer: handle.result() for peer, handle in handles.items()}
        shares = {} if self._is_tensor else {peer: iter(own) for peer, own in pieces.items()}
        tensors: list[torch.Tensor] = []
        completing: list[Completing] = []
        for one, wired in zip(leaves, self._wiring.leaves, strict=True):
            part = one.part(direction)
            if part is None or one.plans is None:
                continue
            if shares:  # a piece of each leaf, from the ranks that may send one
                senders = wired.senders(direction)
                pieces = {peer: next(own) for peer, own in shares.items() if peer in senders}
            out = None if into is None else into.detach().view(part.destination_shape)
            tensor, steps = self.traffic.fill(
                part, pieces, direction, dtype=one.plans.dtype, wire_dtype=one.plans.wire_dtype, out=out
            )
            tensors.append(tensor)
            completing += steps
        if into is not None:
            return Filled([into], completing, partial(with_gradient, into))
        build = self._leaves.activations if direction is _FORWARD else self._leaves.gradients
        return Filled(tensors, completing, partial(build, leaves, tensors))


def _one(sending: Sequence[Transfer]) -> Handle:
    return sending[0] if len(sending) == 1 else BridgeSend(sending)
