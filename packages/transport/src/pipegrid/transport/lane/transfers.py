"""Transfers under way: waits for their headers and ends, deadlines, failures.

One thread at a time waits in the backend (see `WaitLock`); it also takes the headers that receives wait for.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch

from pipegrid.transport.backends.wire import timedelta_of
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.errors import (
    P2PError,
    P2PLaneDeadError,
    P2PMismatchError,
    P2PPeerError,
    P2PTimeoutError,
    P2PUsageError,
    relayed,
    text_of,
)
from pipegrid.transport.lane.connection import Connection, End, end_together
from pipegrid.transport.lane.incoming import Incoming
from pipegrid.transport.lane.queue import first_of
from pipegrid.transport.messages.handle import ReceiveTransfer, State, Transfer
from pipegrid.transport.spec import LaneSpec, Tally
from pipegrid.transport.streams import has_streams, mark, used_here
from pipegrid.transport.waits.aborts import device_aborts
from pipegrid.transport.waits.wait_lock import BackgroundThread, WaitLock

# Past its deadline the progress thread ends a transfer, with an end notice to the other side; should it be late, the
# backend's own timeout does so this much later, without one.
BACKSTOP_SECONDS = 1.0
_UNATTENDED_SECONDS = 0.05  # until the lane's own thread completes sends without a waiting thread
_POLL_SECONDS = 0.0001
_CLOSED_SECONDS = 1.0  # after the other side closed: transfers that it saw done may still be under way here
# Works of headers that outlive their transfers: NCCL ends a small send before its receive is posted, and so before its
# header is read. Its buffers, which have 8 slots, take fewer sends.
_HEADERS_KEPT = 64

# Module names: members of an Enum are looked up slowly.
_ACTIVE, _DONE, _FAILED, _PENDING = State.ACTIVE, State.DONE, State.FAILED, State.PENDING


class Submit(Protocol):
    """The part of `pipegrid.transport.lane.batch.Submitter` that lanes use.

    Attributes:
        lock: held while transfers get their numbers and are started, so that both happen in the same order.
        pending: of each thread that is inside a batch, the transfers that it has submitted.
        asleep: whether the progress thread needs ``wake``.
    """

    lock: Any
    pending: dict[int, list[Transfer]]
    asleep: bool
    wake: threading.Event

    def __call__(self, transfer: Transfer) -> None:
        """Start a transfer now, or at the end of the batch that this thread is in."""
        ...

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Hand numbered transfers to their movers. Under the lock."""
        ...


