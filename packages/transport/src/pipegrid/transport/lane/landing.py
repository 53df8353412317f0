"""Receives beside headers: where shapes vary, a message of one tensor takes one trip, with its header.

gloo delivers to a receive that was posted before, and a message may be shorter than the buffer. So the destination
posts a receive beside that of each header, as large as the largest message that was announced some headers before: both
ends know that size. A message that fits follows its header at once. Where none follows (it is larger, or of several
tensors), one byte uses the receive up, and the message comes as without it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from pipegrid.core.lanes import Tally
from pipegrid.transport.backends import Mover, Ticket
from pipegrid.transport.messages.message import Signature
from pipegrid.transport.messages.payload import ReceiveBuffers, dtype_of

HEADERS_AHEAD = 2  # headers of which the receives are posted: of a step's next message, and of one ahead
BESIDE = 2**28  # in place of an epoch: these meet no other messages
_MOST_BYTES = 2**26  # a larger message travels for longer than its trips, and others would have as large buffers
_HEADROOM = 8  # an eighth: shapes that grow a little with each step fit in most


class Landings:
    """The sizes of the receives beside headers: one at each end, and both go through the same sizes."""

    def __init__(self) -> None:
        self._largest = 0
        self._sizes = deque([0] * HEADERS_AHEAD)
        self._posted = 0  # bytes of the last receive
        self._free = deque[Tensor]()

    def next_size(self) -> int:
        """Bytes of the receive beside the next header; 0 for none."""
        return self._sizes.popleft()

    def announced(self, signature: Signature, size: int) -> bool:
        """Note what a header announces; whether the message fits in the receive of ``size`` bytes beside it."""
        nbytes = sum(math.prod(one.shape) * dtype_of(one).itemsize for one in signature.tensors)
        alone = len(signature.tensors) <= 1 and nbytes <= _MOST_BYTES
        if alone and nbytes > self._largest:
            self._largest = nbytes + nbytes // _HEADROOM
        self._sizes.append(self._largest)
        return alone and size > 0 and nbytes <= size

    def post(self, mover: Mover, index: int, tally: Tally) -> Landing | None:
        """Post the receive beside the next header of lane ``index``."""
        if not (size := self.next_size()):
            return None
        if size != self._posted:
            self._posted, self._free = size, deque()
        try:
            buffer = self._free.pop()
        except IndexError:
            tally.allocations += 1
            with torch.inference_mode(False):  # a message in it may want gradients
                buffer = torch.empty(size, dtype=torch.uint8)
        return Landing(mover.start_one(False, [buffer], index, BESIDE), buffer, self)

    def take_back(self, buffer: Tensor) -> None:
        """Keep a buffer for another receive, unless these have grown. From any thread."""
        if buffer.nbytes == self._posted:
            self._free.append(buffer)


@define(eq=False)
class Landing:
    """A receive beside a header; the `ReceiveBuffers` of the message that comes in it, if one does."""

    ticket: Ticket  # of the receive
    _buffer: Tensor
    _landings: Landings
    _form: ReceiveBuffers = field(init=False)

    def take(self, form: ReceiveBuffers) -> list[Tensor]:
        """The tensors of the message that has come, which is one of ``form``.

        No views: what is done to them in place has a graph of its own.
        """
        self._form, memory = form, self._buffer.untyped_storage()
        with torch.inference_mode(False):
            return [
                torch.empty(0, dtype=dtype_of(one)).set_(memory, 0, one.shape)  # type: ignore[call-overload]
                for one in form.signature.tensors
            ]

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return self._buffer.nbytes

    @property
    def signature(self) -> Signature:
        """Of the message."""
        return self._form.signature

    def payload(self, tensors: Sequence[Tensor]) -> Any:
        """See `ReceiveBuffers.payload`."""
        return self._form.payload(tensors)

    def release(self, tensors: Sequence[Tensor] = (), events: Sequence[Any] = ()) -> None:
        """See `ReceiveBuffers.release`: another message may come in the memory, which is on a CPU."""
        del tensors, events
        self._landings.take_back(self._buffer)
