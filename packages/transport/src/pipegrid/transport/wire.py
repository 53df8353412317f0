"""The one place that peers to `torch.distributed`: post, wait, tell the other side, cut the connection.

Of gloo seen with torch 2.11 to 2.13, and pinned by `test_transport_torch_facts`; of NCCL read in torch's code and not
seen, since nothing here has run on a GPU yet (`test_transport_gpu` has tests of the first two):

- gloo: ``is_completed()`` of a transfer stays False until ``wait()``; a second ``wait()`` blocks; a ``wait()`` that
  times out closes the connection of the pair, at both ends and for all transfers; ``abort()`` and ``shutdown()``
  wake nobody; a send whose work is dropped is never delivered; a message longer than the posted buffer ends the
  process, a shorter one arrives silently; a send is done when its receive is posted, whatever its size.
- NCCL: ``wait()`` orders the current stream and returns; completion can only be polled; tags are ignored; several
  transfers of one communicator make progress together only as one coalesced batch.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor
from torch.distributed import ProcessGroup

Work = Any

_HEADER_BYTES = 512
_LENGTH_BYTES = 4
_NOTE_BYTES = 2048
# How long last words may take to be taken, by kind: a loaded machine may keep a side that is alive from its turn, and
# the type of its error hangs on that of a mismatch. The other kinds go to sides that have not answered for a whole
# deadline, or that end as well; only the text of what they raise depends on it.
_TELL_SECONDS = {"mismatch": 5.0, "aborted": 2.0}
_TELL_OTHERS_SECONDS = 1.0
_POLL_SECONDS = 0.001
_FOREVER = timedelta(days=1)
# Tags of one communicator: some per lane for control, one that nobody ever sends to, the rest for data.
_HEADER, _NOTE, _CONTROL_TAGS = 0, 1, 2
_NEVER_SENT = 2**30
_ORDER_NUMBERS = 2**12
_EPOCHS = 16


@define(eq=False)
class Communicator:
    """The groups of one pair of ranks: for data, and for control on a CPU (the same one with gloo).

    Attributes:
        data: the group that moves payloads.
        backend: what is behind ``data`` and has its ``send`` and ``recv``; the group itself where it can be asked
            for batches only.
        control: the group that moves headers and notes.
        peer: the other rank, as rank in both groups.
        device: where payloads live.
        streamed: whether waiting only orders streams, so that completion has to be polled.
        lanes: how many lanes use it.
    """

    data: ProcessGroup
    backend: Any
    control: ProcessGroup
    peer: int
    device: torch.device
    streamed: bool
    lanes: int
    _sent: itertools.count[int] = field(factory=itertools.count)
    _received: itertools.count[int] = field(factory=itertools.count)

    def data_tag(self, index: int, epoch: int, *, sending: bool) -> int:
        """The tag of the next message of lane ``index``, whose shapes were renewed ``epoch`` times.

        It keeps apart what gloo would let meet, into the deadline instead of into an overflow or a swap: messages
        before and after a renewal that one side did not make, and, where lanes share the communicator, messages
        that the two sides did not issue in the same order. NCCL has no tags.
        """
        if self.lanes == 1:
            return _CONTROL_TAGS + epoch % (_NEVER_SENT - _CONTROL_TAGS)
        epoch %= _EPOCHS
        number = next(self._sent if sending else self._received) % _ORDER_NUMBERS
        return self.lanes * (_CONTROL_TAGS + number * _EPOCHS + epoch) + index

    def close(self) -> None:
        """Cut the connection: every transfer under way, here and on the other side, ends with an error."""
        if self.streamed:
            self.data.abort()
        # A wait that times out is the one thing that closes a gloo pair and wakes its waiters.
        with contextlib.suppress(RuntimeError):
            work = self.control.recv([torch.empty(1, dtype=torch.uint8)], self.peer, _NEVER_SENT)
            work.wait(timedelta(milliseconds=1))


@define(eq=False)
class Wire:
    """One lane's share of a communicator.

    Attributes:
        communicator: which one.
        index: the lane's place among those that use it.
        epoch: how often the lane's shapes were renewed.
    """

    communicator: Communicator
    index: int
    epoch: int = 0
    _note: Any = None
    _note_buffer: bytearray = field(factory=lambda: bytearray(_NOTE_BYTES))

    @property
    def streamed(self) -> bool:
        """Whether waiting only orders streams."""
        return self.communicator.streamed

    @property
    def device(self) -> torch.device:
        """Where payloads live."""
        return self.communicator.device

    def data_tag(self, *, sending: bool) -> int:
        """The tag of the lane's next message."""
        return self.communicator.data_tag(self.index, self.epoch, sending=sending)

    def _tag(self, kind: int) -> int:
        return self.index * _CONTROL_TAGS + kind if self.communicator.lanes > 1 else kind

    # Headers

    def send_header(self, data: bytes) -> list[Work]:
        """Start sending a header; the works are to be waited for."""
        first = bytearray(len(data).to_bytes(_LENGTH_BYTES, "big") + data[: _HEADER_BYTES - _LENGTH_BYTES])
        first.extend(bytes(_HEADER_BYTES - len(first)))
        works = [self._send_bytes(first, _HEADER)]
        rest = data[_HEADER_BYTES - _LENGTH_BYTES :]
        if rest:
            works.append(self._send_bytes(bytearray(rest), _HEADER))
        return works

    def receive_header(self) -> Callable[[timedelta], bytes]:
        """Post the receive of the next header; call what is returned to wait for it."""
        first = bytearray(_HEADER_BYTES)
        work = self._receive_bytes(first, _HEADER)

        def take(timeout: timedelta) -> bytes:
            work.wait(timeout)
            length = int.from_bytes(first[:_LENGTH_BYTES], "big")
            data = bytes(first[_LENGTH_BYTES : _LENGTH_BYTES + length])
            if len(data) < length:
                rest = bytearray(length - len(data))
                self._receive_bytes(rest, _HEADER).wait(timeout)
                data += rest
            return data

        return take

    def exchange_hello(self, mine: bytes, timeout: timedelta) -> bytes:
        """Send ``mine``, of any length, to the other side and return what it sent."""
        sent = self.send_header(mine)
        theirs = self.receive_header()(timeout)
        for work in sent:
            work.wait(timeout)
        return theirs

    def finish(self, works: Sequence[Work], seconds: float) -> None:
        """Hold the host until works of this wire are done.

        Raises:
            RuntimeError: they were not in time.
        """
        end = time.monotonic() + seconds
        for work in works:
            work.wait(timedelta_of(seconds))
        while self.streamed and not all(work.is_completed() for work in works):
            if time.monotonic() > end:
                self.communicator.close()
                raise RuntimeError(f"not done after {seconds:.3g} s")
            time.sleep(_POLL_SECONDS)

    def _send_bytes(self, data: bytearray, kind: int) -> Work:
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        return self.communicator.control.send([tensor], self.communicator.peer, self._tag(kind))

    def _receive_bytes(self, data: bytearray, kind: int) -> Work:
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        return self.communicator.control.recv([tensor], self.communicator.peer, self._tag(kind))

    # Notes: why the other side gave the lane up

    def expect_note(self) -> None:
        """Post the receive of the other side's last words."""
        self._note = self._receive_bytes(self._note_buffer, _NOTE)

    def tell(self, kind: str, text: str) -> None:
        """Tell the other side why this lane ends: the kind of end, and as much of the text as a note takes."""
        data = f"{kind}\n{text}".encode(errors="backslashreplace")[: _NOTE_BYTES - 1]
        note = bytearray(data.ljust(_NOTE_BYTES - 1, b" ") + b"\n")
        patience = timedelta(seconds=_TELL_SECONDS.get(kind, _TELL_OTHERS_SECONDS))
        with contextlib.suppress(RuntimeError):  # a connection that is gone tells the other side as well
            self._send_bytes(note, _NOTE).wait(patience)

    def has_note(self) -> bool:
        """Whether a note has come. Looks at memory only."""
        return self._note_buffer[-1] != 0

    def note(self) -> tuple[str, str] | None:
        """The other side's last words, if any came: kind and text.

        Only for a lane that ends: may close the connection.
        """
        with contextlib.suppress(RuntimeError):
            self._note.wait(timedelta(milliseconds=50))
            # Cut by bytes, so the last character may be half there.
            kind, _, text = bytes(self._note_buffer).decode(errors="ignore").partition("\n")
            return kind, text.rstrip()
        return None


