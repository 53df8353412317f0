"""Waits on a rank's own lane, and in a dry run: a transfer has ended when it was started, or its send was."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, final

from pipegrid.transport.lane.transfers import LaneTransfers
from pipegrid.transport.messages.handle import ReceiveTransfer, State, Transfer
from pipegrid.transport.streams import used_here

_POLL_SECONDS = 0.0001

# Module names: members of an Enum are looked up slowly.
_ACTIVE, _DONE, _FAILED = State.ACTIVE, State.DONE, State.FAILED


@final
class LocalWaits(LaneTransfers):
    """No other rank is waited for. The sends and the receives of the lane are in one queue."""

    def started(self, transfer: Transfer) -> None:
        """See the ends that a start brings: of a send, and of the receive that it is for."""
        if transfer.sending:
            self._start_deferred()
        for one in self.queue.copy():
            if one.ticket is not None and one.ticket.done():
                self.ending.set_end(one, _DONE)

    def wait_for(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Transfer.wait`."""
        self._until(transfer, timeout, posted=False)
        self.ending.raise_failure(transfer)
        if self._on_device:
            transfer.ticket.order()
            used_here(transfer.tensors, transfer.stream)

    def poll(self, transfer: Transfer) -> bool:
        """See `Transfer.is_completed`."""
        if transfer.state is _ACTIVE and self.ending.error is not None:
            self.ending.set_end(transfer, _FAILED, self.ending.error)
        return transfer.state is _DONE or transfer.state is _FAILED

    def provide(self, transfer: ReceiveTransfer) -> Any:
        """The payload of a receive: nothing but its send fills it."""
        self.wait_for(transfer, None)
        return transfer.payload

    def _look_after(self, transfer: Transfer) -> None:
        """See `started`."""

    def _take_header(self, timeout: timedelta) -> None:
        """Wait for a send of this rank, by another thread: it is its own header."""
        end = time.monotonic() + timeout.total_seconds()
        while self.ending.error is None and self._incoming.deferred:
            if time.monotonic() > end:
                raise RuntimeError(f"no send came in {timeout.total_seconds():.3g} s")
            time.sleep(_POLL_SECONDS)

    def _advance(self, head: Transfer, timeout: timedelta) -> None:
        if head.ticket is None:
            self._take_header(timeout)
        else:
            head.ticket.hold(timeout)
            self.ending.set_end(head, _DONE)
