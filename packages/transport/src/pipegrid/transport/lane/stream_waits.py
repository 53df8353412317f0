"""Waits for device groups: a wait orders the current stream, and the end of a transfer can only be polled."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import final

from pipegrid.transport.backends.wire import timedelta_of
from pipegrid.transport.lane.transfers import LaneTransfers, first_of
from pipegrid.transport.messages.handle import State, Transfer
from pipegrid.transport.streams import used_here
from pipegrid.transport.waits.wait_lock import BackgroundThread

_POLL_SECONDS = 0.0001
_CLOSED_SECONDS = 1.0  # after the other side closed: transfers that it saw done may still be under way here

# Module names: members of an Enum are looked up slowly.
_ACTIVE, _DONE, _FAILED = State.ACTIVE, State.DONE, State.FAILED


@final
class StreamWaits(LaneTransfers):
    """The host waits for headers only. Transfers are started by the thread that runs the plan, and by no other."""

    _closed_by_peer = math.inf  # when the other side's notice of a close was seen

    def wait_for(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Transfer.wait`: order the current stream after the transfer."""
        ending = self.ending
        self._until(transfer, timeout, posted=True)
        ending.raise_failure(transfer)
        transfer.waited = True
        try:
            transfer.ticket.order()
        except RuntimeError as error:
            ending.explain(error, transfer)
        else:
            if ending.error is not None:  # the lane ends now, and with it this transfer, done or not: see `_seen_done`
                ending.set_end(transfer, _FAILED, ending.error)
        ending.raise_failure(transfer)
        used_here(transfer.tensors, transfer.stream)

    def synchronize(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Transfer.synchronize`."""
        self.wait_for(transfer, timeout)
        self._tally.host_syncs += 1
        while not self.poll(transfer):
            time.sleep(_POLL_SECONDS)
        self.ending.raise_failure(transfer)

    def poll(self, transfer: Transfer) -> bool:
        """See `Transfer.is_completed`."""
        if not super().poll(transfer) and transfer.state is _ACTIVE:
            if transfer.ticket is None:
                self._wait_lock.watch(transfer)
                self._start_deferred()
            elif self._is_done(transfer):
                self._see_done()
                return True
        return transfer.state is _DONE or transfer.state is _FAILED

    def _is_done(self, transfer: Transfer) -> bool:
        """Ask the ticket of a transfer; True of a failed one, too."""
        try:
            done: bool = transfer.ticket.done()
        except RuntimeError as error:
            self.ending.explain(error, transfer)
            return True
        return done

    def _see_done(self) -> None:
        """Set the ends of the transfers that are done, in order."""
        for transfer in self.queue.copy():
            if transfer.ticket is None or not self._is_done(transfer):
                break
            self._seen_done(transfer)

    def _seen_done(self, transfer: Transfer) -> None:
        """Set the end of a transfer whose ticket is done.

        An abort makes works look done, without their data; a lane takes its error before that.
        """
        error = self.ending.error
        self.ending.set_end(transfer, _DONE if error is None else _FAILED, error)

    def _is_past(self, transfer: Transfer) -> bool:
        return transfer.waited or transfer.state is _DONE

    def _look_after(self, transfer: Transfer) -> None:
        if self._incoming.header is not None:
            self._wait_lock.watch(transfer)

    def _start_deferred(self) -> None:
        if not isinstance(threading.current_thread(), BackgroundThread):
            super()._start_deferred()

    def _next(self) -> Transfer | None:
        return first_of(self._incoming.deferred)

    def _has_work(self, wanted: int) -> bool:
        return self._incoming.header is not None and super()._has_work(wanted)

    def _see_ends(self, now: float) -> None:
        self._see_done()
        if self.queue and self._has_final_notice(now):
            self.ending.explain(RuntimeError("the other side ended the lane"), first_of(self.queue))

    def _has_final_notice(self, now: float) -> bool:
        """Whether the other side has ended the lane; transfers that it closed after get a moment to end."""
        notice = self.ending.notice
        if notice != "closed":
            return notice is not None
        self._closed_by_peer = min(self._closed_by_peer, now)
        return now - self._closed_by_peer > _CLOSED_SECONDS

    def drain(self, end: float) -> None:
        """See `LaneTransfers.drain`."""
        for transfer in self.queue.copy():
            while self.ending.error is None and transfer.state is _ACTIVE and transfer.ticket is not None:
                if self._is_done(transfer):
                    self._seen_done(transfer)
                elif time.monotonic() >= end or not (transfer.sending or transfer.waited):
                    break
                else:
                    time.sleep(_POLL_SECONDS)
        works = self._outgoing.header_works
        with contextlib.suppress(RuntimeError):  # the other side is gone, or reads no more
            while self.ending.error is None and time.monotonic() < end and (work := first_of(works)) is not None:
                work.wait(timedelta_of(end - time.monotonic()))
                with contextlib.suppress(IndexError):  # the lane has ended meanwhile
                    works.popleft()
