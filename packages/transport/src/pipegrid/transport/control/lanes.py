"""The lanes that a rank opened together: their batches, the handshake over them, the thread beside them, their end."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from attrs import define, field

from pipegrid.core.lanes import LaneSpec
from pipegrid.topology import destroy_groups, discard_groups
from pipegrid.transport.backends.wire import ControlWire
from pipegrid.transport.control.handshake import Handshake
from pipegrid.transport.errors import P2PLaneDeadError, text_of
from pipegrid.transport.lane.batch import Batch, Submitter
from pipegrid.transport.lane.ending import LaneEnding, abort_lanes, await_aborts, end_together
from pipegrid.transport.lane.lane import Lane
from pipegrid.transport.lane.transfers import LaneTransfers, first_of
from pipegrid.transport.waits.wait_lock import BackgroundThread

_DROPPED = (
    ": nothing held the result of open_lanes() (or its communicator) any more, or the process ended; keep it as long "
    "as its lanes are used, and close() it then"
)
_EXIT_SECONDS = 10.0  # for transfers on a device, where the process ends without close()
_COLLECTOR_SECONDS = 1.0  # that the garbage collector waits for the end of lanes
_TICK_SECONDS = 0.05
_STREAMED_TICK_SECONDS = 0.002


class Lanes(dict[LaneSpec, Lane]):
    """The lanes that a rank opened together, by spec. A context manager: `close` at the end.

    Attributes:
        submitter: starts the transfers of all of them.
        on_device: whether messages complete in stream order, so that the order of their launches matters.
        turn: how often this rank and its peers had opened lanes before.
    """

    def __init__(self, submitter: Submitter, turn: int = 0) -> None:
        super().__init__()
        self.submitter, self.turn = submitter, turn
        self.on_device = False
        self._ends: list[LaneTransfers] = []
        self._watchers: list[BackgroundThread] = []
        self._groups: list[Any] = []
        self._failed = False
        self._handshakes: dict[int, Handshake] = {}
        self._progress = _Progress(self._ends, submitter, self._handshakes)
        # Also at exit: threads that wait in the backend must not outlive the interpreter.
        self._parts = os.getpid(), self._ends, self._progress, self._watchers, self._groups
        self._finalizer = weakref.finalize(self, _drop, *self._parts)

    def join(self, lanes: Mapping[LaneSpec, Lane], groups: Sequence[Any]) -> None:
        """Add lanes that were opened with the same submitter, and their groups: to batches, handshakes and the end."""
        self.update(lanes)
        for lane in (one for one in lanes.values() if one.wire is not None):
            if lane.peer not in self._handshakes:
                self._handshakes[lane.peer] = Handshake(lane.peer, lane)
            self._handshakes[lane.peer].lanes.append(lane)
        ends = [lane.transfers for lane in lanes.values()]
        self._groups.extend(groups)
        self._watchers.extend(_watch(ends))
        self.on_device = any(lane.mover.streams for lane in self.values())
        self._ends.extend(ends)
        if self.on_device:
            self._progress.tick = _STREAMED_TICK_SECONDS

    def batch(self, *, together: bool = True, by_lane: bool = False) -> AbstractContextManager[None]:
        """Start the sends and receives of the block as one simultaneous batch, at its end; none of them if it raises.

        Communicators come in the order of calls; within a shared one, messages come in the order of lanes. Batches
        inside a batch belong to it.

        Args:
            together: False starts them one after the other, at the end all the same. Ignored in strict mode and on
                shared communicators, where two ranks that both send first would wait for each other.
            by_lane: communicators come in the order of lanes, too: for an exchange in which every rank sends and
                receives. In the order of calls, both ends would send first, and wait for each other where a GPU plays
                the kernels of several communicators one by one.
        """
        return Batch(self.submitter, together=together or self.submitter.batches, by_lane=by_lane)

    @property
    def batches(self) -> bool:
        """Whether a batch is more than its transfers one by one, in order of calls.

        It is on shared communicators and in strict mode, where two ranks that both send first would wait for each
        other, and on device groups, where it is one launch.
        """
        return self.submitter.batches or self.on_device

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Start transfers of device groups in the order of calls inside the block: for the execution of a plan.

        A receive whose shapes are not known yet (the first of a lane without agreed shapes, each one in header mode)
        then holds the host until its header has come. Later transfers would else be launched before it, which gets
        stuck where a GPU plays the kernels of several communicators one by one. In a plan that `verify` has proved for
        batches in order, the header comes without this rank's later actions. Over gloo nothing changes.
        """
        before = self.submitter.in_order
        self.submitter.in_order = before or self.on_device
        try:
            yield
        finally:
            self.submitter.in_order = before

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Transfers for which no caller says how many have at least ``seconds`` inside the block.

        A wait has its own. A send that nobody waits for yet, and a receive whose header holds the host (`in_order`),
        else end the lanes at their deadline, also where a peer compiles for longer in a first step.
        """
        before = self.submitter.patience
        self.submitter.patience = max(before, seconds)
        try:
            yield
        finally:
            self.submitter.patience = before

    def when_started(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the transfers of this thread so far are started: now, or after the batch that it is in.

        Not at all where the batch raises.
        """
        self.submitter.when_started(call)

    def abort(self, reason: str) -> None:
        """End all lanes at once, and tell the other sides why: for a rank that fails elsewhere."""
        abort_lanes([lane.ending for lane in self.values()], reason)

    def neighbours(self, ranks: Iterable[int]) -> Sequence[Handshake]:
        """The handshakes with those of ``ranks`` at the other ends of lanes, over the first lane between each two."""
        return [self._handshakes[rank] for rank in sorted(set(ranks)) if rank in self._handshakes]

    @property
    def closed(self) -> bool:
        """Whether this rank has closed them."""
        return not self._finalizer.alive

    @property
    def failed(self) -> bool:
        """Whether a lane ended by a failure, here or on its other side, and not by `close`."""
        return self._failed or (not self.closed and any(lane.ending.failed for lane in self._ends))

    def close(self) -> None:
        """Wait for transfers that are ordered on a device, then end the lanes and destroy their groups. Idempotent.

        A transfer over gloo that no caller waited for fails. NCCL's groups are destroyed by both sides together, or
        aborted by one whose other side does not come within the deadline.
        """
        self._close(math.inf)

    def _close(self, seconds: float) -> None:
        self._failed = self.failed
        if self._finalizer.detach() is not None:
            _close(*self._parts, seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:  # the others learn of it at once
            self.abort(f"{type(error).__name__}: {text_of(error)}")
        self._close(math.inf if kind is None else 0.0)


def _watch(ends: Sequence[LaneTransfers]) -> list[BackgroundThread]:
    """A thread per wire of a device group: it sees at once that its peer is gone, as no call waits there."""
    watchers = []
    devices = {id(lane.connection): lane.connection for lane in ends if lane.connection.mover.streams}.values()
    for connection in devices:
        for peer, wire in connection.wires.items():
            lanes = [lane for lane in connection.lanes if lane.peer == peer]
            name = f"pipegrid-watch-{lanes[0].spec}"
            watchers.append(BackgroundThread(target=_watch_wire, args=(wire, lanes), name=name, daemon=True))
            watchers[-1].start()
    return watchers


def _watch_wire(wire: ControlWire, lanes: Sequence[LaneEnding]) -> None:
    try:
        wire.watch()
    except RuntimeError as error:
        for lane in lanes:
            lane.explain(error, first_of(lane.queue))


def _drop(process: int, ends: Sequence[LaneTransfers], *parts: Any) -> None:
    """End lanes that nothing holds any more, or at the interpreter's exit, which waiting threads must not outlive.

    The garbage collector runs in any thread, also in one that holds the lock of a lane: a thread of their own ends
    them, and is waited for a moment.
    """
    given = process, ends, *parts, _EXIT_SECONDS, _DROPPED
    if os.getpid() == process and threading.main_thread().is_alive():
        thread = BackgroundThread(target=_close, args=given, name="pipegrid-dropped", daemon=True)
        thread.start()
        thread.join(_COLLECTOR_SECONDS)
    else:
        _close(*given)


def _close(
    process: int,
    ends: Sequence[LaneTransfers],
    progress: _Progress,
    watchers: Sequence[BackgroundThread],
    groups: Sequence[Any],
    seconds: float,
    dropped: str = "",
) -> None:
    """End lanes; wait at most ``seconds``, and no longer than the deadline, for transfers that a device has.

    Groups are destroyed by all members together: those of lanes that failed, or were ``dropped``, are aborted.
    """
    if os.getpid() != process:  # a forked child has neither the threads nor the connections
        return
    deadline = max((lane.config.deadline for lane in ends), default=0.0)
    limit = time.monotonic() + min(seconds, deadline)
    for lane in ends:
        lane.drain(limit)
    progress.stop()
    if not dropped:
        _close_together(ends, watchers, limit)
    aborted = {
        id(lane.connection.group)
        for lane in ends
        if dropped or lane.ending.failed or (lane.connection.mover.streams and lane.ending.notice is None)
    }  # what both sides have closed, or what is on a host, is no abort
    texts = [(lane.ending, f"lane {lane.ending.spec} was closed on rank {lane.ending.rank}{dropped}") for lane in ends]
    end_together([(ending, P2PLaneDeadError(text), text) for ending, text in texts], kind="closed")
    for lane in ends:
        lane.join()
    for watcher in watchers:
        watcher.join()
    connections = {id(lane.connection): lane.connection for lane in ends}.values()
    await_aborts(connections)
    aborted |= {id(connection.group) for connection in connections if connection.aborting is not None}
    discard_groups([group for group in groups if id(group) in aborted])
    destroy_groups([group for group in groups if id(group) not in aborted], seconds=deadline)


def _close_together(ends: Sequence[LaneTransfers], watchers: Sequence[BackgroundThread], limit: float) -> None:
    """Meet the other sides of device lanes that have not failed, which close them as well, until ``limit``.

    The destroy of a device group holds a member until the others come to it. So each side says first that it comes.
    """
    for connection in {id(lane.connection): lane.connection for lane in ends if lane.connection.mover.streams}.values():
        if not any(lane.failed for lane in connection.lanes):
            connection.tell_closed()
    for watcher in watchers:
        if watcher is not threading.current_thread():
            watcher.join(max(0.0, limit - time.monotonic()))


@define(eq=False)
class _Progress:
    """Sweeps lanes, every ``tick`` seconds while any of them has transfers under way; sleeps otherwise.

    A rank that waits for a message of a step that its neighbour does not run is not left to its deadline: lanes end as
    soon as one of the handshakes tells.
    """

    _lanes: list[LaneTransfers]
    _submit: Submitter
    _handshakes: dict[int, Handshake]
    tick: float = field(default=_TICK_SECONDS, init=False)
    _stopped: bool = field(default=False, init=False)
    _thread: BackgroundThread = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._thread = BackgroundThread(target=self._run, name="pipegrid-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        submit = self._submit
        while not self._stopped:
            submit.asleep = True
            if not any(lane.queue for lane in self._lanes):
                submit.wake.wait()
            submit.asleep = False
            submit.wake.clear()
            time.sleep(self.tick)
            now = time.monotonic()
            for lane in self._lanes:
                if lane.queue:
                    lane.sweep(now)
            for one in list(self._handshakes.values()):
                if one.differs():
                    reason = f"rank {one.peer} runs another step"
                    abort_lanes([lane.ending for lane in self._lanes if lane.ending.error is None], reason)

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._submit.wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
