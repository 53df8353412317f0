"""Payloads of several tensors over one bridge: all leaves of a microbatch travel in one message per lane."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from pipegrid.bridges.bridge.pending import PendingGradients, PendingReceive
from pipegrid.bridges.bridge.receive import BridgeReceive, BridgeSend, Landed, PostedReceives, with_gradient
from pipegrid.bridges.bridge.shape_exchange import Announcement, PlanPair, ShapeExchange
from pipegrid.bridges.bridge.structure import Axes, Leaf, Packed, Whole, kind_of
from pipegrid.bridges.bridge.traffic import EdgeTraffic
from pipegrid.bridges.bridge.wiring import PayloadWiring
from pipegrid.bridges.errors import BridgeError, ShapeError
from pipegrid.bridges.reshard import Choice, RankPart
from pipegrid.bridges.steps import pack
from pipegrid.transport.edge import Direction
from pipegrid.transport.protocol import Handle

_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD


@frozen
class _Number:
    """A value of a `Whole` leaf that travels with the shapes: an int, a float or a bool."""

    value: float


_LeafNote = Announcement | _Number
"""What a source rank announces of one leaf, in the note of a message."""


def _encode(notes: Iterable[_LeafNote]) -> str:
    forms = [(one.shape, one.dtype, one.samples) if isinstance(one, Announcement) else one.value for one in notes]
    return json.dumps(forms, separators=(",", ":"))


def _decode(text: str) -> list[_LeafNote]:
    return [Announcement(*form) if isinstance(form, list) else _Number(form) for form in json.loads(text)]


@frozen
class _LeafTransfer:
    """One leaf of one microbatch: how its tensor travels, or the value that needs no message.

    Attributes:
        plans: the plans of the tensor; None for a number, and where this rank has no part in it.
        shape: of this rank's tensor, as the stage has it; None for a number.
        gradient: whether a gradient comes back.
    """

    plans: PlanPair | None
    shape: tuple[int, ...] | None
    value: Any
    dtype: torch.dtype | None
    gradient: bool

    @property
    def forward_part(self) -> RankPart | None:
        """This rank's part in the forward plan."""
        return None if self.plans is None else self.plans.forward_part

    @property
    def backward_part(self) -> RankPart | None:
        """This rank's part in the backward plan."""
        return self.plans.backward_part if self.gradient and self.plans is not None else None


