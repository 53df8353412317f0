"""Calls of a store with a deadline.

A store whose process is stopped never answers, and torch's timeouts do not end the call of its client. No torch.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from attrs import define, field

_T = TypeVar("_T")
_ASK_SECONDS = 0.1


class SilentStoreError(RuntimeError):
    """A store did not answer before the deadline of a call."""


_here = threading.local()


@contextmanager
def giving_up(why: Callable[[], str]) -> Iterator[None]:
    """Let this thread, in the block, give up the groups that it creates once ``why()`` is a text.

    So a rank that knows of a death does not wait out the timeout of the dead one. ``why`` is asked several times a
    second, in other threads as well.
    """
    before, _here.why = reason_to_give_up(), why
    try:
        yield
    finally:
        _here.why = before


def reason_to_give_up() -> Callable[[], str]:
    """The ``why`` of `giving_up` in this thread; outside of it `str`, which gives an empty text."""
    why: Callable[[], str] = getattr(_here, "why", str)
    return why


@define(eq=False)
class BoundedCall:
    """A call of ``function(*arguments)`` that was started at ``begun``, in `time.monotonic` seconds.

    Attributes:
        done: locked until it has returned or raised: ``result``, ``error``.
        given_up: its wait ended at the deadline; a call that the thread has not begun by then is dropped.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    begun: float
    done: threading.Lock = field(factory=threading.Lock)
    result: Any = None
    error: BaseException | None = None
    given_up: bool = False


class BoundedCalls:
    """Runs calls one at a time on a thread of its own and waits for each no longer than its deadline.

    The thread ends with `close`, at the interpreter's exit, or when this object is dropped.

    Args:
        name: of the thread.
        patience: seconds that its end waits for a call under way: the interpreter's exit may end the process at the
            moment at which such a call returns. A call that has been under way for as long is waited for no longer.
    """

    def __init__(self, name: str = "pipegrid-store", *, patience: float = 1.0) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[BoundedCall | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._silent: list[BoundedCall] = []  # the last one that was given up
        self._finalizer = weakref.finalize(self, _end, self._calls, self._threads, patience, self._silent)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._finalizer.alive

    @property
    def stuck(self) -> bool:
        """Whether a call that was given up still holds the thread, so that the next one may wait behind it."""
        return any(call.done.locked() for call in self._silent)

    def run(
        self,
        function: Callable[..., _T],
        *arguments: Any,
        seconds: float,
        given_up: Callable[[], object] = lambda: False,
    ) -> _T:
        """The result of ``function(*arguments)``, as `start` and `wait` have it."""
        result: _T = self.wait(self.start(function, *arguments), seconds=seconds, given_up=given_up)
        return result

    def start(self, function: Callable[..., _T], *arguments: Any) -> BoundedCall:
        """Have ``function(*arguments)`` called on the thread, behind those before it; `SilentStoreError` if closed."""
        if self.closed:
            raise SilentStoreError("the thread that asks the store was closed")
        if not self._threads:
            self._threads.append(threading.Thread(target=_serve, args=(self._calls,), name=self._name, daemon=True))
            self._threads[0].start()
        call = BoundedCall(function, arguments, time.monotonic())
        call.done.acquire()
        self._calls.put(call)
        return call

    def wait(self, call: BoundedCall, *, seconds: float, given_up: Callable[[], object] = lambda: False) -> Any:
        """The result of a call of `start`, within ``seconds`` from now; `SilentStoreError` where it has not returned.

        ``given_up`` is asked every 0.1 s; once it is true, the wait ends as at the deadline.
        """
        end = time.monotonic() + seconds
        while not call.done.acquire(timeout=max(0.0, min(_ASK_SECONDS, end - time.monotonic()))):
            if time.monotonic() >= end or given_up():
                call.given_up = True
                if not self.stuck:  # else that call holds the thread
                    self._silent[:] = [call]
                raise SilentStoreError(f"the store did not answer within {seconds:.3g} s")
        call.done.release()
        if call.error is not None:
            raise call.error
        return call.result

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._finalizer()


def bounded(
    function: Callable[..., _T],
    *arguments: Any,
    seconds: float,
    name: str = "pipegrid-store",
    patience: float = 1.0,
    given_up: Callable[[], object] = lambda: False,
) -> _T:
    """One call of `BoundedCalls`; after a `SilentStoreError` its thread is left behind."""
    calls = BoundedCalls(name, patience=patience)
    try:
        return calls.run(function, *arguments, seconds=seconds, given_up=given_up)
    finally:
        calls.close()


def _serve(calls: queue.SimpleQueue[BoundedCall | None]) -> None:
    while (call := calls.get()) is not None:
        if not call.given_up:
            try:
                call.result = call.function(*call.arguments)
            except BaseException as error:  # noqa: BLE001 -- raised again in the thread that waits for it
                call.error = error
        call.done.release()
        del call  # it may hold the object whose end ends this thread


def _end(
    calls: queue.SimpleQueue[BoundedCall | None],
    threads: list[threading.Thread],
    patience: float,
    silent: list[BoundedCall],
) -> None:
    calls.put(None)
    waited = max((time.monotonic() - call.begun for call in silent if call.done.locked()), default=0.0)
    for thread in threads:
        if thread is not threading.current_thread():
            # A store that is silent for good holds its thread, which is a daemon.
            thread.join(max(0.0, patience - waited))
