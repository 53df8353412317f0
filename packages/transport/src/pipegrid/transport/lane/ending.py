"""Who ends a lane, and with what error: its transfers fail, the other side is told why, connections are cut."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

from pipegrid.transport.backends.wire import timedelta_of
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
from pipegrid.transport.lane.connection import Connection
from pipegrid.transport.lane.endpoint import Endpoint, Outgoing
from pipegrid.transport.messages.handle import State, Transfer
from pipegrid.transport.waits.aborts import device_aborts
from pipegrid.transport.waits.wait_lock import WaitLock

# Until an end notice must have been taken, by kind. A loaded machine may hold up a peer that is alive, and the type of
# its error depends on a mismatch's notice; the others go to peers that did not answer for a whole deadline, or that end
# too.
_TELL_SECONDS = {"mismatch": 5.0, "aborted": 2.0}
_TELL_OTHERS_SECONDS = 1.0
_ABORT_SECONDS = 5.0  # until groups must have been aborted, which on a device waits for kernels

# Module names: members of an Enum are looked up slowly.
_ACTIVE, _FAILED, _PENDING = State.ACTIVE, State.FAILED, State.PENDING


class LaneEnding:
    """The end of a lane and of each of its transfers, which are in ``queue``; ``error`` is why the lane is dead."""

    def __init__(self, end: Endpoint, *, outgoing: Outgoing, queue: deque[Transfer], wait_lock: WaitLock) -> None:
        self.spec, self.rank, self.peer, self.connection = end.spec, end.rank, end.peer, end.connection
        self.queue = queue  # transfers that were started, in order, and have not been seen to end
        self.error: P2PError | None = None
        self._wire, self._outgoing = end.wire, outgoing
        self._wait_lock, self._states = wait_lock, wait_lock.states
        self._last_queue: list[str] = []  # under way when the lane ended

    # ---- Why a lane ends

    def fail(self, error: P2PError, *, kind: str) -> None:
        """End the lane, and all of its communicator, because of ``error``; ``kind`` goes to the other sides."""
        end_together([(self, error, text_of(error))], kind=kind)

    def explain(self, error: RuntimeError, transfer: Transfer | None) -> None:
        """Find out why the backend failed, and end the lane with that."""
        if self.error is None:
            if (abort := device_aborts.of(self.connection.group)) is None:
                found, kind = self._cause_of(error, transfer), "lost"
            else:  # of a failure elsewhere on this rank, which the other side is to learn
                text = relayed(abort.cause, f"lane {self.spec} was aborted on rank {self.rank}")
                found, kind = P2PLaneDeadError(text), "aborted"
            found.__cause__ = error
            self.fail(found, kind=kind)
        if transfer is not None:
            self.set_end(transfer, _FAILED, self.error)

    def _cause_of(self, error: RuntimeError, transfer: Transfer | None) -> P2PError:
        if self._wire is not None and (notice := self._wire.end_notice()) is not None:
            told = P2PMismatchError if notice[0] == "mismatch" else P2PPeerError
            return told(relayed(notice[1], f"rank {self.peer} ended lane {self.spec}"))
        if transfer is not None and time.monotonic() >= transfer.due:
            return self._timed_out(transfer)
        what = "" if transfer is None else f" while {_verb(transfer)} message {transfer.sequence} of lane {self.spec}"
        return P2PPeerError(
            f"rank {self.rank} lost rank {self.peer}{what}: rank {self.peer} died, or closed its connection; "
            f"look at its output first ({text_of(error).splitlines()[0]})"
        )

    def time_out(self, transfer: Transfer) -> None:
        """End the lane because ``transfer`` is not done by its deadline."""
        self.fail(self._timed_out(transfer), kind="timeout")

    def _timed_out(self, transfer: Transfer) -> P2PTimeoutError:
        return P2PTimeoutError(
            rank=self.rank,
            peer=self.peer,
            lane=str(self.spec),
            sequence=transfer.sequence,
            seconds=math.inf if transfer.limit is None else transfer.limit.seconds,
            what=_verb(transfer),
        )

    def not_started(self, transfer: Transfer, error: RuntimeError) -> NoReturn:
        """Raise the cause where the backend did not take a transfer; the lane ends with it."""
        if isinstance(error, P2PError):
            raise error
        self.explain(error, transfer)
        raise self.error or error from error

    # ---- The two parts of an end: see `end_together`

    def take_error(self, error: P2PError) -> bool:
        """Note why the lane ends; False where it has ended before."""
        with self._states:
            if self.error is not None:
                return False
            self._last_queue = [repr(one) for one in self.queue.copy()]
            self.error = error
            return True

    def finish(self, error: P2PError) -> None:
        """Fail the transfers under way."""
        self._wait_lock.end()
        for transfer in self.queue.copy():
            self.set_end(transfer, _FAILED, error)
        self.queue.clear()
        self._outgoing.header_works.clear()

    # ---- The end of a transfer

    def set_end(self, transfer: Transfer, state: State, error: BaseException | None = None) -> None:
        """Set the end of a transfer, wake its waiters, call its callbacks."""
        with self._states:
            if transfer.state is not _ACTIVE:
                return
            # The state first: `HostWaits.wait_for` takes an active transfer off the queue without this lock.
            transfer.error = error
            transfer.state = state
            if self.queue and self.queue[0] is transfer:
                self.queue.popleft()
            elif self._wire is None and transfer in self.queue:
                self.queue.remove(transfer)  # both ends of the lane are in one queue
            if state is _FAILED:
                self.connection.keep(transfer.tensors)
            if transfer.sending:
                transfer.tensors = ()
            self._wait_lock.notify()
        if transfer.callbacks:
            self.call_back(transfer)

    def call_back(self, transfer: Transfer) -> None:
        """Call the callbacks of a transfer that has ended; one that raises ends the lane."""
        with self._states:
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

    def raise_failure(self, transfer: Transfer) -> None:
        """Raise what a wait for a transfer raises that has failed, or was not started."""
        if transfer.state is _FAILED and transfer.error is not None:
            raise transfer.error
        if transfer.state is _PENDING:
            raise P2PUsageError(f"{transfer!r} is waited for inside the batch() that is to start it; wait after it")

    # ---- What is known of the end

    def require_alive(self) -> None:
        """Raise on a lane that has ended."""
        if self.error is not None:
            relay = f"lane {self.spec} is dead on rank {self.rank} since; open new lanes"
            raise P2PLaneDeadError(relayed(text_of(self.error), relay)) from self.error

    @property
    def notice(self) -> str | None:
        """The kind of the other side's end notice; None before it came. Looks at memory only."""
        wire = self._wire
        found = wire.end_notice() if wire is not None and wire.has_end_notice() else None
        return None if found is None else found[0]

    @property
    def failed(self) -> bool:
        """Whether the lane ended here, or the other side ended it by anything but `Lanes.close`."""
        return self.error is not None or self.notice not in (None, "closed")

    def under_way(self) -> list[str]:
        """The transfers under way, in words; on a lane that has ended, those of then."""
        return list(self._last_queue) if self.error is not None else [repr(one) for one in self.queue.copy()]


