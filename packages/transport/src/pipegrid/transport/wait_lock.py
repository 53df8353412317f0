"""Who waits in the backend for a lane: one thread at a time.

A work of a backend can be waited for once, by one thread, so somebody has to take the turn. A caller that waits
anyway takes it: the common case costs no hop between threads. The lane's own thread takes it where nobody waits
and somebody wants to know: it is started when a handle is asked whether it is done, when a header must be received
before a buffer can be posted, or when sends pile up unwaited.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipegrid.transport.errors import P2PError
from pipegrid.transport.handle import State, Transfer

# The first question whether a transfer is done hands it to a thread, which needs a moment to see it.
_GRACE_SECONDS = 0.0005


class WaitLock:
    """WaitLock at waiting for the head of a lane.

    Args:
        lock: guards the states of the lane's transfers.
        name: of the lane's own thread.
        step: waits for one thing, for the sake of a transfer or (None) of nobody in particular.
        has_wanted: whether something up to a sequence number is still to be waited for.

    Attributes:
        turn: held by the thread whose turn it is. Whoever releases it calls `pass_on` afterwards, if ``contended``.
        contended: whether somebody may be waiting for the turn.
    """

    def __init__(
        self,
        lock: threading.Lock,
        name: str,
        step: Callable[[Transfer | None], None],
        has_wanted: Callable[[int], bool],
    ) -> None:
        self.turn = threading.Lock()
        self.contended = False
        self._lock = lock
        self._name = name
        self._step = step
        self._has_wanted = has_wanted
        self._changed = threading.Condition(lock)  # those who wait for a turn, or for another thread's to end theirs
        self._called = threading.Condition(lock)  # the lane's own thread
        self._waiters = 0
        self._wanted = -1
        self._thread: threading.Thread | None = None
        self._over = False

    def until(self, transfer: Transfer, *, posted: bool, left: Callable[[Transfer], float]) -> None:
        """Return when ``transfer`` has ended, or (with ``posted``) when the backend has it.

        Args:
            transfer: of this lane.
            posted: do not wait for the end.
            left: seconds left to wait for another thread's turn; it ends the lane where there are none.
        """
        while _is_open(transfer, posted=posted):
            if self.turn.acquire(blocking=False):
                try:
                    while _is_open(transfer, posted=posted):
                        self._step(transfer)
                finally:
                    self._release()
            else:
                self._wait(transfer, left(transfer), posted=posted)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the turn, as soon as it is free, for what is done inside."""
        while not self.turn.acquire(blocking=False):
            with self._waiting():
                if self.turn.locked():
                    self._changed.wait()
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        self.turn.release()
        if self.contended:
            self.pass_on()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        # Contended before it is asked whether the turn is taken: whoever releases it asks in the other order, so
        # that one of the two notices.
        with self._lock:
            self._waiters += 1
            self.contended = True
            try:
                yield
            finally:
                self._waiters -= 1
                self.contended = self._waiters > 0 or self._wanted >= 0

    def _wait(self, transfer: Transfer, seconds: float, *, posted: bool) -> None:
        with self._waiting():
            if self.turn.locked() and _is_open(transfer, posted=posted):
                self._changed.wait(seconds)

    def pass_on(self) -> None:
        """Wake those who wait for the turn."""
        with self._lock:
            self._wake()

    def notify(self) -> None:
        """A transfer has ended. Under the lock."""
        if self.contended:
            self._wake()

    def _wake(self) -> None:
        if self._waiters:
            self._changed.notify_all()
        if self._wanted >= 0:
            self._called.notify()

    def want(self, transfer: Transfer) -> None:
        """Have the end of ``transfer`` seen by the lane's own thread."""
        with self._lock:
            if self._over:
                return
            self._wanted = max(self._wanted, transfer.sequence)
            self.contended = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._look_after, name=self._name, daemon=True)
                self._thread.start()
            self._called.notify()

    def ask(self, transfer: Transfer) -> None:
        """See to it that the end of ``transfer`` is seen; give it a moment the first time."""
        asked_before = self._wanted >= transfer.sequence
        self.want(transfer)
        if not asked_before:
            with self._waiting():
                self._changed.wait_for(lambda: transfer.state is not State.PENDING, _GRACE_SECONDS)

    def _look_after(self) -> None:
        while self._next_turn():
            try:
                self._step(None)
            except P2PError:
                return  # the lane has failed, and its transfers carry the error
            finally:
                self._release()

    def _next_turn(self) -> bool:
        """Take the turn when there is something to do with it; False when the lane is over."""
        with self._lock:
            while not self._over:
                if not self._has_wanted(self._wanted):
                    self._wanted = -1
                    self.contended = self._waiters > 0
                elif self.turn.acquire(blocking=False):
                    return True
                self._called.wait()
        return False

    def end(self) -> None:
        """The lane is over: so is its thread, once nothing holds it in the backend."""
        with self._lock:
            self._over = True
            self._called.notify()
            self._changed.notify_all()

    def join(self) -> None:
        """Return when the lane's own thread, if any, is over."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _is_open(transfer: Transfer, *, posted: bool) -> bool:
    return transfer.state is State.PENDING and not (posted and transfer.works is not None)
