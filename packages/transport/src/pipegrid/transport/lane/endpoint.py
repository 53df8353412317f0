"""One end of a lane: what all parts of it know, and its messages at the source and at the destination.

At the source, payloads are checked and announced; at the destination, headers come and receives get their buffers.
"""

from __future__ import annotations

import itertools
from collections import deque
from datetime import timedelta
from typing import Any

import torch
from attrs import field, frozen

from pipegrid.core.lanes import LaneSpec, Tally
from pipegrid.transport.backends import GlooMover
from pipegrid.transport.backends.wire import ControlWire, PostedHeader
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.errors import P2PMismatchError, P2PUsageError
from pipegrid.transport.lane.connection import Connection
from pipegrid.transport.lane.landing import BESIDE, HEADERS_AHEAD, Landing, Landings
from pipegrid.transport.messages.handle import ReceiveTransfer, Transfer, TransferLane
from pipegrid.transport.messages.message import ShapeContract, Signature, StepShapes, TensorSpec, decode, encode
from pipegrid.transport.messages.payload import (
    ExpectedShape,
    PlainMessage,
    ReceiveBuffers,
    carried,
    check_sendable,
    flatten,
    plain_message,
    receive_buffers,
    signature_of,
)
from pipegrid.transport.messages.slot import SlotBuffers
from pipegrid.transport.streams import working_on

# Works of headers that outlive their transfers: NCCL ends a small send before its receive is posted, and so before its
# header is read. Its buffers, which have 8 slots, take fewer sends.
_HEADERS_KEPT = 64
_BUFFERS_KEPT = 64  # signatures, where shapes vary


