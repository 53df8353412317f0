"""The source's end of a lane: checks of payloads, announcements, the state of the shape contract."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from pipegrid.transport.errors import P2PUsageError
from pipegrid.transport.lane.endpoint import Endpoint
from pipegrid.transport.lane.landing import BESIDE, Landings
from pipegrid.transport.messages.handle import Transfer, TransferLane
from pipegrid.transport.messages.message import ShapeContract, Signature, StepShapes, encode
from pipegrid.transport.messages.payload import (
    PlainMessage,
    carried,
    check_sendable,
    flatten,
    plain_message,
    signature_of,
)

# Works of headers that outlive their transfers: NCCL ends a small send before its receive is posted, and so before its
# header is read. Its buffers, which have 8 slots, take fewer sends.
_HEADERS_KEPT = 64


class Outgoing:
    """Checks, announcements and shapes of a lane's messages, at its source.

    Args:
        end: of the lane.
        there: what has been announced to the destination, where that is this rank.

    Attributes:
        contract: what has been announced.
        dtype: as of `Endpoint`.
        header_works: of the last headers that were sent.
        plain: the one message of the lane, where it is plain and each is started alone.
    """

    def __init__(self, end: Endpoint, *, there: ShapeContract) -> None:
        self.contract = ShapeContract(end.spec, end.config.shape_mode, end.standing)
        self.header_works: deque[Any] = deque(maxlen=_HEADERS_KEPT)
        self.plain: PlainMessage | None = None
        self._end, self._there = end, there
        self._spec, self._device, self.dtype = end.spec, end.device, end.dtype
        self._one_by_one = end.one_by_one
        self._nothing = torch.zeros(1, dtype=torch.uint8, device=end.device)
        self._landings = Landings() if end.beside_headers else None
        self._beside: set[int] = set()  # messages that go to the receives beside their headers

    def fill(self, transfer: Transfer, payload: Any, note: str | None) -> None:
        """Give a send its tensors and its signature, before it has a number: a payload that fails costs no message.

        Raises:
            P2PUsageError: see `check_sendable`.
        """
        tensors, tree = flatten(payload)
        for tensor in tensors:
            check_sendable(tensor, device=self._device, dtype=self.dtype, lane=self._spec)
        if note is None:
            note = "" if self.contract.standing is None else self.contract.standing.note
        transfer.signature = signature_of(tensors, tree, note)
        try:
            transfer.tensors = carried(tensors, self._nothing)
        except RuntimeError as error:
            raise P2PUsageError(f"lane {self._spec} cannot send these tensors as bytes: {error}") from error

    def admit(self, transfer: Transfer) -> None:
        """Announce a numbered send, if no announcement has it.

        Raises:
            P2PMismatchError, P2PUsageError: see `ShapeContract.send`.
        """
        signature = transfer.signature
        if signature is not None and self.contract.send(signature, transfer.sequence):
            transfer.header_works = self._announce(transfer.sequence, signature)
        if transfer.sequence in self._beside:
            self._beside.remove(transfer.sequence)
            transfer.beside_header = True
        if self._one_by_one and self.plain is None:
            self.plain = plain_message(self.contract.standing, self.dtype, self._device)

    def _announce(self, sequence: int, signature: Signature) -> list[Any]:
        """Tell the other end of a message; the works must be kept until the other end has read them."""
        standing = self.contract.standing is not None
        self._end.tally.headers += 1
        if self._end.wire is None:
            self._there.announce(signature, standing=standing)
            return []
        header = encode(sequence=sequence, standing=standing, signature=signature)
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
            step.plain = self.plain = plain_message(self.contract.standing, self.dtype, self._device)

    def finish(self) -> None:
        """Drop what the backend has: the lane has ended."""
        self.header_works.clear()
