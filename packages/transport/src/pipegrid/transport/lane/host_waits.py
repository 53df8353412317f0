"""Waits over gloo, staged or not: the host holds for the first transfer under way."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import final

from pipegrid.transport.lane.transfers import BACKSTOP_SECONDS, LaneTransfers
from pipegrid.transport.messages.handle import Limit, State, Transfer
from pipegrid.transport.streams import used_here

_UNATTENDED_SECONDS = 0.05  # until the lane's own thread completes sends without a waiting thread

# Module names: members of an Enum are looked up slowly.
_ACTIVE, _DONE, _FAILED = State.ACTIVE, State.DONE, State.FAILED


@final
class HostWaits(LaneTransfers):
    """A work can be waited for once, by one thread, and says that it is done to that thread only."""

    def wait_for(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Transfer.wait`."""
        if transfer.state is _DONE and not self._on_device:
            return
        queue, lock, ticket, leader = self.queue, self._wait_lock, transfer.ticket, self._leader
        # The common case in one go; `WaitLock.until` is the general one, and does the same.
        if ticket is not None and leader.acquire(False):
            failure = None
            transfer.waited = True
            patience = self._patience
            if timeout is not None and transfer.state is _ACTIVE:
                transfer.limit = Limit(time.monotonic(), timeout)
                patience = timedelta(seconds=timeout + BACKSTOP_SECONDS)
            try:
                if queue and queue[0] is transfer:
                    ticket.hold(patience)
                    # The lane may have failed in the meantime. No thread comes in between these three lines.
                    if transfer.state is _ACTIVE:
                        transfer.state = _DONE
                        queue.popleft()
                        if transfer.sending:
                            transfer.tensors = ()
            except RuntimeError as error:
                failure = error
            finally:
                leader.release()
            if lock.contended:
                lock.wake()
            if failure is not None:
                self.ending.explain(failure, transfer)
            elif transfer.state is _DONE:
                if transfer.callbacks:
                    self.ending.call_back(transfer)
                elif not self._on_device:
                    return
        if transfer.state is _ACTIVE:
            self._until(transfer, timeout, posted=False)
        if transfer.state is not _DONE:
            self.ending.raise_failure(transfer)
        if self._on_device:
            transfer.ticket.order()
            used_here(transfer.tensors, transfer.stream)

    def poll(self, transfer: Transfer) -> bool:
        """See `Transfer.is_completed`: the lane's own thread waits for the transfer from now on."""
        if transfer.state is _ACTIVE and self.ending.error is not None:
            self.ending.set_end(transfer, _FAILED, self.ending.error)
        if transfer.state is _ACTIVE:
            self._wait_lock.ask(transfer)
        return transfer.state is _DONE or transfer.state is _FAILED

    def _look_after(self, transfer: Transfer) -> None:
        self._wait_lock.watch(transfer)

    def _advance(self, head: Transfer, timeout: timedelta) -> None:
        if head.ticket is None:
            super()._advance(head, timeout)
        else:
            head.ticket.hold(timeout)
            self.ending.set_end(head, _DONE)

    def _see_ends(self, now: float) -> None:
        queue = self.queue.copy()
        if queue and queue[0].sending and _is_unattended(queue[0], now):
            # Only those that the backend has: another thread may be about to start the last ones.
            posted = [transfer for transfer in queue if transfer.ticket is not None]
            if posted:
                self._wait_lock.watch(posted[-1])


def _is_unattended(transfer: Transfer, now: float) -> bool:
    return transfer.limit is not None and now - transfer.limit.since > _UNATTENDED_SECONDS
