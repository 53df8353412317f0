"""The lock of waits in the backend for a lane: one thread at a time, the leader; the others follow.

A work of a backend can be waited for once, by one thread. A caller that waits anyway becomes the leader, so the common
case needs no hop between threads. The lane's own thread leads where no other thread waits and an end must be seen: a
handle was asked whether it is done, a header must be received before a buffer can be posted, or sends pile up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipegrid.transport.errors import P2PError
from pipegrid.transport.messages.handle import State, Transfer

# The first question whether a transfer is done hands it to a thread, which needs a moment to see it.
_GRACE_SECONDS = 0.0005


class BackgroundThread(threading.Thread):
    """A thread of this package: it never starts transfers on device groups."""


class WaitLock:
    """The lock of the thread that waits for a lane, and those that follow it.

    ``step`` waits for one thing, on behalf of a transfer or (None) of the lane's own thread, called ``name``, for which
    there is something up to a sequence number where ``has_work``.
    """

    def __init__(self, name: str, step: Callable[[Transfer | None], None], has_work: Callable[[int], bool]) -> None:
        self.states = threading.Lock()  # guards the states of the lane's transfers
        # Held by the thread that waits in the backend; its holder calls `wake` after releasing it, if ``contended``.
        self.leader = threading.Lock()
        self.contended = False  # whether a thread may be waiting for the lead
        self._name, self._step, self._has_work = name, step, has_work
        self._changed = threading.Condition(self.states)  # followers
        self._called = threading.Condition(self.states)  # the lane's own thread
        self._followers = 0
        self._watched = -1  # the lane's own thread sees transfers up to this number
        self._thread: threading.Thread | None = None
        self._over = False

    def until(self, transfer: Transfer, *, posted: bool, left: Callable[[Transfer], float]) -> None:
        """Return when ``transfer`` has ended, or (with ``posted``) when the backend has it.

        ``left``: seconds left to follow another thread; ends the lane where there are none.
        """
        while _is_open(transfer, posted=posted):
            if self.leader.acquire(blocking=False):
                try:
                    while _is_open(transfer, posted=posted):
                        self._step(transfer)
                finally:
                    self._release()
            else:
                seconds = left(transfer)
                with self._following():
                    if self.leader.locked() and _is_open(transfer, posted=posted):
                        self._changed.wait(seconds)

    @contextmanager
    def lead(self) -> Iterator[None]:
        """Be the leader, as soon as there is none, inside the block."""
        while not self.leader.acquire(blocking=False):
            with self._following():
                if self.leader.locked():
                    self._changed.wait()
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        self.leader.release()
        if self.contended:
            self.wake()

    @contextmanager
    def _following(self) -> Iterator[None]:
        # Contended is set before the leader is looked at; a leader that leaves looks in the other order, so that one of
        # the two notices.
        with self.states:
            self._followers += 1
            self.contended = True
            try:
                yield
            finally:
                self._followers -= 1
                self.contended = self._followers > 0 or self._watched >= 0

    def wake(self) -> None:
        """Wake the followers: the leader has left."""
        with self.states:
            self.notify()

    def notify(self) -> None:
        """Wake the followers: a transfer has ended. Under the lock."""
        if self._followers:
            self._changed.notify_all()
        if self._watched >= 0:
            self._called.notify()

    def watch(self, transfer: Transfer) -> None:
        """Have the lane's own thread see the end of ``transfer``."""
        with self.states:
            if self._over:
                return
            self._watched = max(self._watched, transfer.sequence)
            self.contended = True
            if self._thread is None:
                self._thread = BackgroundThread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._called.notify()

    def ask(self, transfer: Transfer) -> None:
        """Like `watch`, with a moment's patience the first time."""
        asked_before = self._watched >= transfer.sequence
        self.watch(transfer)
        if not asked_before:
            with self._following():
                self._changed.wait_for(lambda: transfer.state is not State.ACTIVE, _GRACE_SECONDS)

    def _run(self) -> None:
        while self._lead_when_needed():
            try:
                self._step(None)
            except P2PError:
                return  # the lane has failed, and its transfers carry the error
            finally:
                self._release()

    def _lead_when_needed(self) -> bool:
        """Become the leader when there is something to wait for; False when the lane is over."""
        with self.states:
            while not self._over:
                if not self._has_work(self._watched):
                    self._watched = -1
                    self.contended = self._followers > 0
                elif self.leader.acquire(blocking=False):
                    return True
                self._called.wait()
        return False

    def end(self) -> None:
        """End the lane's own thread, once nothing holds it in the backend."""
        with self.states:
            self._over = True
            self._called.notify()
            self._changed.notify_all()

    def join(self) -> None:
        """Return when the lane's own thread, if any, has ended."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _is_open(transfer: Transfer, *, posted: bool) -> bool:
    return transfer.state is State.ACTIVE and not (posted and transfer.ticket is not None)