Operation: TypeAlias = tuple[Wire, Sequence[Tensor], bool]
"""A wire, the tensors, and whether to send (or receive) them."""


def post(transfers: Sequence[Operation]) -> list[list[Work] | RuntimeError]:
    """Start transfers together; for each its works, or why it could not start.

    On NCCL the transfers of each communicator are one coalesced batch, whose one work all of them share.
    """
    if len(transfers) == 1 and not transfers[0][0].streamed:
        return [_post_one(*transfers[0])]
    outcomes: list[list[Work] | RuntimeError] = []
    batches: dict[ProcessGroup, list[int]] = {}
    for index, (wire, tensors, sending) in enumerate(transfers):
        if wire.communicator.streamed:
            batches.setdefault(wire.communicator.data, []).append(index)
            outcomes.append([])
        else:
            outcomes.append(_post_one(wire, tensors, sending))
    for group, members in batches.items():
        operations = [
            dist.P2POp(dist.isend if sending else dist.irecv, tensor, group=group, group_peer=wire.communicator.peer)
            for wire, tensors, sending in (transfers[index] for index in members)
            for tensor in tensors
        ]
        shared: list[Work] | RuntimeError
        try:
            shared = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            shared = error
        for index in members:
            outcomes[index] = shared if isinstance(shared, RuntimeError) else list(shared)
    return outcomes


def _post_one(wire: Wire, tensors: Sequence[Tensor], sending: bool) -> list[Work] | RuntimeError:
    communicator = wire.communicator
    verb = communicator.backend.send if sending else communicator.backend.recv
    tag = wire.data_tag(sending=sending)
    try:
        return [verb([tensor], communicator.peer, tag) for tensor in tensors]
    except RuntimeError as error:
        return error


def timedelta_of(seconds: float | None) -> timedelta:
    """A timeout for torch, which has no notion of none."""
    return _FOREVER if seconds is None else max(timedelta(seconds=seconds), timedelta(milliseconds=1))
