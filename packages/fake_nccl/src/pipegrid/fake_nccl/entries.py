"""Entries of a fake GPU, and the records of their launches, starts and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from attrs import define, field, frozen
from torch import Tensor

from pipegrid.fake_nccl.virtual_streams.player import DONE, Signal
from pipegrid.fake_nccl.virtual_streams.virtual import Clock, VirtualStream

What: TypeAlias = Literal["launched", "started", "ended", "awaited", "marked", "reached"]


class MismatchError(RuntimeError):
    """A send was matched with a receive of another size or dtype."""


@frozen
class TransferRecord:
    """One transfer of an entry.

    Attributes:
        kind: ``send`` or ``recv``.
        peer: a global rank.
        nbytes: bytes of the tensor.

    Examples:
        >>> TransferRecord(kind="send", peer=1, nbytes=64).nbytes
        64
    """

    kind: str
    peer: int
    nbytes: int


@frozen
class LaunchRecord:
    """Record of one launched entry.

    Attributes:
        number: launch order on this rank, over all groups, from 0.
        group: the group's name.
        kind: ``p2p``, or the collective's name.
        operations: the transfers of a ``p2p`` entry, in the order of their calls.
        thread: identifier of the launching thread.

    Examples:
        >>> LaunchRecord(number=0, group="pp", kind="p2p", operations=(TransferRecord("send", 1, 64),), thread=1).kind
        'p2p'
    """

    number: int
    group: str
    kind: str
    operations: tuple[TransferRecord, ...]
    thread: int


@frozen
class Mark:
    """A point that the code under test reached on the host, between launches.

    Attributes:
        text: the point's name.
        behind: earlier marks whose work the host did not know to be done; their number is how far it may run ahead.

    Examples:
        >>> Mark("step 1", behind=("step 0",)).behind
        ('step 0',)
    """

    text: str
    behind: tuple[str, ...]


@frozen
class Moment:
    """An event on the host or on the device.

    Attributes:
        what: on the host ``launched`` (of a launch) and ``marked`` (of a mark); on the device ``started`` and
            ``ended``. On a late device, of the stream that was current on the host, too: ``awaited``, where it gets to
            a wait for the launch's end, and ``reached``, where it gets to the mark.
        of: the launch or the mark.

    Examples:
        >>> Moment("marked", Mark("step 1", behind=())).of.text
        'step 1'
    """

    what: What
    of: LaunchRecord | Mark


@define(eq=False)
class QueueEntry:
    """One entry on its stream.

    Attributes:
        run: moves the data; returns at the end, or raises ``RuntimeError``.
        timeout: seconds from launch to end that the watchdog allows.
        clock: the work on virtual streams up to the entry's end.
        after: the end of the work that was queued before it on the stream that was current.
        kept: tensors whose memory the entry keeps, until a stream waits for it.
        signal: its end.
        captured: it is in a graph, and does not run.
    """

    launch: LaunchRecord
    run: Callable[[], None]
    timeout: float
    clock: Clock
    stream: VirtualStream
    after: Signal = DONE
    kept: list[Tensor] = field(factory=list)
    signal: Signal = field(factory=Signal)
    launched_at: float = field(factory=lambda: time.monotonic())  # noqa: PLW0108 -- a test may have moved the clock
    captured: bool = False
    started: bool = False
    error: Exception | None = None
    cancelled: threading.Event = field(factory=threading.Event)
    # Ended or cancelled: a wait holds the host no longer, though the stream may still be at an earlier entry.
    released: threading.Event = field(factory=threading.Event)
    ended: threading.Event = field(factory=threading.Event)
    _callbacks: list[Callable[[], None]] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock)

    def __str__(self) -> str:
        what = ", ".join(f"{op.kind} {op.nbytes} bytes, rank {op.peer}" for op in self.launch.operations)
        return (
            f"entry {self.launch.number} ({self.launch.kind}{': ' if what else ''}{what}) of group {self.launch.group}"
        )

    def cancel(self, error: Exception) -> None:
        """End the entry with ``error`` unless it has ended."""
        with self._lock:
            if not self.ended.is_set() and self.error is None:
                self.error = error
        self.cancelled.set()
        self.released.set()

    def end(self) -> None:
        """Mark the end, and call the callbacks."""
        with self._lock:
            self.ended.set()
            self.released.set()
        for callback in self._callbacks:
            callback()

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at the end, or now if the entry has ended."""
        with self._lock:
            if not self.ended.is_set():
                self._callbacks.append(callback)
                return
        callback()


@define(eq=False)
class FakeGraph:
    """A captured graph: the launches recorded in it, in launch order; the waits of their works only order.

    By the rules of nccl2 it keeps its works, with their tensors, as long as it lives; a wait in a capture says nothing
    of the data, which is not there before a replay.

    Examples:
        >>> graph, done = FakeGraph(), []
        >>> graph.record(lambda: done.append("all_reduce"))
        >>> graph.replay()
        >>> done
        ['all_reduce']
    """

    _launches: list[Callable[[], object]] = field(factory=list, init=False)

    def record(self, launch: Callable[[], object]) -> None:
        """Keep a launch, with all that it holds."""
        self._launches.append(launch)

    def replay(self) -> None:
        """Launch everything once more."""
        for launch in self._launches:
            launch()
