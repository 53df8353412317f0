"""The transfers of a lane that are under way: their headers, deadlines and callbacks, whatever the backend.

One thread at a time waits in the backend (see `WaitLock`); it also takes the headers that receives wait for. What it
waits for, and what a caller's wait is, depends on the backend: see `HostWaits`, `StreamWaits` and `LocalWaits`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pipegrid.transport.backends.wire import timedelta_of
from pipegrid.transport.errors import P2PError, P2PMismatchError, P2PUsageError
from pipegrid.transport.lane.batch import Submitter
from pipegrid.transport.lane.ending import LaneEnding
from pipegrid.transport.lane.endpoint import Endpoint, Incoming, Outgoing
from pipegrid.transport.lane.queue import first_of
from pipegrid.transport.messages.handle import Limit, ReceiveTransfer, State, Transfer
from pipegrid.transport.streams import has_streams, mark
from pipegrid.transport.waits.wait_lock import WaitLock

# Past its deadline the progress thread ends a transfer, with an end notice to the other side; should it be late, the
# backend's own timeout does so this much later, without one.
BACKSTOP_SECONDS = 1.0

# Module names: members of an Enum are looked up slowly.
_ACTIVE, _DONE, _FAILED = State.ACTIVE, State.DONE, State.FAILED


class LaneTransfers(ABC):
    """The transfers of a lane that are under way, until each has ended. A subclass per way of waiting.

    Attributes:
        config: the settings that the lane was opened with.
        connection: what it shares with others.
        ending: ends the lane, and sets the end of each transfer.
        queue: transfers that were started, in order, and have not been seen to end.
    """

    def __init__(
        self,
        end: Endpoint,
        *,
        submit: Submitter,
        outgoing: Outgoing,
        incoming: Incoming,
    ) -> None:
        self.config, self.connection = end.config, end.connection
        self.queue: deque[Transfer] = deque()
        self._submit, self._outgoing, self._incoming, self._tally = submit, outgoing, incoming, end.tally
        self._device, self._on_device = end.device, has_streams(end.device)
        self._wait_lock = WaitLock(f"pipegrid-lane-{end.spec}", self._step, self._has_work)
        self._leader = self._wait_lock.leader
        self._patience = timedelta(seconds=end.config.deadline + BACKSTOP_SECONDS)
        self.ending = LaneEnding(end, outgoing=outgoing, queue=self.queue, wait_lock=self._wait_lock)

    # ---- What handles ask: see `Waiter`

    @abstractmethod
    def wait_for(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Transfer.wait`."""

    @abstractmethod
    def poll(self, transfer: Transfer) -> bool:
        """See `Transfer.is_completed`; the transfer is not known to have ended."""

    def synchronize(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Transfer.synchronize`."""
        self.wait_for(transfer, timeout)
        if self._on_device:
            self._tally.host_syncs += 1
            for event in mark(self._device):
                event.synchronize()

    def provide(self, transfer: ReceiveTransfer) -> Any:
        """The payload of a receive before its data is there: wait for its buffers only."""
        if not transfer.is_ready:
            self._until(transfer, None, posted=True)
        self.ending.raise_failure(transfer)
        return transfer.payload

    def call_back(self, transfer: Transfer, callback: Callable[[Any], None]) -> None:
        """See `Transfer.on_done`."""
        with self._wait_lock.states:
            transfer.callbacks = (*transfer.callbacks, callback)
        if transfer.state is _DONE or transfer.state is _FAILED:
            self.ending.call_back(transfer)
        elif transfer.state is _ACTIVE:
            self._look_after(transfer)

    def take_back(self, transfer: ReceiveTransfer) -> None:
        """See `ReceiveTransfer.release`."""
        buffers = transfer.buffers
        if not self._is_past(transfer) and not transfer.is_completed():
            raise P2PUsageError(f"{transfer!r} cannot be released before it is done; wait for it")
        self._tally.released += 1
        if buffers is not None and transfer.state is not _FAILED:
            buffers.release(transfer.tensors, mark(self._device) if self._on_device else ())

    def receives_under_way(self) -> int:
        """Receives that still need their shapes or the backend."""
        return sum(not one.sending and not self._is_past(one) for one in self.queue.copy())

    def _is_past(self, transfer: Transfer) -> bool:
        """Whether what the caller does from now on comes after a transfer."""
        return transfer.state is _DONE

    # ---- Starts that come later: a receive whose header has come

    def started(self, transfer: Transfer) -> None:
        """Hand a started transfer to the lane's thread, unless a caller waits for it. Not under the lock."""
        needs_thread = isinstance(transfer, ReceiveTransfer) and not (transfer.is_ready or transfer.blocking)
        if transfer.callbacks or needs_thread:
            self._look_after(transfer)

    @abstractmethod
    def _look_after(self, transfer: Transfer) -> None:
        """Have the end of a transfer without a waiting thread seen: by this lane's thread, or by `sweep`."""

    def settle(self) -> None:
        """Wait for the headers of all receives that lack one: on a shared communicator, before their batch starts."""
        while True:
            with self._submit.lock:
                self._prepare_deferred()
                deferred = self._incoming.deferred
                if not deferred or self.ending.error is not None:
                    return
                last = deferred[-1]
            self._set_due(last, None)
            with self._wait_lock.lead():
                try:
                    self._take_header(timedelta(seconds=self._least() + BACKSTOP_SECONDS))
                except RuntimeError as error:
                    self.ending.explain(error, last)

    def _take_header(self, timeout: timedelta) -> None:
        """See `Incoming.take_header`; then start the receives that it is for. Only for the leader."""
        try:
            self._incoming.take_header(timeout, self._submit.lock)
        except P2PMismatchError as error:
            self.ending.fail(error, kind="mismatch")
            return
        if not self.connection.is_shared:  # on a shared one, a receive starts with its batch: see `settle`
            self._start_deferred()

    def _start_deferred(self) -> None:
        """Start the receives whose shapes are known by now."""
        with self._submit.lock:
            ready = self._prepare_deferred()
            if ready and self.ending.error is None:
                self._submit.start([one for one in ready if one.ticket is None])

    def _prepare_deferred(self) -> list[ReceiveTransfer]:
        try:
            return self._incoming.prepare_deferred()
        except P2PMismatchError as error:
            self.ending.fail(error, kind="mismatch")
            return []

    # ---- The leader's waits

    def _until(self, transfer: Transfer, timeout: float | None, *, posted: bool) -> None:
        """Wait until ``transfer`` has ended, or (with ``posted``) until the backend has it."""
        if transfer.state is _ACTIVE:
            self._set_due(transfer, timeout)
            self._wait_lock.until(transfer, posted=posted, left=self._left)

    def _set_due(self, transfer: Transfer, timeout: float | None) -> None:
        if timeout is not None:
            transfer.limit = Limit(time.monotonic(), timeout)
        elif transfer.limit is None:
            transfer.limit = Limit(time.monotonic(), self._least())

    def _least(self) -> float:
        """Seconds that a transfer has for which no caller says how many."""
        return max(self.config.deadline, self._submit.patience)

    def _left(self, transfer: Transfer) -> float:
        """Seconds that a follower may wait for the leader; the lane fails where there are none left."""
        if self.ending.error is not None:
            self.ending.set_end(transfer, _FAILED, self.ending.error)
        left = transfer.due + BACKSTOP_SECONDS - time.monotonic()
        if left <= 0:
            self.ending.time_out(transfer)
        return max(0.0, left)

    def _step(self, waited: Transfer | None) -> None:
        """Wait for one thing, on behalf of ``waited``; None is the lane's own thread. Only for the leader."""
        if waited is not None and self.ending.error is not None:
            self.ending.set_end(waited, _FAILED, self.ending.error)  # it was started while the lane ended
            return
        head = self._next()
        if head is None:  # it ended meanwhile, and every waiter has been told
            return
        seconds = None
        if waited is not None and waited.limit is not None:
            seconds = waited.due - time.monotonic() + BACKSTOP_SECONDS
        try:
            self._advance(head, timedelta_of(seconds))
        except P2PError:
            raise
        except RuntimeError as error:
            self.ending.explain(error, waited or head)

    def _next(self) -> Transfer | None:
        """What the leader is to wait for."""
        return first_of(self.queue)

    def _advance(self, head: Transfer, timeout: timedelta) -> None:
        """Wait for what ``head`` lacks: here, a transfer that the backend does not have yet."""
        del head
        if self._incoming.header is not None:
            self._take_header(timeout)
        else:
            self._start_deferred()

    def _has_work(self, wanted: int) -> bool:
        """Whether the lane's own thread has something to wait for, up to that number."""
        head = self._next()
        return head is not None and head.sequence <= wanted

    # ---- The progress thread, and the end

    def sweep(self, now: float) -> None:
        """See ends and deadlines of transfers without a waiting thread."""
        if self.ending.error is not None:  # another thread started these while the lane ended
            self.ending.finish(self.ending.error)
            return
        self._see_ends(now)
        for transfer in self.queue.copy():
            if transfer.limit is None and (transfer.sending or transfer.waited):
                transfer.limit = Limit(now, self._least())
            if now >= transfer.due:
                self.ending.time_out(transfer)
                return

    def _see_ends(self, now: float) -> None:
        """See the ends of transfers that no thread waits for: here none, as each is seen where it comes about."""
        del now

    def drain(self, end: float) -> None:
        """Hold the host until transfers that were ordered or sent are done and read, or until ``end`` (monotonic).

        Only where a wait does not hold the host.
        """
        del end

    def join(self) -> None:
        """Return when no thread of the lane runs any more; the lane has ended."""
        self._wait_lock.join()