# A lane that ends, the error of its transfers, and the text for its other side.
End: TypeAlias = tuple[LaneEnding, P2PError, str]


def abort_lanes(lanes: Sequence[LaneEnding], reason: str) -> None:
    """End lanes at once, and tell all other sides why before any connection is cut."""
    reason = text_of(reason)
    causes = [relayed(reason, f"lane {lane.spec} was aborted on rank {lane.rank}") for lane in lanes]
    ends = [(lane, P2PLaneDeadError(cause), reason) for lane, cause in zip(lanes, causes, strict=True)]
    end_together(ends, kind="aborted")


def end_together(ends: Sequence[End], *, kind: str) -> None:
    """End lanes; ``kind`` goes to their other sides.

    All other sides are told, and all device groups aborted at the same time, before anything is waited for: torch's
    watchdog may end the process seconds after an error that no abort came before. Then all connections are cut. On a
    device an abort waits for kernels of groups that are not aborted yet, of other lanes or of the caller: nothing here
    waits for aborts, so that every waiter has its error at once; see `await_aborts`. Each part is bounded. The other
    lanes of a communicator end with the first cause on it.
    """
    over: list[tuple[LaneEnding, P2PError]] = []
    connections: dict[int, tuple[Connection, str, int]] = {}
    siblings = [(sibling, error, text) for lane, error, text in ends for sibling in lane.connection.lanes]
    for lane, error, text in (*ends, *siblings):
        if lane.take_error(error):
            over.append((lane, error))
            connections.setdefault(id(lane.connection), (lane.connection, text, lane.peer))
    # A group of a device with nothing under way is shut down, which waits for the device; any other is aborted.
    busy = [
        one
        for one, _, _ in connections.values()
        if kind != "closed" or not one.mover.streams or any(lane.queue for lane in one.lanes)
    ]
    limit = time.monotonic() + _TELL_SECONDS.get(kind, _TELL_OTHERS_SECONDS)
    telling = [
        wire.post_end_notice(kind, text)
        for connection, text, lost in connections.values()
        for peer, wire in connection.wires.items()
        # A device group may be lost while its wire, another connection, is not.
        if not connection.told and (kind != "lost" or peer != lost or connection.mover.streams)
    ]
    for connection in busy:
        if connection.mover.streams:
            connection.abort(connections[id(connection)][1])
    for work in telling:
        _finish(work, limit)
    for connection, _, _ in connections.values():
        for wire in connection.wires.values():
            wire.cut()
    for connection in busy:
        if not connection.mover.streams:
            connection.abort(connections[id(connection)][1])
    for lane, error in over:
        lane.finish(error)


def _finish(work: Any, limit: float) -> None:
    if work is not None:
        try:
            work.wait(timedelta_of(limit - time.monotonic()))
        except RuntimeError:  # a connection that is gone tells the other side as well
            return


def await_aborts(connections: Iterable[Connection]) -> None:
    """Return when the aborts under way have ended, which on a device wait for its kernels, or after 5 s."""
    limit = time.monotonic() + _ABORT_SECONDS
    for connection in connections:
        if connection.aborting is not None:
            connection.aborting.ended.wait(max(0.0, limit - time.monotonic()))


def _verb(transfer: Transfer) -> str:
    return "sending" if transfer.sending else "receiving"
