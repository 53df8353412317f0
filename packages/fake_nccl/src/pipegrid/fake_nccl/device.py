"""One rank's fake GPU: streams on threads, the entries launched on them, and a watchdog.

An entry is what NCCL launches as one kernel: a batch of transfers, or one collective. Rules:

- A stream plays its entries one by one, in launch order. Each group has a stream of its own; in serial mode one stream
  plays the entries of all groups, as a GPU may that runs one kernel at a time.
- An entry that lost its peer keeps running: NCCL's kernels over shared memory spin. With ``reports_peer_errors`` it
  ends with an error instead, as over a network.
- `abort` ends the entries of one group, then blocks until every entry that this rank had launched has ended: freeing
  the group's memory waits for the whole device. Aborts of several stuck groups one by one therefore hang. See `frees`.
- The watchdog fails an entry that is older than its group's timeout, and the test with it; see `watchdog`.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attrs import define, field
from torch import Tensor

from pipegrid.fake_nccl.entries import (
    FakeGraph,
    LaunchRecord,
    Mark,
    MismatchError,
    Moment,
    QueueEntry,
    TransferRecord,
    What,
)
from pipegrid.fake_nccl.flight_recorder import FakeFlightRecorder
from pipegrid.fake_nccl.frees import Frees
from pipegrid.fake_nccl.virtual_streams.late import LateRun
from pipegrid.fake_nccl.virtual_streams.player import DONE, PATIENCE_SECONDS
from pipegrid.fake_nccl.virtual_streams.streams import Streams
from pipegrid.fake_nccl.virtual_streams.virtual import Clock, VirtualStream, nothing
from pipegrid.fake_nccl.watchdog import LegacyRules, Nccl2Rules, Watchdog

_WATCHDOG_SECONDS = 0.05


@define(eq=False)
class _StreamLine:
    """A stream: the entries that wait, the one under way, and the queue of the thread that plays it."""

    waiting: deque[QueueEntry] = field(factory=deque)
    playing: QueueEntry | None = None
    thread: queue.SimpleQueue[QueueEntry | None] = field(factory=queue.SimpleQueue)


class FakeDevice:
    """The fake GPU of one rank.

    Args:
        serial: one stream for all groups, instead of one for each.
        waits_hold: a work's ``wait()`` holds the host until its entry has ended or was aborted, so that later CPU code
            runs after the transfer as GPU work on the waiting stream would. False: ``wait()`` returns at once.
        nccl2: groups keep the rules of torch 2.15's ``nccl``, with these settings; None: those of ``nccl-legacy``.
        lazy: a communicator for each pair of peers beside the group's. With ``nccl2`` by the rules of ``nccl-lazy``,
            else by those of ``nccl-legacy``, whose groups connect at their first use where no device is bound.

    Attributes:
        closing: set when the test ends.
        pair_attempts: communicators of pairs made so far by the pair's ranks in their group, of all groups (nccl-lazy).
        history: every launch and every mark on this rank, in order.
        timeline: launches and marks, and the starts and ends of entries between them, in order.
        streams: virtual streams for the code under test; see `Streams`.
        violations: broken rules, as texts; they fail the test.
        watchdog: of the device, with its settings.
        reports_peer_errors: an entry whose peer is gone ends with an error, instead of running on.
        eager_bytes: sends end before their receives are posted, up to so many bytes for each peer of a communicator,
            as NCCL may buffer: finds code that takes the end of a send for the arrival of its data. 0: none, which is
            what a proof has to assume.
        connects_in_batches: two ranks of a group connect in the first batch between them, each way, which starts when
            all batches have started that such messages join to it, the worst case of how NCCL connects: finds a first
            step that hangs.
        drains_at_compute: every operation inside `Streams.watch` first waits for all entries launched so far, as a
            call that loads a module or frees memory does: finds receives that are posted too early.
        graph: of the capture that is under way.
        recorder: of the flight recorder; `dump` writes its file.

    Examples:
        >>> device = FakeDevice()
        >>> device.violations
        []
        >>> device.close()
    """

    def __init__(
        self, *, serial: bool = False, waits_hold: bool = True, nccl2: Nccl2Rules | None = None, lazy: bool = False
    ) -> None:
        self.serial, self.waits_hold, self.nccl2, self.lazy = serial, waits_hold, nccl2, lazy
        self.pair_attempts: Counter[tuple[int, int]] = Counter()
        self.closing, self._closed = threading.Event(), threading.Event()
        self.reports_peer_errors = self.connects_in_batches = self.drains_at_compute = False
        self.eager_bytes = 0
        self.graph: FakeGraph | None = None
        self.history: list[LaunchRecord | Mark] = []
        self.recorder = FakeFlightRecorder()
        self._numbers = itertools.count()
        self.timeline: list[Moment] = []
        self.violations: list[str] = []
        self.streams = Streams(self.violations)
        self._frees = Frees(self.unfinished, self.violations)

        def end_old(entry: QueueEntry, error: Exception) -> None:
            self._cancel([entry], [entry.launch.group], error)

        legacy = LegacyRules() if nccl2 is None else None
        self.watchdog = Watchdog(self.unfinished, self._frees.has_begun, end_old, self.dump, self.violations, legacy)
        self.streams.before_poll = self._frees.require_pollable
        self.streams.before_compute = lambda: self.drain() if self.drains_at_compute else None
        self.streams.drain = self.drain
        self._marked: list[tuple[str, VirtualStream, Clock]] = []
        self._group_streams: dict[str, VirtualStream] = {}
        self._lock = self.streams.lock
        self._open: defaultdict[str, list[QueueEntry]] = defaultdict(list)
        self._lines: dict[str, _StreamLine] = {}  # by group, or one
        self._threads: list[threading.Thread] = []
        self._cuts: dict[str, Callable[[], None]] = {}

    def add_group(self, group: str, cut: Callable[[], None], ranks: Sequence[int], here: int) -> None:
        """Make the stream of a group of ``ranks``; ``cut`` wakes an entry of the group that waits for a peer."""
        self.recorder.groups[group] = tuple(ranks), here
        if not self._cuts:
            self._start("fake watchdog", self._watch)
        self._cuts[group] = cut
        self._group_streams[group] = self.streams.make_stream(f"NCCL's stream of group {group}")
        name = "serial" if self.serial else group
        with self._lock:
            if name not in self._lines:
                self._lines[name] = _StreamLine()
                self._start(f"fake stream {name}", self._play_all, self._lines[name])

    def dump(self, prefix: str | os.PathLike[str] | None = None) -> Path | None:
        """Write the launches so far and the progress of each, in the format of torch's flight recorder.

        The watchdog does so before it ends an entry, where ``TORCH_FR_DUMP_TEMP_FILE`` or
        ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` says where.

        Args:
            prefix: of the file's name, the rank follows; by default, that of the variables.

        Returns:
            The file; None where nothing says where.
        """
        with self._lock:
            moments = list(self.timeline)
        return self.recorder.write(moments, prefix)

    @property
    def launches(self) -> list[LaunchRecord]:
        """Every entry launched on this rank, in order."""
        return [event for event in self.history if isinstance(event, LaunchRecord)]

    def mark(self, text: str) -> None:
        """Note in `history` that the host reached a point; work of the current stream up to here belongs to it."""
        stream = self.streams.current_stream()
        with self._lock:
            clock = self.streams.record(stream)
            behind = [name for name, where, at in self._marked if not self.streams.known_to_host(where, at)]
            mark = Mark(text, tuple(behind))
            self.history.append(mark)
            self._note("marked", mark)
            self._marked.append((text, stream, clock))
            self.streams.order(stream, clock, reached=lambda: self._note("reached", mark))

    def launch(
        self,
        group: str,
        kind: str,
        operations: tuple[TransferRecord, ...],
        run: Callable[[], None],
        timeout: float,
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> QueueEntry:
        """Append an entry to the group's stream, after the work of the current virtual stream."""
        with self._lock:
            launch = LaunchRecord(next(self._numbers), group, kind, operations, threading.get_ident())
            stream, here = self._group_streams[group], self.streams.current_stream()
            self.streams.order(stream, self.streams.record(here))
            clock = self.streams.work(stream, f"entry {launch.number} ({kind})", reads=reads, writes=writes)
            self.streams.keep(stream, clock)
            if self.graph is not None:
                self.graph.record(
                    lambda: self.launch(group, kind, operations, run, timeout, reads=reads, writes=writes)
                )
                return QueueEntry(launch, run, timeout, clock, stream, signal=DONE, captured=True)
            after, kept = self.streams.here(here), [*reads, *writes]
            entry = QueueEntry(launch, run, timeout, clock, stream, after, kept)
            self.streams.order(stream, clock, entry.signal)
            self.history.append(launch)
            self._note("launched", launch)
            self.recorder.tell(launch.number, reads, writes, timeout)
            self._open[group].append(entry)
            line = self._line(group)
            line.waiting.append(entry)
            entry.after.when_done(lambda: self._advance(line))
        return entry

    def order(self, entry: QueueEntry, *, relies: bool = True) -> None:
        """Order the current stream after an entry, which keeps its tensors no longer: it ``relies`` on the order."""
        with self._lock:
            if relies:
                self.streams.let_go(entry.stream, entry.clock)
            entry.kept.clear()
            self.streams.order(
                self.streams.current_stream(), entry.clock, entry.signal, lambda: self._note("awaited", entry.launch)
            )

    @contextmanager
    def late(self, *, patience: float = PATIENCE_SECONDS) -> Iterator[LateRun]:
        """Run operations of this thread late inside the block; see `pipegrid.fake_nccl.virtual_streams.late`.

        Args:
            patience: seconds without an operation, a wait or a poll by the host after which the device goes on.
        """
        waits_hold, self.waits_hold = self.waits_hold, False
        try:
            with self.streams.run_late(patience) as run:
                yield run
        finally:
            self.waits_hold = waits_hold

    @contextmanager
    def capture(self) -> Iterator[FakeGraph]:
        """Record the launches inside the block; they run at each `FakeGraph.replay`.

        A wait inside returns after ordering, with a timeout as well; the graph keeps its tensors.
        """
        self.graph = FakeGraph()
        try:
            yield self.graph
        finally:
            self.graph = None

    @property
    def closed(self) -> bool:
        """Whether `close` has ended its threads."""
        return self._closed.is_set()

    def forget(self) -> None:
        """Drop the record of what was launched and reached so far: for a long test that looks at its memory."""
        with self._lock:
            self.streams.forget()
            self.history.clear()
            self.timeline.clear()
            self.recorder.forget()
            self._marked.clear()

    def unfinished(self, group: str | None = None) -> list[QueueEntry]:
        """Launched entries that have not ended, of one group or all, in launch order."""
        with self._lock:
            known = self._open.values() if group is None else [self._open.get(group, [])]
            entries = [entry for entries in known for entry in entries if not entry.ended.is_set()]
        return sorted(entries, key=lambda entry: entry.launch.number)

    def drain(self, group: str | None = None) -> None:
        """Block until every entry that is launched now, of one group or all, has ended: a free waits so for all."""
        with self.streams.host_waiting():
            for entry in self.unfinished(group):
                entry.ended.wait()

    def abort(self, groups: Sequence[str], error: Exception) -> None:
        """End the entries of ``groups`` with ``error``, then `drain`."""
        with ExitStack() as aborts:
            for group in groups:
                aborts.enter_context(self._frees.abort(group))
            stuck = [entry for entry in self.unfinished() if entry.launch.group in groups]
            self._cancel(stuck, {entry.launch.group for entry in stuck if entry.started}, error)
            self.drain()

    def shut_down(self, group: str, *, alone: bool = False) -> None:
        """Free a group, whose entries should have ended: `drain` the device, or the group ``alone``."""
        self._frees.require_idle(group)
        self.drain(group if alone else None)

    def close(self) -> None:
        """End every entry and every thread. For the end of a test."""
        self.closing.set()
        # Sends that ended before their receives were posted may still be on their way.
        groups = set(self._cuts) if self.eager_bytes else {entry.launch.group for entry in self.unfinished()}
        self._cancel(self.unfinished(), groups, RuntimeError("the test ended"))
        self.drain()
        self._closed.set()
        for line in self._lines.values():
            line.thread.put(None)
        for thread in self._threads:
            thread.join()
        self.watchdog.store = None
        self._cuts.clear()  # they hold the groups, and this device is held until the next one is registered

    def _note(self, what: What, of: LaunchRecord | Mark) -> None:
        self.timeline.append(Moment(what, of))

    def _cancel(self, entries: Iterable[QueueEntry], groups: Iterable[str], error: Exception) -> None:
        """End ``entries`` with ``error``, whatever they wait for; those of ``groups`` may wait for a peer."""
        for entry in entries:
            entry.cancel(error)
            self._advance(self._line(entry.launch.group))
        for group in groups:
            self._cuts[group]()

    def _line(self, group: str) -> _StreamLine:
        return self._lines["serial" if self.serial else group]

    def _start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, name=name, daemon=True))
        self._threads[-1].start()

    def _advance(self, line: _StreamLine) -> None:
        """Start the next entry of a stream, unless one is under way or the next one waits for other work."""
        with self._lock:
            if line.playing is None and line.waiting:
                entry = line.waiting[0]
                if entry.after.done or entry.cancelled.is_set():
                    line.playing = line.waiting.popleft()
                    entry.started = True
                    self._note("started", entry.launch)
                    line.thread.put(entry)

    def _play_all(self, line: _StreamLine) -> None:
        while (entry := line.thread.get()) is not None:
            self._play(entry)
            with self._lock:
                self._open[entry.launch.group].remove(entry)
                self._note("ended", entry.launch)
                line.playing = None
                self._advance(line)  # before anything hears of the end, as on a GPU
            entry.end()
            if self.streams.late is not None:
                self.streams.late.player.end(entry.signal)
            else:
                entry.signal.end()
            del entry  # with its tensors, which the next one may be long in coming after

    def _play(self, entry: QueueEntry) -> None:
        if entry.cancelled.is_set():
            return
        try:
            entry.run()
        except RuntimeError as error:
            if self.reports_peer_errors or isinstance(error, MismatchError):
                entry.cancel(error)
                if entry.error is error:
                    self.watchdog.note(entry)
            entry.cancelled.wait()
        finally:
            entry.run = nothing  # it held tensors

    def _watch(self) -> None:
        while not self._closed.wait(_WATCHDOG_SECONDS):
            self.watchdog.look()
