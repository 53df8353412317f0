"""A clock that a test moves: weeks pass in this process between two steps, for Python's clocks and for torch's waits.

Python's clocks (`time.monotonic`, `time.time`) are ahead of the machine's by what the test has moved. A wait inside of
torch does not see them: each ``Work.wait`` that is under way is kept with its date and its bound, and one whose bound a
move has passed ends as it would have, past its bound. Gloo closes the connection of the two ranks then, at both ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from attrs import define, field

from pipegrid.fake_nccl.torch_compat import BackendBase, GroupBase, WorkBase

_NEVER_SENT = 2**30 + 1  # a tag


@define(eq=False)
class _TorchWait:
    """A wait under way: of which work, since when, and how long at most, in seconds of the moved clock."""

    work: Any
    since: float
    bound: float
    over: bool = False


@define(eq=False)
class MovedClock:
    """The clock of this process inside `moved_clock`.

    Attributes:
        passed: seconds that it was moved by.
        ended: waits of torch that a move has ended, as texts.
    """

    passed: float = 0.0
    ended: list[str] = field(factory=list)
    _waits: list[_TorchWait] = field(factory=list)
    _transfers: weakref.WeakKeyDictionary[Any, tuple[Callable[..., Any], int]] = field(
        factory=weakref.WeakKeyDictionary
    )
    _lock: threading.Lock = field(factory=threading.Lock)

    def move(self, seconds: float) -> None:
        """Let ``seconds`` pass. Transfers that wait in torch, past their bound by then, end; collectives are noted."""
        with self._lock:
            self.passed += seconds
            now = time.monotonic()
            over = [wait for wait in self._waits if not wait.over and now - wait.since > wait.bound]
            for wait in over:
                wait.over = True
                self.ended.append(
                    f"a wait of {timedelta(seconds=wait.bound)}, which began {timedelta(seconds=now - wait.since)} ago"
                )
            closing = [self._transfers.get(wait.work) for wait in over]
        for transfer in closing:
            if transfer is not None:
                receive, peer = transfer
                with contextlib.suppress(RuntimeError):  # what times out closes the connection
                    _wait(receive([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT), timedelta(milliseconds=1))


_wait: Callable[..., Any] = WorkBase.wait
_INHERITED = object()


@contextmanager
def moved_clock() -> Iterator[MovedClock]:
    """Give this process, inside the block, a clock that `MovedClock.move` moves. Make groups and lanes inside.

    A wait without a bound of its own has its group's, which is not kept here: moves belong between steps, where only
    waits without an expected end are under way. Sleeps and waits of Python's own threads take the time that they take.
    """
    clock = MovedClock()
    waits, transfers, lock = clock._waits, clock._transfers, clock._lock  # noqa: SLF001
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        replaced.append((owner, name, vars(owner).get(name, _INHERITED)))  # itself: what `getattr` gives binds no self
        setattr(owner, name, make(getattr(owner, name)))

    def ahead(real: Callable[[], float]) -> Callable[[], float]:
        return lambda: real() + clock.passed

    def noted(real: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, timeout: timedelta | None = None) -> Any:
            if timeout is None or timeout <= timedelta(0):  # which is none, too
                return real(work)
            own = _TorchWait(work, time.monotonic(), timeout.total_seconds())
            with lock:
                waits.append(own)
            try:
                return real(work, timeout)
            except RuntimeError as error:
                if own.over:
                    raise RuntimeError(f"Timed out waiting {timeout} on the moved clock") from error
                raise
            finally:
                with lock:
                    waits.remove(own)

        return wait

    def known(real: Callable[..., Any], receive: Callable[..., Any]) -> Callable[..., Any]:
        def transfer(group: Any, tensors: Any, peer: int, tag: int) -> Any:
            work = real(group, tensors, peer, tag)
            if work is not None:
                transfers[work] = partial(receive, group), peer
            return work

        return transfer

    for name in ("monotonic", "time"):
        replace(time, name, ahead)
    replace(WorkBase, "wait", noted)
    for owner in (GroupBase, BackendBase):
        receive = owner.recv
        for name in ("send", "recv"):
            replace(owner, name, partial(known, receive=receive))
    try:
        yield clock
    finally:
        for owner, name, real in reversed(replaced):
            if real is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, real)
