"""A lane from a rank to itself: copies in a queue, with the same rules as between ranks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipegrid.transport.errors import P2PError, P2PMismatchError, P2PUsageError
from pipegrid.transport.handle import ReceiveTransfer, State, Transfer
from pipegrid.transport.lane import Lane
from pipegrid.transport.message import Signature
from pipegrid.transport.payload import flatten, signature_of
from pipegrid.transport.streams import current_stream, follow, mark, used_here


class LocalLane(Lane):
    """See `Lane`. A send is done at once; a receive is done when its send has come."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._copies: deque[tuple[Signature, list[Tensor], Sequence[Any], torch.cuda.Stream | None]] = deque()
        self._changed = threading.Condition(self._lock)

    def admit(self, transfer: Transfer) -> None:
        """Copy a send into the queue, or note a receive; then match the heads."""
        self.require_alive()
        try:
            if isinstance(transfer, ReceiveTransfer):
                transfer.sequence, transfer.state = self.received, State.PENDING
                self.queue.append(transfer)
                self.received += 1
            else:
                transfer.sequence = self.sent
                self._copy(transfer)
                self.sent += 1
            self._match()
        except P2PMismatchError as error:
            self.fail(error, kind="mismatch")
            raise

    def launch(self, transfer: Transfer) -> None:
        """See `Lane.launch`: it is done."""

    def _notify(self) -> None:
        self._changed.notify_all()

    def _copy(self, transfer: Transfer) -> None:
        signature = transfer.signature or signature_of(transfer.tensors, 0)
        if self._outgoing.send(signature, transfer.sequence):
            self.tally.headers += 1
        copies = [tensor.detach().clone() for tensor in transfer.tensors]
        self._copies.append((signature, copies, mark(self.device), current_stream(self.device)))
        transfer.state = State.PENDING
        self.tally.messages += 1
        self.tally.bytes += sum(copy.numel() * copy.element_size() for copy in copies)
        self._ended(transfer, State.DONE)

    def _match(self) -> None:
        while self._copies and self.queue:
            signature, copies, made, stream = self._copies[0]
            receive = self.queue[0]
            if not isinstance(receive, ReceiveTransfer):
                raise P2PUsageError(f"{receive!r} is queued as a receive; report this as a fault of the lane")
            receive.buffers = self._buffers_of(receive, signature)
            receive.tensors = copies
            self.tally.messages += 1
            self._copies.popleft()
            receive.works, receive.stream = made, stream
            self._ended(receive, State.DONE)

    def announce(self, payloads: Sequence[Any]) -> None:
        """See `Lane.announce`."""
        self._require_announceable()
        with self.submitter.lock:
            self.require_alive()
            self._outgoing.announce([signature_of(*flatten(payload)) for payload in payloads], standing=False)

    def wait_for(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Lane.wait_for`."""
        if transfer.state is State.PENDING:
            self._set_due(transfer, timeout)
            with self._changed:
                while transfer.state is State.PENDING and time.monotonic() < transfer.due:
                    self._changed.wait(max(0.0, transfer.due - time.monotonic()))
            if transfer.state is State.PENDING:
                self.fail(self._timed_out(transfer), kind="timeout")
        self._refuse(transfer)
        follow(transfer.works or (), self.device)
        used_here(transfer.tensors, transfer.stream)

    def synchronize(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Lane.synchronize`."""
        self.wait_for(transfer, timeout)
        for event in transfer.works or ():
            self.tally.host_syncs += 1
            event.synchronize()

    def provide(self, transfer: ReceiveTransfer) -> Any:
        """See `Lane.provide`."""
        self.wait_for(transfer, None)
        return transfer.payload

    def poll(self, transfer: Transfer) -> bool:
        """See `Lane.poll`."""
        return transfer.state not in (State.HELD, State.PENDING)

    def join(self) -> None:
        """See `Lane.join`: there is none."""

    def _cut(self, error: P2PError, kind: str) -> None:
        del error, kind
        self._copies.clear()