class LaneTransfers:
    """The transfers of a lane that are under way, until each has ended.

    Attributes:
        spec: which lane.
        rank: this global rank.
        peer: the global rank at the other end.
        config: the settings that the lane was opened with.
        connection: what it shares with others.
        queue: transfers that were started, in order, and have not been seen to end.
        header_works: of the last headers that were sent.
        error: why the lane is dead; None while it lives.
    """

    def __init__(
        self,
        spec: LaneSpec,
        *,
        rank: int,
        peer: int,
        device: torch.device,
        config: P2PConfig,
        connection: Connection,
        submit: Submit,
        incoming: Incoming,
        tally: Tally,
    ) -> None:
        self.spec, self.rank, self.peer = spec, rank, peer
        self.config = config
        self.connection = connection
        self.mover, self.wire = connection.mover, connection.wire
        self.queue: deque[Transfer] = deque()
        self.header_works: deque[Any] = deque(maxlen=_HEADERS_KEPT)
        self.error: P2PError | None = None
        self._device, self._submit, self._incoming, self._tally = device, submit, incoming, tally
        self._lock = threading.Lock()
        self._wait_lock = WaitLock(self._lock, f"pipegrid-lane-{spec}", self._step, self._has_work)
        self._patience = timedelta(seconds=config.deadline + BACKSTOP_SECONDS)
        self._streams, self._streamed = connection.mover.streams, has_streams(device)
        self._closed_by_peer = math.inf
        self._last_queue: list[str] = []  # under way when the lane ended

    # ---- Starts that come later: a receive whose header has come

    def started(self, transfer: Transfer) -> None:
        """Have a started transfer looked after, if no caller does. Not under the lock."""
        if self.wire is None:
            self._match_local(transfer)
        elif transfer.callbacks or not (transfer.is_ready or transfer.attended):
            self.look_after(transfer)

    def _match_local(self, transfer: Transfer) -> None:
        """On one rank the receive learns of its send here, and both end."""
        if transfer.sending:
            self._start_deferred()
        for one in self.queue.copy():
            if one.ticket is not None and one.ticket.done():
                self._ended(one, _DONE)

    def _take_header(self, timeout: timedelta) -> None:
        """See `Incoming.take_header`; then start the receives that it is for. Only for the leader."""
        try:
            self._incoming.take_header(timeout, self._submit.lock)
        except P2PMismatchError as error:
            self.fail(error, kind="mismatch")
            return
        # A receive of a shared communicator is started with its batch, which waits for this; one of a device group by
        # the thread that runs the plan.
        in_background = self.mover.streams and isinstance(threading.current_thread(), BackgroundThread)
        if self.config.communicators == "separate" and not in_background:
            self._start_deferred()

    def _start_deferred(self) -> None:
        """Start the receives whose shapes are known by now."""
        with self._submit.lock:
            ready = self._prepare_deferred()
            if ready and self.error is None:
                self._submit.start([one for one in ready if one.ticket is None])

    def _prepare_deferred(self) -> list[ReceiveTransfer]:
        try:
            return self._incoming.prepare_deferred()
        except P2PMismatchError as error:
            self.fail(error, kind="mismatch")
            if self.wire is None:  # the sender is here, and learns of it by its call
                raise
            return []

    def settle(self) -> None:
        """Wait for the headers of all receives that lack one: on a shared communicator, before their batch starts."""
        while self._incoming.deferred and self.error is None:
            last = self._incoming.deferred[-1]
            self._set_due(last, None)
            with self._wait_lock.lead():
                try:
                    self._take_header(self._patience)
                except RuntimeError as error:
                    self.explain(error, last)
            with self._submit.lock:
                self._prepare_deferred()

    # ---- Waiting

    def wait_for(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Transfer.wait`."""
        if self._streams:
            self._order(transfer, timeout)
            return
        if transfer.state is _DONE and not self._streamed:
            return
        queue, lock = self.queue, self._wait_lock
        # The common case in one go; `WaitLock.until` is the general one, and does the same.
        if (ticket := transfer.ticket) is not None and lock.leader.acquire(False):
            failure = None
            transfer.waited = True
            patience = self._patience
            if timeout is not None and transfer.state is _ACTIVE:
                self._set_due(transfer, timeout)
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
                lock.leader.release()
            if lock.contended:
                lock.wake()
            if failure is not None:
                self.explain(failure, transfer)
            elif transfer.callbacks and transfer.state is _DONE:
                self._tell_all(transfer)
        if transfer.state is _ACTIVE:
            self._until(transfer, timeout, posted=False)
        if transfer.state is not _DONE:
            self._raise_failure(transfer)
        if self._streamed:
            transfer.ticket.order()
            used_here(transfer.tensors, transfer.stream)

    def _order(self, transfer: Transfer, timeout: float | None) -> None:
        """Order the current stream after a transfer of a device group: the host waits for its header only."""
        self._until(transfer, timeout, posted=True)
        self._raise_failure(transfer)
        transfer.waited = True
        try:
            transfer.ticket.order()
        except RuntimeError as error:
            self.explain(error, transfer)
        else:
            if self.error is not None:  # the lane ends now, and with it this transfer, done or not: see `_seen_done`
                self._ended(transfer, _FAILED, self.error)
        self._raise_failure(transfer)
        used_here(transfer.tensors, transfer.stream)

    def synchronize(self, transfer: Transfer, timeout: float | None) -> None:
        """See `Transfer.synchronize`."""
        self.wait_for(transfer, timeout)
        if self.mover.streams:
            self._tally.host_syncs += 1
            while not self.poll(transfer):
                time.sleep(_POLL_SECONDS)
            self._raise_failure(transfer)
        elif self._streamed:
            self._tally.host_syncs += 1
            for event in mark(self._device):
                event.synchronize()

    def provide(self, transfer: ReceiveTransfer) -> Any:
        """The payload of a receive before its data is there: wait for its buffers only."""
        if self.wire is None:
            self.wait_for(transfer, None)  # on one rank nothing else fills it
        else:
            if not transfer.is_ready:
                self._until(transfer, None, posted=True)
            self._raise_failure(transfer)
        return transfer.payload

    def poll(self, transfer: Transfer) -> bool:
        """See `Transfer.is_completed`; the transfer is not known to have ended."""
        if transfer.state is _ACTIVE and self.error is not None:
            self._ended(transfer, _FAILED, self.error)
        if transfer.state is _ACTIVE:
            if not self.mover.polled:
                self._wait_lock.ask(transfer)
            elif transfer.ticket is None:
                if self.wire is not None:
                    self._wait_lock.watch(transfer)
                    if not isinstance(threading.current_thread(), BackgroundThread):
                        self._start_deferred()
            elif self._is_done(transfer):
                self._see_ends()
                return True
        return transfer.state is _DONE or transfer.state is _FAILED

    def _see_ends(self) -> None:
        """Set the ends of the transfers that are done, in order, where the mover is polled."""
        for transfer in self.queue.copy():
            if transfer.ticket is None or not self._is_done(transfer):
                break
            self._seen_done(transfer)

    def _seen_done(self, transfer: Transfer) -> None:
        """Set the end of a transfer whose ticket is done.

        An abort makes works look done, without their data. A lane takes its error before that, so a transfer is good
        where the lane has none once its ticket is done.
        """
        error = self.error
        self._ended(transfer, _DONE if error is None else _FAILED, error)

    def _is_done(self, transfer: Transfer) -> bool:
        """Ask the ticket of a transfer, where the mover is polled; True of a failed one, too."""
        try:
            done: bool = transfer.ticket.done()
        except RuntimeError as error:
            self.explain(error, transfer)
            return True
        return done

    def take_back(self, transfer: ReceiveTransfer) -> None:
        """See `ReceiveTransfer.release`."""
        state, buffers = transfer.state, transfer.buffers
        if state is not _DONE and not (self._streams and transfer.waited) and not transfer.is_completed():
            raise P2PUsageError(f"{transfer!r} cannot be released before it is done; wait for it")
        self._tally.released += 1
        if buffers is not None and transfer.state is not _FAILED:
            buffers.release(transfer.tensors, mark(self._device) if self._streamed else ())

    def call_back(self, transfer: Transfer, callback: Callable[[Any], None]) -> None:
        """See `Transfer.on_done`."""
        with self._lock:
            transfer.callbacks = (*transfer.callbacks, callback)
        if transfer.state is _DONE or transfer.state is _FAILED:
            self._tell_all(transfer)
        elif transfer.state is _ACTIVE:
            self.look_after(transfer)

    def look_after(self, transfer: Transfer) -> None:
        """Have the end of a transfer without a waiting thread seen: by this lane's thread, or by `sweep`."""
        if not self.mover.polled or self._incoming.header is not None:
            self._wait_lock.watch(transfer)

    def _until(self, transfer: Transfer, timeout: float | None, *, posted: bool) -> None:
        if transfer.state is _ACTIVE:
            self._set_due(transfer, timeout)
            self._wait_lock.until(transfer, posted=posted, left=self._left)

    def _left(self, transfer: Transfer) -> float:
        """Seconds that a follower may wait for the leader; the lane fails where there are none left."""
        if self.error is not None:
            self._ended(transfer, _FAILED, self.error)
        left = transfer.due + BACKSTOP_SECONDS - time.monotonic()
        if left <= 0:
            self.fail(self._timed_out(transfer), kind="timeout")
        return max(0.0, left)

    def _step(self, waited: Transfer | None) -> None:
        """Wait for one thing, on behalf of ``waited``; None is the lane's own thread. Only for the leader."""
        head = self._next()
        if head is None:  # it ended meanwhile, and every waiter has been told
            return
        try:
            timeout = timedelta_of(None)
            if waited is not None and waited.due != math.inf:
                timeout = timedelta_of(waited.due - time.monotonic() + BACKSTOP_SECONDS)
            if head.ticket is not None:
                head.ticket.hold(timeout)
                self._ended(head, _DONE)
            elif self._incoming.header is not None:
                self._take_header(timeout)
            elif self.wire is not None:
                self._start_deferred()
            else:
                self._await_local(timeout)
        except P2PError:
            raise
        except RuntimeError as error:
            self.explain(error, waited or head)

    def _await_local(self, timeout: timedelta) -> None:
        """Wait for a send of this rank, by another thread."""
        end = time.monotonic() + timeout.total_seconds()
        while self.error is None and self._incoming.deferred:
            if time.monotonic() > end:
                raise RuntimeError(f"no send came in {timeout.total_seconds():.3g} s")
            time.sleep(_POLL_SECONDS)

    def _has_work(self, wanted: int) -> bool:
        """Whether the lane's own thread has something to wait for, up to that number."""
        head = None if self.mover.streams and self._incoming.header is None else self._next()
        return head is not None and head.sequence <= wanted

    def _next(self) -> Transfer | None:
        """What the leader is to wait for: on a device group only headers take a host's wait."""
        return first_of(self._incoming.deferred) if self.mover.streams else first_of(self.queue)

    def _set_due(self, transfer: Transfer, timeout: float | None) -> None:
        if timeout is not None:
            transfer.seconds = timeout
            transfer.due = time.monotonic() + timeout
        elif transfer.due == math.inf:
            transfer.seconds = self.config.deadline
            transfer.due = time.monotonic() + transfer.seconds

    # ---- The progress thread

    def sweep(self, now: float) -> None:
        """See ends and deadlines of transfers without a waiting thread."""
        if self.error is not None:  # another thread started these while the lane ended
            self.finish(self.error)
            return
        if self.mover.polled:
            self._see_ends()
        if self.mover.streams and self.queue and self._has_final_notice(now):
            self.explain(RuntimeError("the other side ended the lane"), first_of(self.queue))
            return
        for transfer in self.queue.copy():
            if transfer.posted_at == math.inf:
                transfer.posted_at = now
            if transfer.due == math.inf and (transfer.sending or transfer.waited):
                transfer.due = now + self.config.deadline
                transfer.seconds = self.config.deadline
            if now >= transfer.due:
                self.fail(self._timed_out(transfer), kind="timeout")
                return
        if not self.mover.polled:
            queue = self.queue.copy()
            if queue and queue[0].sending and now - queue[0].posted_at > _UNATTENDED_SECONDS:
                # Only those that the backend has: another thread may be about to start the last ones.
                posted = [transfer for transfer in queue if transfer.ticket is not None]
                if posted:
                    self._wait_lock.watch(posted[-1])

    def _has_final_notice(self, now: float) -> bool:
        """Whether the other side has ended the lane; transfers that it closed after get a moment to end."""
        if self.wire is None or not self.wire.has_end_notice():
            return False
        if (self.wire.end_notice() or ("", ""))[0] != "closed":
            return True
        self._closed_by_peer = min(self._closed_by_peer, now)
        return now - self._closed_by_peer > _CLOSED_SECONDS

    def drain(self, end: float) -> None:
        """Hold the host until transfers that were ordered or sent are done and read, or until ``end`` (monotonic)."""
        for transfer in self.queue.copy() if self.mover.streams else ():
            while self.error is None and transfer.state is _ACTIVE and transfer.ticket is not None:
                if self._is_done(transfer):
                    self._seen_done(transfer)
                elif time.monotonic() >= end or not (transfer.sending or transfer.waited):
                    break
                else:
                    time.sleep(_POLL_SECONDS)
        with contextlib.suppress(RuntimeError):  # the other side is gone, or reads no more
            while self.mover.streams and self.error is None and time.monotonic() < end:
                if (work := first_of(self.header_works)) is None:
                    break
                work.wait(timedelta_of(end - time.monotonic()))
                with contextlib.suppress(IndexError):  # the lane has ended meanwhile
                    self.header_works.popleft()

    # ---- Ends

    def require_alive(self) -> None:
        """Raise on a lane that has ended."""
        if self.error is not None:
            relay = f"lane {self.spec} is dead on rank {self.rank} since; open new lanes"
            raise P2PLaneDeadError(relayed(text_of(self.error), relay)) from self.error

    def fail(self, error: P2PError, *, kind: str) -> None:
        """End the lane, and all of its communicator, because of ``error``; ``kind`` goes to the other side."""
        end_together([End(self, error, text_of(error))], kind=kind)

    def explain(self, error: RuntimeError, transfer: Transfer | None) -> None:
        """Find out why the backend failed, and end the lane with that."""
        if self.error is None:
            abort = device_aborts.of(self.connection.group)
            if abort is None:
                found, kind = self._cause_of(error, transfer), "lost"
            else:  # of a failure elsewhere on this rank, which the other side is to learn
                text = relayed(abort.cause, f"lane {self.spec} was aborted on rank {self.rank}")
                found, kind = P2PLaneDeadError(text), "aborted"
            found.__cause__ = error
            self.fail(found, kind=kind)
        if transfer is not None:
            self._ended(transfer, _FAILED, self.error)

    def _cause_of(self, error: RuntimeError, transfer: Transfer | None) -> P2PError:
        notice = None if self.wire is None else self.wire.end_notice()
        if notice is not None:
            kind, text = notice
            told = P2PMismatchError if kind == "mismatch" else P2PPeerError
            return told(relayed(text, f"rank {self.peer} ended lane {self.spec}"))
        if transfer is not None and time.monotonic() >= transfer.due:
            return self._timed_out(transfer)
        what = "" if transfer is None else f" while {_verb(transfer)} message {transfer.sequence} of lane {self.spec}"
        return P2PPeerError(
            f"rank {self.rank} lost rank {self.peer}{what}: rank {self.peer} died, or closed its connection; "
            f"look at its output first ({text_of(error).splitlines()[0]})"
        )

    def _timed_out(self, transfer: Transfer) -> P2PTimeoutError:
        return P2PTimeoutError(
            rank=self.rank,
            peer=self.peer,
            lane=str(self.spec),
            sequence=transfer.sequence,
            seconds=transfer.seconds,
            what=_verb(transfer),
        )

    def _ended(self, transfer: Transfer, state: State, error: BaseException | None = None) -> None:
        """Set the end of a transfer, wake its waiters, call its callbacks."""
        with self._lock:
            if transfer.state is not _ACTIVE:
                return
            # The state first: `wait_for` takes an active transfer off the queue without this lock.
            transfer.error = error
            transfer.state = state
            if self.queue and self.queue[0] is transfer:
                self.queue.popleft()
            elif self.wire is None and transfer in self.queue:
                self.queue.remove(transfer)  # both ends of the lane are in one queue
            if state is _FAILED:
                self.connection.keep(transfer.tensors)
            if transfer.sending:
                transfer.tensors = ()
            self._wait_lock.notify()
        if transfer.callbacks:
            self._tell_all(transfer)

    def _tell_all(self, transfer: Transfer) -> None:
        with self._lock:
            callbacks, transfer.callbacks = transfer.callbacks, ()
        for callback in callbacks:
            try:
                callback(transfer)
            except Exception as error:  # noqa: BLE001 -- it may run on a thread without a caller
                found = P2PUsageError(
                    f"{type(error).__name__}: {text_of(error)} (raised by the on_done callback {callback!r} of message "
                    f"{transfer.sequence} of lane {self.spec}, which has ended with it)"
                )
                found.__cause__ = error
                self.fail(found, kind="aborted")

    def _raise_failure(self, transfer: Transfer) -> None:
        """Raise what a wait for a transfer raises that has failed, or was not started."""
        if transfer.state is _FAILED and transfer.error is not None:
            raise transfer.error
        if transfer.state is _PENDING:
            raise P2PUsageError(f"{transfer!r} is waited for inside the batch() that is to start it; wait after it")

    def not_started(self, transfer: Transfer, error: RuntimeError) -> NoReturn:
        """Raise the cause where the backend did not take a transfer; the lane ends with it."""
        if isinstance(error, P2PError):
            raise error
        self.explain(error, transfer)
        raise self.error or error from error

    def finish(self, error: P2PError) -> None:
        """Fail the transfers under way: the last part of an end."""
        self._wait_lock.end()
        for transfer in self.queue.copy():
            self._ended(transfer, _FAILED, error)
        self.queue.clear()
        self.header_works.clear()
        self._incoming.finish()

    def take_error(self, error: P2PError) -> bool:
        """Note why the lane ends; False where it has ended before."""
        with self._lock:
            if self.error is not None:
                return False
            self._last_queue = [repr(one) for one in self.queue.copy()]
            self.error = error
            return True

    def under_way(self) -> list[str]:
        """The transfers under way, in words; on a lane that has ended, those of then."""
        return list(self._last_queue) if self.error is not None else [repr(one) for one in self.queue.copy()]

    def join(self) -> None:
        """Return when no thread of the lane runs any more; the lane has ended."""
        self._wait_lock.join()


def _verb(transfer: Transfer) -> str:
    return "sending" if transfer.sending else "receiving"
