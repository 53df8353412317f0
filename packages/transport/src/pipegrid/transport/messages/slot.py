"""Memory for messages that is not a lane's own: in a slot, messages of any lanes arrive one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, field
from torch import Tensor

from pipegrid.transport.errors import P2PUsageError
from pipegrid.transport.messages.message import Signature, TensorSpec
from pipegrid.transport.messages.payload import ReceiveBuffers, without_history
from pipegrid.transport.streams import follow

_KINDS_KEPT = 8  # where shapes are renewed, or messages of several shapes come to one slot


@define(eq=False)
class Slot:
    """Memory in which one message after the other arrives, always at the same addresses.

    A receive that is posted to it (`Lane.irecv`) has it until its payload is released. Messages of unlike shapes or
    dtypes have memory of their own in it.
    """

    _memory: dict[tuple[TensorSpec, ...], Sequence[Tensor]] = field(factory=dict, init=False)
    _events: Sequence[Any] = field(default=(), init=False)  # the next message comes after these
    _reserved: bool = field(default=False, init=False)

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return sum(tensor.nbytes for tensors in self._memory.values() for tensor in tensors)

    def reserve(self) -> None:
        """Have it for one message, until that is released; a P2PUsageError where another message has it."""
        if self._reserved:
            raise P2PUsageError(
                "a receive was posted to a slot whose message is not released: that one would be written while it may "
                "be read; release() it first"
            )
        self._reserved = True

    def take(self, form: ReceiveBuffers) -> Sequence[Tensor]:
        """Its memory for a message, for use on the current stream."""
        kind = form.signature.tensors
        if (tensors := self._memory.get(kind)) is None:
            if len(self._memory) >= _KINDS_KEPT:
                del self._memory[next(iter(self._memory))]
            tensors = self._memory[kind] = form.take()
        if self._events:
            follow(self._events, form.device)
        return tensors

    def release(self, form: ReceiveBuffers, tensors: Sequence[Tensor], events: Sequence[Any]) -> None:
        """The message was read; what comes next follows ``events``."""
        self._memory[form.signature.tensors] = without_history(tensors)
        self._events, self._reserved = events, False

    def leave(self) -> None:
        """Leave the memory to the holders of the last message; the next message gets new memory."""
        self._memory.clear()
        self._events, self._reserved = (), False


@define(eq=False)
class SlotBuffers:
    """The `ReceiveBuffers` of a message that comes to a slot."""

    form: ReceiveBuffers
    slot: Slot

    @property
    def signature(self) -> Signature:
        """Of the message."""
        return self.form.signature

    def take(self) -> Sequence[Tensor]:
        """The tensors of the slot in which the message arrives."""
        return self.slot.take(self.form)

    def payload(self, tensors: Sequence[Tensor], *, prepare: bool = False) -> Any:
        """The payload over these tensors; ``prepare`` does nothing, as the memory of later messages is there."""
        del prepare
        return self.form.payload(tensors)

    def release(self, tensors: Sequence[Tensor], events: Sequence[Any]) -> None:
        """The message was read; what comes next to the slot follows ``events``."""
        self.slot.release(self.form, tensors, events)
