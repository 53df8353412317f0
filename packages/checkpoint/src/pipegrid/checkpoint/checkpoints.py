"""Save and load the state of a training run: `Checkpoints`."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from pipegrid.checkpoint import loading
from pipegrid.checkpoint.job import CheckpointRanks
from pipegrid.checkpoint.last_save import Pending, finish
from pipegrid.checkpoint.loading import LoadedCheckpoint
from pipegrid.checkpoint.saving import Saver
from pipegrid.checkpoint.state.names import TrainingState, known_state
from pipegrid.checkpoint.state.snapshot import Snapshot, Snapshots
from pipegrid.checkpoint.stored import folder
from pipegrid.checkpoint.stored.lock import Lock
from pipegrid.core.fields import Count, Index, Seconds, checked, checked_arguments
from pipegrid.monitor.monitor import Monitor
from pipegrid.stages.errors import CheckpointError
from pipegrid.topology import discard_groups


class Checkpoints:
    """The checkpoints of a run, in a directory that all its ranks share.

    Every rank makes one, and calls `save`, `wait`, `load` and `close` when the others do. One job at a time uses a
    directory: the first rank holds a lock on it until `close`, or its end.

    Args:
        directory: of this run; made where it does not exist. Leftovers of saves that did not end are removed.
        keep: number of the last checkpoints that stay.
        replicas: ``"equal"`` compares what several ranks hold of one tensor before it is stored once: copies that have
            drifted apart, and plain tensors that are shards, are errors. ``"first"`` stores the lowest rank's copy.
        group: the ranks of the job; None is all ranks, or one process without a process group.
        timeout: for ranks to wait for each other, while the slowest writes its part.
        deadline: seconds until a call fails in which a rank has not arrived, has ended or is out of reach; the error
            names it. None leaves that to ``timeout``.
        monitor: of the job, whose failure ends a call as well. A save in the background goes on.

    Raises:
        CheckpointError: the directory cannot be used, is in use by another run, or is not the same for all ranks, or
            ranks differ in ``keep`` or ``replicas``.

    Examples:
        >>> import torch
        >>> state = TrainingState(stages={"model": {0: torch.nn.Linear(4, 4)}})
        >>> checkpoints = Checkpoints("runs/a")
        >>> checkpoints.save(state, step=1)
        >>> checkpoints.close()
    """

    @checked_arguments(CheckpointError, kinds=True)
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        replicas: Literal["equal", "first"] = "equal",
        group: dist.ProcessGroup | None = None,
        timeout: timedelta = timedelta(minutes=10),
        deadline: float | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.keep: int = checked(keep, Count, "keep", CheckpointError)
        checked(replicas, Literal["equal", "first"], "replicas", CheckpointError)
        deadline = checked(deadline, Seconds | None, "deadline", CheckpointError)
        self._job = CheckpointRanks(group, timeout, deadline, monitor)
        self._saver = Saver(self._job, self.directory, keep=self.keep, replicas=replicas)
        self._snapshots: Snapshots | None = None
        self._pending = Pending()
        self._work: queue.SimpleQueue[tuple[Snapshot | Exception, Future[None]] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._unlock: Callable[[], object] = lambda: None  # on the first rank, a release of the lock
        atexit.register(finish, self._pending, self.directory, timeout.total_seconds())
        outcome = f"{self.directory} is not used"
        with self._job.calling("the first save() or load()"):
            self._job.require_equal(outcome, {"keep": self.keep, "replicas": replicas})
            if self._job.first(outcome, self._open):
                self._saver.require_shared(outcome)

    def _open(self) -> bool:
        """Make the directory this run's; whether it can be written to."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not os.access(self.directory, os.W_OK):
            return False
        lock = Lock(self.directory)
        self._unlock = weakref.finalize(self, lock.release)
        if lock.first:  # else what is aside may be a save of this process, in the background
            folder.clean(self.directory)
        return True

    def steps(self) -> list[int]:
        """The steps of the checkpoints, the newest first."""
        return [saved.step for saved in folder.saved_in(self.directory)]

    def save(self, state: TrainingState, *, step: int, blocking: bool = True) -> None:
        """Save ``state``; waits for the save before, and raises what it failed with.

        Args:
            state: of this rank. Keep one for a run: which tensors it has is read again where modules or parameters
                are no longer the same objects.
            step: the number of completed steps, the same on every rank.
            blocking: False returns once the state is copied. The copy is written in the background, and a failure is
                raised by the next `save`, `load`, `wait` or `close`.

        Raises:
            CheckpointMismatchError: ranks have different steps, data positions or plans, or names are local to a stage.
            CheckpointError: a rank could not write. The checkpoints before are untouched.
        """
        self.wait()
        snapshot: Snapshot | Exception
        try:
            if self._snapshots is None or self._snapshots.state is not state:
                self._snapshots = Snapshots(known_state(state))
            snapshot = self._snapshots.take(checked(step, Index, "step", CheckpointError))
        except Exception as error:  # noqa: BLE001 -- raised on every rank, by the first exchange
            snapshot = error
        if blocking:
            with self._job.calling(f"save() of step {step}"):
                self._saver.write(snapshot)
            return
        if self._worker is None:  # one for all saves: to start a thread costs the step as much as a copy
            self._worker = threading.Thread(target=self._run, name="checkpoints", daemon=True)
            self._worker.start()
        self._pending.future = Future()
        self._work.put((snapshot, self._pending.future))

    def load(self, state: TrainingState, *, step: int | None = None) -> LoadedCheckpoint | None:
        """Fill ``state`` in place from the newest good checkpoint. Grids, stages and ranks may be others than its own.

        Every stored byte is compared with its checksum first.

        Args:
            state: of this rank.
            step: of the checkpoint; None is the newest that is not corrupt.

        Returns:
            What was loaded; None where the directory has no checkpoint.

        Raises:
            CorruptCheckpointError: that of ``step`` is, or all are; the text names the tensor.
            CheckpointMismatchError: names, shapes or types of the checkpoint and of the state differ.
            CheckpointError: there is no checkpoint of ``step``.
        """
        self.wait()
        with self._job.calling("load()"):
            return loading.load(self._job, self.directory, known_state(state), step)

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: it failed, on whichever rank.
        """
        self._pending.result()

    def close(self) -> None:
        """Wait for the save in the background, and end; raises as `wait`."""
        try:
            self.wait()
        finally:
            if self._worker is not None:
                self._work.put(None)
                self._worker.join()
                self._worker = None
            self._job.close()
            self._unlock()

    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of saves and loads, for callers that end all connections of a rank after a failure."""
        return self._job.groups

    def discard(self) -> None:
        """End without the other ranks, some of which may be dead: a save in the background is given up."""
        discard_groups(self.groups())
        self._pending.future = None  # what it failed with is known
        if self._worker is not None:
            self._work.put(None)
            self._worker = None
        self._unlock()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            snapshot, future = work
            try:
                with self._job.calling("a save in the background", monitored=False):
                    self._saver.write(snapshot)
            except BaseException as error:  # noqa: BLE001 -- raised by the next call
                future.set_exception(error)
            else:
                future.set_result(None)
            del snapshot, future, work
