"""The streams of a fake GPU as threads: each plays its entries one by one, in launch order."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from attrs import define, field

from pipegrid.fake_nccl.entries import QueueEntry


@define(eq=False)
class _StreamQueue:
    """The entries of one stream: those that wait, the one under way, and the queue of the thread that plays it."""

    waiting: deque[QueueEntry] = field(factory=deque)
    playing: QueueEntry | None = None
    thread: queue.SimpleQueue[QueueEntry | None] = field(factory=queue.SimpleQueue)


@define(eq=False)
class Lines:
    """The streams of one device, by name.

    Attributes:
        lock: of the device.
        play: moves an entry's data; returns at its end.
        starts: called when an entry starts, under the lock.
        ends: called when it has ended, under the lock and before the next one starts.
        ended: called after that.
    """

    lock: Any
    play: Callable[[QueueEntry], None]
    starts: Callable[[QueueEntry], None]
    ends: Callable[[QueueEntry], None]
    ended: Callable[[QueueEntry], None]
    _lines: dict[str, _StreamQueue] = field(factory=dict, init=False)
    _threads: list[threading.Thread] = field(factory=list, init=False)

    def open(self, name: str) -> None:
        """Start the thread of a stream, unless it has one."""
        with self.lock:
            if name not in self._lines:
                line = self._lines[name] = _StreamQueue()
                self.start(f"fake stream {name}", self._play_all, line)

    def start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        """Start a thread that `close` waits for."""
        self._threads.append(threading.Thread(target=target, args=arguments, name=name, daemon=True))
        self._threads[-1].start()

    def append(self, name: str, entry: QueueEntry) -> None:
        """Put an entry last on a stream, to start when the work before it has ended; under the lock."""
        self._lines[name].waiting.append(entry)
        entry.after.when_done(lambda: self.advance(name))

    def advance(self, name: str) -> None:
        """Start the next entry of a stream, unless one is under way or the next one waits for other work."""
        self._advance(self._lines[name])

    def close(self) -> None:
        """End every thread."""
        for line in self._lines.values():
            line.thread.put(None)
        for thread in self._threads:
            thread.join()

    def _advance(self, line: _StreamQueue) -> None:
        with self.lock:
            if line.playing is None and line.waiting:
                entry = line.waiting[0]
                if entry.after.done or entry.cancelled.is_set():
                    line.playing = line.waiting.popleft()
                    entry.started = True
                    self.starts(entry)
                    line.thread.put(entry)

    def _play_all(self, line: _StreamQueue) -> None:
        while (entry := line.thread.get()) is not None:
            self.play(entry)
            with self.lock:
                self.ends(entry)
                line.playing = None
                self._advance(line)  # before anything hears of the end, as on a GPU
            self.ended(entry)
            del entry  # with its tensors, which the next one may be long in coming after
