"""Streams that run late: tasks in line, played by one thread when the host has to wait for them.

A GPU runs beside its host, somewhere between two extremes: it has done each task before the host goes on, or none
before the host waits. A run on a CPU is the first extreme. `Player` is the second, which is the one that shows what is
missing: tasks are played while the host waits for the device or polls it, or has given it nothing to do for a while
(another rank may be waiting for this one).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import define, field

PATIENCE_SECONDS = 0.02
_POLLS = 20  # in a row, by which a poll is a wait


@define(eq=False)
class Signal:
    """A one-shot event with callbacks."""

    done: bool = False
    _then: list[Callable[[], None]] = field(factory=list)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once done, or now; under the device's lock."""
        if self.done:
            callback()
        else:
            self._then.append(callback)

    def end(self) -> None:
        """Become done, and call the callbacks; under the device's lock."""
        self.done = True
        callbacks, self._then = self._then, []
        for callback in callbacks:
            callback()


DONE = Signal(done=True)


@define(eq=False)
class _Task:
    """An item of a stream: a computation, or (without ``run``) a point or a wait."""

    run: Callable[[], None] | None
    after: Sequence[Signal]
    reached: Callable[[], None] | None
    signal: Signal = field(factory=Signal)

    @property
    def is_ready(self) -> bool:
        return all(signal.done for signal in self.after)


class Player:
    """Plays the tasks of several streams, each in order.

    Args:
        lock: the device's.
        report: takes the text of a task that failed.
        patience: seconds; see `FakeDevice.late`.
    """

    def __init__(self, lock: Any, report: Callable[[str], None], patience: float) -> None:
        self._changed = threading.Condition(lock)
        self._report, self._patience = report, patience
        self._streams: dict[int, deque[_Task]] = {}
        self._playing: _Task | None = None
        self._waiting = 0
        self._polls = 0
        self._last_put = time.monotonic()
        self._stopped = False
        self._host = threading.get_ident()
        self._thread = threading.Thread(target=self._play_all, name="late device", daemon=True)
        self._thread.start()

    def put(
        self,
        stream: int,
        run: Callable[[], None] | None = None,
        *,
        after: Sequence[Signal] = (),
        reached: Callable[[], None] | None = None,
    ) -> Signal:
        """Append a task to a stream.

        Args:
            stream: its number.
            run: the computation; None is done as soon as the stream gets there and ``after`` is done.
            after: the signals that the task waits for, beside the stream's earlier tasks.
            reached: called when the stream gets there, before it waits.
        """
        task = _Task(run, after, reached)
        with self._changed:
            self._streams.setdefault(stream, deque()).append(task)
            if run is not None:
                self._last_put, self._polls = time.monotonic(), 0
            self._settle()
        return task.signal

    def end(self, signal: Signal) -> None:
        """End the signal of something outside of the streams."""
        with self._changed:
            signal.end()
            self._settle()

    def hold(self, signal: Signal) -> None:
        """Hold the host until ``signal`` is done."""
        with self._changed, self.host_waiting():
            self._changed.wait_for(lambda: signal.done or self._stopped)

    @contextmanager
    def host_waiting(self) -> Iterator[None]:
        """The host waits, inside the block, for something that the device may have to do."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    def poll(self) -> bool:
        """The host asks whether something is done; whether it asks again and again, and so waits."""
        if threading.get_ident() != self._host:
            return False
        with self._changed:
            self._polls += 1
            self._changed.notify_all()
            return self._polls == _POLLS

    def finish(self) -> None:
        """Play all tasks, then stop."""
        with self._changed:
            for stream in list(self._streams):
                self.hold(self.put(stream))
        self.stop()

    def stop(self) -> None:
        """Stop playing, and end the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _settle(self) -> None:
        """Advance every stream up to its next computation or wait."""
        moved = True
        while moved:
            moved = False
            for line in list(self._streams.values()):
                while line and line[0] is not self._playing:
                    task = line[0]
                    reached, task.reached = task.reached, None
                    if reached is not None:
                        reached()
                    if task.run is not None or not task.is_ready:
                        break
                    line.popleft()
                    task.signal.end()
                    moved = True
        self._changed.notify_all()

    def _play_all(self) -> None:
        while (line := self._next()) is not None:
            task = line[0]
            assert task.run is not None
            try:
                task.run()
            except Exception as error:  # noqa: BLE001 -- whatever it is, the streams go on and the test fails
                self._report(f"an operation failed on the late device: {type(error).__name__}: {error}")
            task.run = None
            with self._changed:
                self._playing = None
                self._settle()

    def _next(self) -> deque[_Task] | None:
        """The stream whose first task is to be played now; None at the end."""
        with self._changed:
            while not self._stopped:
                ready = [line for line in self._streams.values() if line and line[0].is_ready]
                if ready and self._is_time():
                    self._playing = ready[0][0]
                    return ready[0]
                self._changed.wait(self._patience if ready else None)
            return None

    def _is_time(self) -> bool:
        return self._waiting > 0 or self._polls >= _POLLS or time.monotonic() - self._last_put >= self._patience