@frozen(eq=False)
class Endpoint:
    """One end (or, on one rank, both) of a lane: what all parts of it there know."""

    spec: LaneSpec
    rank: int  # this, global
    device: torch.device  # where payloads live
    config: P2PConfig  # the settings that the lane was opened with
    connection: Connection  # what it shares with others
    index: int  # its number among all lanes of its communicator
    agreed: Signature | None = None  # the one message of the lane, where it was fixed when the lane was opened
    tally: Tally = field(factory=Tally, init=False)

    @property
    def peer(self) -> int:
        """The global rank at the other end."""
        return self.spec.destination if self.rank == self.spec.source else self.spec.source

    @property
    def wire(self) -> ControlWire | None:
        """Moves headers and end notices; None where both ends are one rank, and in a dry run."""
        return self.connection.wires.get(self.peer)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that floating-point tensors must have; None allows any, as where dtypes are agreed with shapes."""
        found: torch.dtype | None = self.config.pipeline_dtype
        return found if self.config.shape_mode in ("agreed", "given") else None

    @property
    def one_by_one(self) -> bool:
        """Whether each message is started alone: a plain one then needs nothing but its mover."""
        return not self.connection.is_shared and not self.config.strict and self.wire is not None

    @property
    def beside_headers(self) -> bool:
        """Whether a receive is posted beside each header: see `pipegrid.transport.lane.landing`."""
        varies = self.config.shape_mode in ("header", "learned")
        return varies and self.one_by_one and isinstance(self.connection.mover, GlooMover)


class Outgoing:
    """Checks, announcements and shapes of a lane's messages, at its source.

    ``there``: what has been announced to the destination, where that is this rank.
    """

    def __init__(self, end: Endpoint, *, there: ShapeContract) -> None:
        self.contract = ShapeContract(end.spec, end.config.shape_mode, end.agreed)
        self.header_works: deque[Any] = deque(maxlen=_HEADERS_KEPT)
        self.plain: PlainMessage | None = None  # the one message of the lane, where it is plain and started alone
        self._end, self._there = end, there
        self._spec, self._device, self.dtype = end.spec, end.device, end.dtype
        self._one_by_one = end.one_by_one
        self._nothing = torch.zeros(1, dtype=torch.uint8, device=end.device)
        self._landings = Landings() if end.beside_headers else None
        self._beside: set[int] = set()  # messages that go to the receives beside their headers

    def fill(self, transfer: Transfer, payload: Any, note: str | None) -> None:
        """Give a send its tensors and its signature, before it has a number: a payload that fails costs no message."""
        tensors, tree = flatten(payload)
        for tensor in tensors:
            check_sendable(tensor, device=self._device, dtype=self.dtype, lane=self._spec)
        if note is None:
            note = "" if self.contract.agreed is None else self.contract.agreed.note
        transfer.signature = signature_of(tensors, tree, note)
        try:
            transfer.tensors = carried(tensors, self._nothing)
        except RuntimeError as error:
            raise P2PUsageError(f"lane {self._spec} cannot send these tensors as bytes: {error}") from error

    def admit(self, transfer: Transfer) -> None:
        """Announce a numbered send, if no announcement has it."""
        signature = transfer.signature
        if signature is not None and self.contract.send(signature, transfer.sequence):
            transfer.header_works = self._announce(transfer.sequence, signature)
        if transfer.sequence in self._beside:
            self._beside.remove(transfer.sequence)
            transfer.beside_header = True
        if self._one_by_one and self.plain is None:
            self.plain = plain_message(self.contract.agreed, self.dtype, self._device)

    def _announce(self, sequence: int, signature: Signature) -> list[Any]:
        """Tell the other end of a message; the works must be kept until the other end has read them."""
        agreed = self.contract.agreed is not None
        self._end.tally.headers += 1
        if self._end.wire is None:
            self._there.announce(signature, agreed=agreed)
            return []
        header = encode(sequence=sequence, agreed=agreed, signature=signature)
        works = self._end.wire.send_header(header, self._end.index)
        if self._landings is not None:
            size = self._landings.next_size()
            if self._landings.announced(signature, size):
                self._beside.add(sequence)
            elif size:
                works.append(self._end.connection.mover.start_one(True, [self._nothing], self._end.index, BESIDE))
        self.header_works.extend(works)
        return works

    def renew(self) -> None:
        """Forget the agreed shapes."""
        self.contract.renew()
        self.plain = None

    def find_plain(self, step: StepShapes, lane: TransferLane) -> None:
        """Find the plain message of a step that has begun, once."""
        del lane
        if self._one_by_one:
            step.plain = self.plain = plain_message(self.contract.agreed, self.dtype, self._device)


class Incoming:
    """Headers, shapes and buffers of a lane's messages, at its destination."""

    def __init__(self, end: Endpoint) -> None:
        self.contract = ShapeContract(end.spec, end.config.shape_mode, end.agreed)
        self.deferred: deque[ReceiveTransfer] = deque()  # receives whose header has not come
        self._posted: deque[tuple[PostedHeader, Landing | None]] = deque()  # the receives of the next headers
        self._landings = Landings() if end.beside_headers else None
        self._landed: dict[int, Landing] = {}  # by the number of the message
        self.plain: tuple[PlainMessage, ReceiveBuffers] | None = None  # as of `Outgoing`, and its buffers
        self._end, self._spec, self._wire, self._tally = end, end.spec, end.wire, end.tally
        self._device, self.dtype = end.device, end.dtype
        self._one_by_one, self._mover = end.one_by_one, end.connection.mover
        # No rank announces anything: a receive has the shapes that its caller gives.
        self._dry = end.wire is None and not end.spec.is_local
        self._buffers: dict[tuple[Signature, tuple[bool, ...], ExpectedShape | None], ReceiveBuffers] = {}

    def expect(self, transfer: ReceiveTransfer, shapes: Any) -> None:
        """Note what the caller of a receive expects, before it has a number; P2PUsageError where that is invalid."""
        if shapes is not None:
            transfer.expected = ExpectedShape.of(shapes)
        elif self.contract.mode == "given":
            raise P2PUsageError(
                f"lane {self._spec} was opened with shapes='given': tensor_shape must be specified on a receive. "
                f"Common tensor_shape is (seq_length, micro_batch_size, hidden_size)"
            )

    def admit(self, transfer: ReceiveTransfer) -> None:
        """Give a numbered receive its buffers, or defer it until its header comes; P2PMismatchError if unexpected."""
        if self.plain is not None and transfer.expected is None and not self.deferred:
            self._fill(transfer, self.plain[1])
            return
        if self._dry and transfer.expected is not None and self.contract.agreed is None:
            self.contract.announce(self._given(transfer.expected), agreed=self.contract.stays)
        signature = None if self.deferred else self.contract.receive()
        if signature is not None:
            self._prepare(transfer, signature)
            return
        if self._dry:
            raise P2PUsageError(
                f"rank {self._spec.destination} receives on lane {self._spec} in a dry run, where no rank announces "
                f"shapes; give tensor_shape to the communicator, or shapes to the receive"
            )
        self.deferred.append(transfer)
        self._expect_header()

    def _given(self, expected: ExpectedShape) -> Signature:
        """The message that a receive of a dry run gets."""
        if self._end.config.pipeline_dtype is None:
            raise P2PUsageError(f"a receive on lane {self._spec} in a dry run needs pipeline_dtype; it is None")
        dtype = str(self._end.config.pipeline_dtype).removeprefix("torch.")
        tensors = [TensorSpec(dtype, shape) for shape in expected.shapes if shape is not None]
        if expected.single:
            return Signature(0, tensors)
        numbers = itertools.count()
        return Signature(("list", tuple(None if one is None else next(numbers) for one in expected.shapes)), tensors)

    @property
    def header(self) -> PostedHeader | None:
        """Waits for the next header, where a receive lacks it."""
        return self._posted[0][0] if self._posted and len(self.deferred) > self.contract.outstanding else None

    def _expect_header(self) -> None:
        if self._wire is None or self.contract.agreed:
            return
        most = 1 if self._landings is None else HEADERS_AHEAD
        while len(self._posted) < min(most, len(self.deferred) - self.contract.outstanding):
            header, index = PostedHeader(self._wire, self._end.index), self._end.index
            beside = None if self._landings is None else self._landings.post(self._mover, index, self._tally)
            self._posted.append((header, beside))

    def take_header(self, timeout: timedelta, lock: Any) -> None:
        """Wait up to ``timeout`` for the next header; only for the leader. ``lock`` guards the contract.

        Raises RuntimeError where none came; P2PMismatchError for one of another message.
        """
        if (header := self.header) is None:
            return
        self._tally.host_syncs += 1
        sequence, agreed, signature = decode(header.take(timeout))
        self._tally.headers += 1
        beside = self._posted[0][1]
        size = 0 if beside is None else beside.size
        landed = self._landings is not None and self._landings.announced(signature, size)
        if beside is not None and not landed:
            beside.ticket.hold(timeout)
        with lock:
            self._posted.popleft()
            first = self.deferred[self.contract.outstanding]
            if sequence != first.sequence:
                raise P2PMismatchError(
                    f"rank {self._spec.destination} waits for message {first.sequence} of lane {self._spec}, but rank "
                    f"{self._end.peer} announced message {sequence}; call renew() on both sides at the same message"
                )
            self.contract.announce(signature, agreed=agreed)
            if beside is not None and landed:
                self._landed[sequence] = beside
            elif beside is not None:
                beside.release()

    def prepare_deferred(self) -> list[ReceiveTransfer]:
        """The deferred receives whose shapes are known by now, with their buffers."""
        ready = []
        while self.deferred and (signature := self.contract.receive()) is not None:
            self._prepare(self.deferred[0], signature)
            ready.append(self.deferred.popleft())
        if self.deferred:
            self._expect_header()
        return ready

    def _prepare(self, transfer: ReceiveTransfer, signature: Signature) -> None:
        """Give a receive its buffers, for the stream that was current when it was started."""
        buffers = self._buffers_of(transfer, signature)
        if (landed := self._landed.pop(transfer.sequence, None)) is not None:
            transfer.tensors, transfer.buffers, transfer.ticket = landed.take(buffers), landed, landed.ticket
            self._tally.transfers += 1
            self._tally.bytes += buffers.nbytes or 1  # `carried`: what has no elements is one byte
            return
        self._fill(transfer, buffers)
        message = plain_message(self.contract.agreed, self.dtype, self._device) if self.plain is None else None
        if message is not None and self._one_by_one:
            self.plain = message, self._buffers_of(ReceiveTransfer(transfer.lane), message.signature)

    def _fill(self, transfer: ReceiveTransfer, buffers: ReceiveBuffers) -> None:
        own = buffers if transfer.slot is None else SlotBuffers(buffers, transfer.slot)
        with working_on(transfer.stream):
            transfer.tensors = own.take()
        transfer.buffers = own

    def _buffers_of(self, transfer: ReceiveTransfer, signature: Signature) -> ReceiveBuffers:
        """The buffers of a message in the form that its receiver expects."""
        expected = transfer.expected
        if signature.tree == 0 and expected == ExpectedShape(True, (signature.tensors[0].shape,)):
            expected = None
        key = (signature, signature.gradients, expected)
        if (buffers := self._buffers.get(key)) is None:
            exact = self.contract.stays
            buffers = receive_buffers(
                signature, expected, device=self._device, tally=self._tally, dtype=self.dtype, exact=exact
            )
            if buffers is None:
                kind = "" if self.dtype is None else f" in {self.dtype}"
                wanted = "any shape" if transfer.expected is None else f"shape {transfer.expected}"
                raise P2PMismatchError(
                    f"rank {self._spec.destination} expects message {transfer.sequence} of lane {self._spec} to be of "
                    f"{wanted}{kind}, but rank {self._end.peer} announced {signature}; give the same shapes and "
                    "pipeline_dtype on both sides"
                )
            if len(self._buffers) >= _BUFFERS_KEPT:
                self._buffers.clear()
            self._buffers[key] = buffers
            if self.contract.agreed is not None:
                buffers.keep()
        return buffers

    def find_plain(self, step: StepShapes, lane: TransferLane) -> None:
        """Find the plain message of a step that has begun, and its buffers, once."""
        message = plain_message(self.contract.agreed, self.dtype, self._device) if self._one_by_one else None
        if message is not None:
            buffers = self._buffers_of(ReceiveTransfer(lane), message.signature)
            buffers.keep()
            step.plain = self.plain = message, buffers

    def renew(self) -> None:
        """Forget the agreed shapes."""
        self.contract.renew()
        self.plain = None
        self._buffers.clear()
