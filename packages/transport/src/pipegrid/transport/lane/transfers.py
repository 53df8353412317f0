"""The transfers of a lane that are under way: their headers, deadlines and callbacks, whatever the backend.

One thread at a time waits in the backend (see `WaitLock`); it also takes the headers that receives wait for. What it
waits for, and what a caller's wait is, depends on the backend: `HostWaits` and `LocalWaits`, where a wait holds the
host, and `pipegrid.transport.lane.stream_waits`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, final

from pipegrid.transport.backends.wire import timedelta_of
from pipegrid.transport.collectives.waiting import BACKSTOP_SECONDS
from pipegrid.transport.errors import P2PError, P2PMismatchError, P2PUsageError
from pipegrid.transport.lane.batch import Submitter
from pipegrid.transport.lane.ending import LaneEnding
from pipegrid.transport.lane.endpoint import Endpoint, Incoming, Outgoing
from pipegrid.transport.messages.handle import Limit, ReceiveTransfer, State, Transfer
from pipegrid.transport.streams import has_streams, mark, used_here
from pipegrid.transport.waits.wait_lock import WaitLock

_UNATTENDED_SECONDS = 0.05  # until the lane's own thread completes sends without a waiting thread
_POLL_SECONDS = 0.0001

# Module names: members of an Enum are looked up slowly.
_ACTIVE, _DONE, _FAILED = State.ACTIVE, State.DONE, State.FAILED

Entry = TypeVar("Entry")


def first_of(queue: deque[Entry]) -> Entry | None:
    """The first entry; None of an empty queue, also where another thread empties it meanwhile.

    An iterator of a live queue raises where it changes: to walk one, walk its ``copy()``, which is one step.
    """
    try:
        return queue[0]
    except IndexError:
        return None


class LaneTransfers(ABC):
    """The transfers of a lane that are under way, until each has ended. A subclass per way of waiting."""

    def __init__(self, end: Endpoint, *, submit: Submitter, outgoing: Outgoing, incoming: Incoming) -> None:
        self.config, self.connection = end.config, end.connection
        self.queue: deque[Transfer] = deque()  # those that were started, in order, and have not been seen to end
        self._submit, self._outgoing, self._incoming, self._tally = submit, outgoing, incoming, end.tally
        self._device, self._on_device = end.device, has_streams(end.device)
        self._wait_lock = WaitLock(f"pipegrid-lane-{end.spec}", self._step, self._has_work)
        self._leader = self._wait_lock.leader
        self._patience = timedelta(seconds=end.config.deadline + BACKSTOP_SECONDS)
        self.ending = LaneEnding(end, outgoing=outgoing, queue=self.queue, wait_lock=self._wait_lock)

    # ---- What handles ask: see `Transfer`

    @abstractmethod
    def wait_for(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Transfer.wait`."""

    def poll(self, transfer: Transfer) -> bool:
        """See `Transfer.is_completed`; the transfer is not known to have ended."""
        if transfer.state is _ACTIVE and self.ending.error is not None:
            self.ending.set_end(transfer, _FAILED, self.ending.error)
        return transfer.state is _DONE or transfer.state is _FAILED

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
        """Hold the host until what was ordered or sent is done and read, or until ``end``, if no wait holds it."""
        del end

    def join(self) -> None:
        """Return when no thread of the lane runs any more; the lane has ended."""
        self._wait_lock.join()


@final
class HostWaits(LaneTransfers):
    """Waits over gloo: a work can be waited for once, by one thread, and says that it is done to that thread only."""

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
        if not super().poll(transfer) and transfer.state is _ACTIVE:
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
        limit = queue[0].limit if queue and queue[0].sending else None
        unattended = limit is not None and now - limit.since > _UNATTENDED_SECONDS
        # Only those that the backend has: another thread may be about to start the last ones.
        if unattended and (posted := [transfer for transfer in queue if transfer.ticket is not None]):
            self._wait_lock.watch(posted[-1])


@final
class LocalWaits(LaneTransfers):
    """Waits on a rank's own lane, and in a dry run: a transfer has ended when it was started, or its send was."""

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