class PayloadExchange:
    """Payloads of the structure of ``wiring`` along an edge, both directions, over ``traffic``.

    With ``variable`` shapes and numbers may change from message to message; ``comm_dtype`` is that of floating-point
    leaves on the wire, None their own.
    """

    def __init__(
        self,
        wiring: PayloadWiring,
        traffic: EdgeTraffic,
        *,
        backward: bool,
        variable: bool,
        comm_dtype: torch.dtype | None,
    ) -> None:
        self.structure, self.traffic, self.rank = wiring.structure, traffic, wiring.rank
        self.name, self.backward, self.variable = traffic.name, backward, variable
        self._wiring = wiring
        self._shapes = [
            ShapeExchange(f"{self.name}, payload{leaf.path}", wired, Choice("direct"), comm_dtype, variable)
            for leaf, wired in zip(self.structure.leaves, wiring.leaves, strict=True)
        ]
        self.forget()

    def forget(self) -> None:
        """Forget what was agreed: the next message announces anew."""
        self._announced: list[_LeafNote] | None = None
        self._agreed: tuple[_LeafTransfer, ...] | None = None
        self._sent: PendingGradients[tuple[_LeafTransfer, ...]] = PendingGradients(
            f"{self.name}: recv_backward on rank {self.rank}", "payload that was sent", self.variable
        )
        self._received: PendingGradients[PendingReceive[tuple[_LeafTransfer, ...]]] = PendingGradients(
            f"{self.name}: send_backward on rank {self.rank}", "payload that was received", self.variable
        )

    # -- activations -------------------------------------------------------------------------------------------

    def isend_forward(self, payload: Any, *, samples: Sequence[int] | None = None) -> Handle:
        """Start sending this rank's part of a payload; see `BridgeCommunicator.isend_forward`."""
        if samples is not None:
            raise ShapeError(f"{self.name} carries a payload; samples belong to a leaf: Packed(leaf, samples)")
        values = self.structure.values(payload, name=self.name)
        notes = [self._note_of(leaf, value) for leaf, value in zip(self.structure.leaves, values, strict=True)]
        self._require_agreed(notes)
        if self.variable or self._announced is None:
            self.traffic.compare_announced(_encode(notes), f"a payload of {', '.join(map(str, notes))}")
        going = tuple(
            self._outgoing(index, one, value) for index, (one, value) in enumerate(zip(notes, values, strict=True))
        )
        handle = self._send(
            [(one.forward_part, _tensor_of(value)) for one, value in zip(going, values, strict=True)],
            going,
            _FORWARD,
            note=_encode(notes),
        )
        self._announced = notes
        self._sent.add(going, has_gradient=self.backward and torch.is_grad_enabled())
        return handle

    def _note_of(self, leaf: Leaf, value: Any) -> _LeafNote:
        """What this rank announces of a leaf."""
        where = f"{self.name}: payload{leaf.path}"
        tensor = _tensor_of(value)
        if isinstance(leaf.declared, Whole) and isinstance(value, (int, float)):
            return _Number(value)
        if tensor is None or (isinstance(leaf.declared, Axes) and tensor.ndim != len(leaf.declared.names)):
            found = kind_of(value if tensor is None else tensor)
            raise ShapeError(f"{where} is {found}; the edge declares {leaf.declared}")
        if tensor.requires_grad and not (self.backward and leaf.declared.gradient):
            raise BridgeError(f"{where} requires grad, but it was declared without gradient; detach it")
        samples = value.samples if isinstance(value, Packed) else None
        if samples is not None and leaf.lifted:
            raise ShapeError(f"{where} is Packed, but {leaf.declared} has no batch axis")
        return Announcement.of(tensor, samples)

    def _require_agreed(self, notes: Sequence[_LeafNote]) -> None:
        if self.variable or self._announced is None:
            return
        for leaf, now, agreed in zip(self.structure.leaves, notes, self._announced, strict=True):
            if _encode([now]) != _encode([agreed]):
                raise ShapeError(
                    f"{self.name}: rank {self.rank} sends {now} as payload{leaf.path}, but {agreed} was agreed with "
                    "the first message; sizes that change need shapes='variable'"
                )

    def _outgoing(self, index: int, note: _LeafNote, value: Any) -> _LeafTransfer:
        leaf, shapes = self.structure.leaves[index], self._shapes[index]
        if not isinstance(note, Announcement):
            return _LeafTransfer(None, None, value, None, gradient=False)
        tensor = _tensor_of(value)
        assert tensor is not None
        gradient = self._has_gradient(leaf, tensor.dtype)
        if self.rank not in shapes.wiring.src.coords_of:  # another data lane gives it
            return _LeafTransfer(None, note.shape, None, tensor.dtype, gradient=gradient)
        plans = shapes.own_plans(_lifted(leaf, note))
        return _LeafTransfer(plans, note.shape, None, tensor.dtype, gradient=gradient)

    def _has_gradient(self, leaf: Leaf, dtype: torch.dtype) -> bool:
        return self.backward and leaf.declared.gradient and (dtype.is_floating_point or dtype.is_complex)

    def irecv_forward(self, shape: Sequence[int] | None = None) -> BridgeReceive:
        """Start receiving the next payload; each leaf has a shape of its own, so ``shape`` is None."""
        self._require_no_shape(shape)
        incoming: PendingReceive[tuple[_LeafTransfer, ...]] = PendingReceive()

        def land(handles: PostedReceives) -> Landed:
            incoming.plans = leaves = self._arriving({peer: handle.note for peer, handle in handles.items()})  # type: ignore[attr-defined]
            return self._fill([one.forward_part for one in leaves], leaves, handles, _FORWARD)

        def built(tensors: Sequence[torch.Tensor]) -> Any:
            return self.structure.payload(self._values(incoming.wait(), iter(tensors)))

        incoming.receive = self.traffic.receive(_FORWARD, land, requires_grad=False, build=built)
        self._received.add(incoming, has_gradient=self.backward and torch.is_grad_enabled())
        return incoming.receive

    def _arriving(self, texts: Mapping[int, str]) -> tuple[_LeafTransfer, ...]:
        """The leaves that the source ranks have announced, as they travel to this rank."""
        if self._agreed is not None:
            return self._agreed
        notes = {peer: _decode(text) for peer, text in texts.items()}
        leaves = tuple(
            self._incoming(index, {peer: one[index] for peer, one in notes.items()})
            for index in range(len(self.structure.leaves))
        )
        if not self.variable:
            self._agreed = leaves
            self._received.first = PendingReceive(leaves)  # in place of the first receive, which would keep its tensors
        return leaves

    def _incoming(self, index: int, notes: Mapping[int, _LeafNote]) -> _LeafTransfer:
        leaf, shapes, wiring = self.structure.leaves[index], self._shapes[index], self._wiring.leaves[index]
        first, some = next(iter(notes.items()))
        for peer, one in notes.items():
            if type(one) is not type(some) or (isinstance(one, _Number) and one != some):
                raise ShapeError(f"{shapes.name}: ranks {first} and {peer} send {some} and {one}; they send the same")
        if not isinstance(some, Announcement):
            return _LeafTransfer(None, None, some.value, None, gradient=False)
        announced = {peer: notes[peer] for peer in wiring.senders(_FORWARD) if peer in notes}
        plans = shapes.plans(
            {peer: _lifted(leaf, one) for peer, one in announced.items() if isinstance(one, Announcement)}
        )
        taken = plans.forward_part.destination_shape
        if isinstance(leaf.declared, Whole):
            shape = next(one.shape for one in announced.values() if isinstance(one, Announcement))
        else:
            shape = taken[1:] if leaf.lifted else taken
        return _LeafTransfer(plans, shape, None, plans.dtype, gradient=self._has_gradient(leaf, plans.dtype))

    def _values(self, leaves: Sequence[_LeafTransfer], tensors: Iterator[torch.Tensor]) -> Iterator[Any]:
        for one in leaves:
            if one.shape is None:
                yield one.value
            else:
                tensor = next(tensors).view(one.shape)
                yield with_gradient(tensor) if one.gradient else tensor

    # -- gradients ---------------------------------------------------------------------------------------------

    def isend_backward(self, gradients: Any) -> Handle:
        """Start sending the gradients of the oldest payload that has none yet; None stands for zeros."""
        leaves = self._received.oldest.wait()
        given = (
            [None] * len(leaves)
            if gradients is None
            else self.structure.values(gradients, name=f"{self.name}, gradients")
        )
        pieces: list[tuple[RankPart | None, torch.Tensor | None]] = []
        for leaf, one, gradient in zip(self.structure.leaves, leaves, given, strict=True):
            self._check_gradient(leaf, one, gradient)
            pieces.append(
                (
                    one.backward_part,
                    self._zeros(one.backward_part.source_shape, one)
                    if gradient is None and one.backward_part
                    else gradient,
                )
            )
        handle = self._send(pieces, leaves, _BACKWARD, note=None)
        self._received.answer()
        return handle

    def _check_gradient(self, leaf: Leaf, one: _LeafTransfer, gradient: Any) -> None:
        needed = (one.shape, one.dtype) if one.gradient else None
        given = (tuple(gradient.shape), gradient.dtype) if isinstance(gradient, torch.Tensor) else None
        if given != needed and gradient is not None:
            due = f"shape {one.shape} of {one.dtype}" if one.gradient else "no gradient"
            raise ShapeError(
                f"{self.name}: the gradient of payload{leaf.path} is {kind_of(gradient)}, its leaf has {due}"
            )

    def irecv_backward(self, shape: Sequence[int] | None = None) -> BridgeReceive:
        """Start receiving the gradients of the oldest payload that has none yet: None for leaves without."""
        self._require_no_shape(shape)
        leaves = self._sent.oldest
        parts = [one.backward_part for one in leaves]

        def built(tensors: Sequence[torch.Tensor]) -> Any:
            arrived = iter(tensors)
            return self.structure.payload(self._gradients(leaves, arrived))

        receive = self.traffic.receive(
            _BACKWARD,
            lambda handles: self._fill(parts, leaves, handles, _BACKWARD),
            peers=lambda: _peers(part.receives for part in parts if part is not None),
            requires_grad=False,
            build=built,
        )
        self._sent.answer()
        return receive

    def _gradients(self, leaves: Sequence[_LeafTransfer], tensors: Iterator[torch.Tensor]) -> Iterator[Any]:
        for one in leaves:
            if not one.gradient or one.shape is None:
                yield None
            elif one.plans is None:  # the first lane has the gradient
                yield self._zeros(one.shape, one)
            else:
                yield next(tensors).view(one.shape)

    def _zeros(self, shape: Sequence[int], leaf: _LeafTransfer) -> torch.Tensor:
        return torch.zeros(shape, dtype=leaf.dtype, device=self.traffic.device)

    def _require_no_shape(self, shape: Sequence[int] | None) -> None:
        if shape is not None:
            raise ShapeError(f"{self.name} carries a payload, whose tensors have a shape each; leave the shape out")

    # -- messages ----------------------------------------------------------------------------------------------

    def _send(
        self,
        pieces: Sequence[tuple[RankPart | None, torch.Tensor | None]],
        leaves: Sequence[_LeafTransfer],
        direction: Direction,
        *,
        note: str | None,
    ) -> Handle:
        """Send one message to each receiving rank: its boxes of every leaf, in the order of leaves."""
        ready: list[tuple[RankPart, torch.Tensor, torch.dtype, tuple[int, ...]]] = []
        for (part, tensor), one, wired in zip(pieces, leaves, self._wiring.leaves, strict=True):
            if part is None or tensor is None or one.plans is None:
                continue
            view = tensor.detach().reshape(part.source_shape)
            summed = self.traffic.summed(part, view, direction)
            ready.append((part, summed, one.plans.wire_dtype, wired.receivers(direction)))
        if direction is _FORWARD:
            peers = list(self._wiring.receivers(direction))
        else:
            peers = list(_peers(part.sends for part, *_ in ready))
        return BridgeSend(
            self.traffic.send_each(
                {
                    peer: [
                        pack(tensor, part.sends.get(peer, ()), dtype)
                        for part, tensor, dtype, ends in ready
                        if peer in ends
                    ]
                    for peer in peers
                },
                direction,
                note=note,
            )
        )

    def _fill(
        self,
        parts: Sequence[RankPart | None],
        leaves: Sequence[_LeafTransfer],
        handles: PostedReceives,
        direction: Direction,
    ) -> Landed:
        """The tensors of all leaves with a part on this rank, and their completions."""
        arrived = {peer: iter(handle.result()) for peer, handle in handles.items()}
        tensors: list[torch.Tensor] = []
        completing: list[Any] = []
        for part, one, wired in zip(parts, leaves, self._wiring.leaves, strict=True):
            if part is None or one.plans is None:
                continue
            ends = wired.senders(direction)
            own = {peer: _Arrived(next(pieces)) for peer, pieces in arrived.items() if peer in ends}
            tensor, steps = self.traffic.fill(
                part, own, direction, dtype=one.plans.dtype, wire_dtype=one.plans.wire_dtype
            )
            tensors.append(tensor)
            completing += steps
        return tensors, completing


@frozen
class _Arrived:
    """A piece of a message, as `EdgeTraffic.fill` takes it."""

    piece: torch.Tensor

    def result(self) -> torch.Tensor:
        """The piece."""
        return self.piece


def _tensor_of(value: Any) -> torch.Tensor | None:
    """The tensor of a leaf's value; None for a number, or a value that no leaf can have."""
    tensor = value.tensor if isinstance(value, Packed) else value
    return tensor if isinstance(tensor, torch.Tensor) else None


def _lifted(leaf: Leaf, note: Announcement) -> Announcement:
    """The announcement of a leaf in the shape that travels: with a batch axis."""
    if isinstance(leaf.declared, Whole):
        return Announcement((1, math.prod(note.shape)), note.dtype)
    return Announcement((1, *note.shape), note.dtype) if leaf.lifted else note


def _peers(of_leaves: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sorted({peer for peers in of_leaves for peer in peers}))
