"""Blocking calls with a deadline: a store whose process is stopped never answers, and its client has no timeout."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from attrs import define, field

from pipegrid.schedules.monitor.control import STORE_VERBS, ControlStore

_T = TypeVar("_T")
_JOIN_SECONDS = 1.0


class SilentStoreError(RuntimeError):
    """A store did not answer before the deadline of a call."""


@define(eq=False)
class _Call:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    done: threading.Lock = field(factory=threading.Lock)
    result: Any = None
    error: BaseException | None = None
    abandoned: bool = False


class BoundedCalls:
    """Runs calls one at a time on a helper thread and waits for each no longer than its deadline."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _end, self._calls, self._threads)

    def run(self, function: Callable[..., _T], *arguments: Any, seconds: float) -> _T:
        """The result of ``function(*arguments)``, within ``seconds``; not started by then, it never is.

        Raises:
            SilentStoreError: it did not return in time, or the thread was closed.
        """
        if not self._finalizer.alive:
            raise SilentStoreError("the thread that asks the store was closed")
        if not self._threads:
            self._threads.append(
                threading.Thread(target=_serve, args=(self._calls,), name="pipegrid-store", daemon=True)
            )
            self._threads[0].start()
        call = _Call(function, arguments)
        call.done.acquire()
        self._calls.put(call)
        if not call.done.acquire(timeout=seconds):
            call.abandoned = True
            raise SilentStoreError(f"the store did not answer within {seconds:.3g} s")
        if call.error is not None:
            raise call.error
        result: _T = call.result
        return result

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._finalizer()


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        if call.abandoned:
            continue
        try:
            call.result = call.function(*call.arguments)
        except BaseException as error:  # noqa: BLE001 -- raised again in the thread that waits for it
            call.error = error
        call.done.release()
        del call


def _end(calls: queue.SimpleQueue[_Call | None], threads: list[threading.Thread]) -> None:
    calls.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)  # a store that is silent for good holds its thread, which is a daemon


def bounded_store(store: ControlStore, calls: BoundedCalls, seconds: float) -> ControlStore:
    """``store``, of which every call ends within ``seconds``, with an answer or a `SilentStoreError`."""
    verbs = {verb: partial(calls.run, getattr(store, verb), seconds=seconds) for verb in STORE_VERBS}
    return cast("ControlStore", SimpleNamespace(**verbs))
