"""Aborts of device groups: all at once, and no work of the device is polled while one of them drains.

An abort frees memory of its group, which waits for every kernel of the device, those of other groups included. A poll
(`Work.is_completed`, `Event.query`: torch binds both without releasing the interpreter's lock) may wait in the driver
behind that free. Then no thread of the process runs, and none can abort the group whose kernel the free waits for.

`device_aborts` is state of the process, because the device is: an abort of one communicator holds up the polls of all
others, also of other users of the process. It changes no result: pollers answer "not yet" until the aborts have ended,
and for a group that was aborted the cause.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from attrs import define, field

# Backends whose abort frees no memory of a device, and whose waiters the end of a connection wakes.
HOST_BACKENDS = frozenset({"gloo", "gloo_on_one_loop", "mpi", "ucc", "fake", "threaded"})


class GroupAbortedError(RuntimeError):
    """A work's group was aborted on this rank; the text has the cause."""


@define(eq=False)
class Abort:
    """The abort of one group."""

    cause: str  # why; the first failure is its first line
    ended: threading.Event = field(factory=threading.Event)  # set when the abort has returned
    kept: list[Any] = field(factory=list)  # tensors and works that the device may use until then

    def keep(self, *held: Any) -> None:
        """Hold objects until the abort has returned."""
        self.kept.extend(held)
        if self.ended.is_set():
            self.kept.clear()


@define(eq=False)
class DeviceAborts:
    """The aborts of this process's device groups, and the door to polls of device work. For any thread."""

    _lock: threading.RLock = field(factory=threading.RLock, init=False)  # a poll may ask through another one
    _draining: int = field(default=0, init=False)
    _begun: WeakKeyDictionary[Any, Abort] = field(factory=WeakKeyDictionary, init=False)

    def poll(self, ask: Callable[[], bool]) -> bool:
        """``ask()``, which polls the device; False, without asking, while an abort drains."""
        with self._lock:  # an abort that comes now starts after the poll
            return self._draining == 0 and ask()

    def of(self, group: Any) -> Abort | None:
        """The abort of ``group``, under way or ended; None where there is none."""
        return None if group is None else self._begun.get(group)

    def require_not_aborted(self, group: Any) -> None:
        """Raise GroupAbortedError where works of ``group`` were aborted: the backend calls them done, without data."""
        if (abort := self.of(group)) is not None:
            raise GroupAbortedError(f"its group was aborted on this rank: {abort.cause}")

    def start(self, calls: Mapping[Any, Callable[[], None]], cause: str) -> list[Abort]:
        """Begin to abort all groups that ``calls`` has a call for, each in a thread; those begun before go on."""
        from pipegrid.transport.waits.wait_lock import BackgroundThread  # torch, which planning does without

        with self._lock:
            new = {group: Abort(cause) for group in calls if group not in self._begun}
            self._begun.update(new)
            self._draining += len(new)
        for group, abort in new.items():
            BackgroundThread(target=self._run, args=(calls[group], abort), name="pipegrid-abort", daemon=True).start()
        return [self._begun[group] for group in calls]

    def _run(self, call: Callable[[], None], abort: Abort) -> None:
        try:
            call()
        finally:
            with self._lock:
                self._draining -= 1
            abort.ended.set()
            abort.kept.clear()


device_aborts = DeviceAborts()


def abort_groups(groups: Iterable[Any], cause: str) -> list[Abort]:
    """Begin to abort those of ``groups`` that move tensors of a device."""
    from pipegrid.topology.torch_compat import aborts_of  # torch, which planning does without

    return device_aborts.start(aborts_of(groups, HOST_BACKENDS), cause)


def abort_device_groups(cause: str) -> list[Abort]:
    """Begin to abort every device group of this process at the same time, also those of the program itself.

    For a failure of the job: a kernel of any group that goes on would hold up the aborts of all others.
    """
    from pipegrid.topology.torch_compat import living_groups

    return abort_groups(living_groups(), cause)
