"""One attempt of a run: from its start, or its restart, to its end by success, failure or a signal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.distributed as dist

from pipegrid.checkpoint.gathering import gather_plain, wait_for_all
from pipegrid.core.fields import Count, Index, Seconds, checked
from pipegrid.gradients.all_reduce import all_reduce
from pipegrid.monitor.collectives import Waiting
from pipegrid.monitor.epochs import RankLostError
from pipegrid.schedules import DisagreementError, JobFailedError, Monitor, PipelineError
from pipegrid.survive.neighbours import Neighbours
from pipegrid.topology import GroupSpec, create_groups, destroy_groups
from pipegrid.training.errors import RestartError
from pipegrid.training.restart.record import PREEMPTED, AttemptLine, AttemptRecord, read_attempts, reason_to_stop
from pipegrid.training.restart.signals import StopSignals
from pipegrid.training.restart.torchelastic import launch_name, restart_count, stop_restarts

if TYPE_CHECKING:
    from pipegrid.survive import Survivors

T = TypeVar("T")

_KNOWN = (PipelineError, DisagreementError, JobFailedError)  # errors of which the monitors of all ranks know already
# For the rank that watches a lost one to say so first: the others' calls fail at the same moment, and not by name. Its
# thread may have to wait for a core; only ranks that have failed wait for it.
_LOST_SECONDS = 2.0


class Attempt:
    """Guards the training loop of a run that is saved and restarted. All ranks of the job use it together.

    ::

        with Attempt("runs/a", monitor=monitor) as attempt:
            found = checkpoints.load(state)
            first = attempt.begin(found.step if found else 0)
            for step in range(first + 1, steps + 1):
                train(step)
                stopping = attempt.completed(step)
                if stopping or step % 100 == 0:
                    checkpoints.save(state, step=step)
                if stopping:
                    break
        sys.exit(attempt.exit_code)

    - **Signals.** After SIGTERM or SIGINT on any rank, `completed` is True on all ranks after the same step. A second
      signal after SIGINT ends the process at once.
    - **Progress.** A run that fails at one step ``limit`` times without getting further is not tried again by the
      launcher's restarts: entering raises `RestartError` on every rank, and torchrun ends.
    - **Deaths.** With ``survivors``, whose block is around this one, ranks that live go on as one attempt, whatever
      becomes of the first rank; what they agree on, they agree on by `Survivors.run`.
    - **Failures.** With a monitor, an exception of any kind in the block is the job's: the other ranks leave with a
      `JobFailedError` that starts with it. A rank whose process is killed is named so, whatever it was doing.

    Args:
        directory: the record is ``attempts.jsonl`` in it, such as the checkpoints' directory; all nodes share it.
        monitor: the job's, which relays failures between ranks and bounds the wait for all ranks after a step.
        survivors: in place of a monitor, of worlds with a ``job_group``.
        limit: failures at one step after which the run ends.
        timeout: seconds that ranks wait for each other after a step; None is the default process group's.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with Attempt("runs/a") as attempt:
        ...     first = attempt.begin(0)
        ...
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        monitor: Monitor | None = None,
        survivors: Survivors[Any] | None = None,
        limit: int = 2,
        timeout: float | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.stopping = False
        if monitor is not None and survivors is not None:
            raise ValueError("give an Attempt a monitor or survivors: a monitor ends the job with its first failure")
        self._monitor, self._survivors = monitor, survivors
        self._limit = checked(limit, Count, "limit", ValueError)
        seconds = checked(timeout, Seconds | None, "timeout", ValueError)
        self._timeout = None if seconds is None else timedelta(seconds=seconds)
        self._group: dist.ProcessGroup | None = None
        self._neighbours: Neighbours | None = None
        self._lost = ""
        self._line: AttemptLine | None = None  # on rank 0
        self._offset = 0  # of that line, on all
        self._signals: StopSignals | None = None
        self._stopped_by = ""
        self._step = 0

    @property
    def exit_code(self) -> int:
        """The code for `sys.exit` after the block: 0, or `PREEMPTED` after a signal."""
        return PREEMPTED if self.stopping else 0

    def __enter__(self) -> Self:
        if self._survivors is None:
            # Beside the default group: on the host whatever computes, and apart from what a save does in its thread.
            spec = GroupSpec(tuple(range(dist.get_world_size())), "attempt")
            self._group = create_groups([spec], backend="gloo", timeout=self._timeout)[spec]
        self._offset, stopped = self._agreed("the attempt", self._entered)
        if stopped is not None:
            text, exit_code = stopped
            self._close(for_good=True)
            raise RestartError(text, exit_code=exit_code)
        if self._survivors is None:
            self._neighbours = Neighbours(self._lose, timeout=self._timeout)
        return self

    def _agreed(self, what: str, function: Callable[[Any], T]) -> T:
        """The result of ``function`` for the group of all ranks: the attempt's own, or that of the survivors' world."""
        if self._survivors is None:
            return function(self._group)
        return self._survivors.run(what, lambda world: function(world.job_group), keep_gradients=False)

    def _entered(self, group: dist.ProcessGroup) -> Any:
        """Add the attempt to the record; from the group's first, the place of its line, or why it must not run."""
        reason: RestartError | None = None
        if dist.get_rank(group) == 0 and self._line is None:
            attempts, now = read_attempts(self.directory), AttemptRecord(launch=launch_name(), restart=restart_count())
            reason = reason_to_stop(attempts, now, limit=self._limit)
            if reason is None:
                self._line = AttemptLine.append(self.directory, now)
        stopped = None if reason is None else (str(reason), reason.exit_code)
        return gather_plain((0 if self._line is None else self._line.offset, stopped), group)[0]

    def begin(self, step: int) -> int:
        """Note that the first ``step`` steps are done, as the checkpoint says; returns ``step``.

        From here on signals are requests. Before, SIGTERM ends the process at once: nothing is lost, and torchrun ends
        ranks so that wait for a dead one to come.
        """
        self._step = checked(step, Index, "step", ValueError)
        if self._signals is None:
            self._signals = StopSignals(self._failure)
        if self._line is not None:
            self._line.update(step=step)
        return step

    def completed(self, step: int) -> bool:
        """Note that step number ``step`` is done, and agree with all ranks whether a signal asks to stop.

        A collective of all ranks on the host. The device is not waited for.

        Raises:
            JobFailedError: another rank failed first, or did not come before the monitor's deadline.
            CollectiveFailedError: without a monitor: a rank has ended, or did not come within the timeout.
        """
        what = f"the agreement after step {checked(step, Index, 'step', ValueError)}"
        asked = self._agreed(what, lambda group: self._asked(group, what))
        self._step = step
        if self._line is not None:
            self._line.update(step=step)
        rank, number = divmod(asked, 1 << 8)
        if number:
            self.stopping = True
            self._stopped_by = f"{signal.Signals(number).name} on rank {rank}"
        return self.stopping

    def _asked(self, group: dist.ProcessGroup | None, what: str) -> int:
        """The highest rank that was asked to stop, and by which signal; 0 if none was."""
        received = None if self._signals is None else self._signals.received
        asked = torch.tensor([0 if received is None else (dist.get_rank() << 8) + received])
        all_reduce(asked, group, dist.ReduceOp.MAX)(Waiting(monitor=self._monitor, what=what))
        if self._line is None and dist.get_rank(group) == 0:  # the rank that wrote it is dead
            self._line = AttemptLine.at(self.directory, self._offset)
        return int(asked.item())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if self._line is not None:
                self._line.update(end="preempted" if self.stopping else "finished")
            if self.stopping and dist.get_rank() == 0:
                text = f"stopped by {self._stopped_by} after step {self._step}; exit code {PREEMPTED}"
                print(text, file=sys.stderr, flush=True)  # noqa: T201 -- the line that a person looks for
            self._close(for_good=self.stopping)
            return
        own = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
        try:
            if self._survivors is None and isinstance(error, Exception) and not isinstance(error, _KNOWN):
                first = self._first_failure(error, own)
                if first != own:
                    raise JobFailedError(f"first failure: {first.splitlines()[0]}") from error
        finally:
            self._close(for_good=False, failure=self._lost or own.splitlines()[0])

    def _first_failure(self, error: Exception, own: str) -> str:
        """The job's first failure: ``own``, which is that of ``error``, unless another rank's is known."""
        if isinstance(error, RuntimeError) and self._neighbours is not None:  # such as of a connection
            self._neighbours.is_lost(seconds=_LOST_SECONDS)
        if self._monitor is None:
            return self._lost or own
        first = self._monitor.failed(own).first
        return own if first.rank == dist.get_rank() else first.text

    def _lose(self, rank: int, failure: str) -> None:
        """In the thread that watches ``rank``."""
        self._lost = failure
        if self._monitor is not None:
            self._monitor.lost(rank, failure)

    def _close(self, *, for_good: bool, failure: str = "") -> None:
        """End the attempt here; ``for_good`` on all ranks and with torchrun, which is not to start them again."""
        signals, self._signals = self._signals, None
        signalled = signals is not None and signals.received is not None
        if signals is not None:
            signals.close(ignore=for_good)
        elif for_good:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._line is not None:
            self._line.close()
        if for_good and self._survivors is None:
            # All ranks ignore torchrun's SIGTERM before one of them causes it.
            wait_for_all(self._group, waiting=Waiting(what="the end of the attempt"))
            # A signal was torchrun's own, most likely; a restart would find the record.
            if not signalled:
                stop_restarts()
        if self._neighbours is not None:
            self._neighbours.close(failure=failure)
        # Without a reference here its connections close, and ranks that wait in it see that this one has left.
        group, self._group = self._group, None
        if group is not None:
            destroy_groups([group])

    def _failure(self) -> str | None:
        try:
            if self._monitor is not None:
                self._monitor.check()
            if self._survivors is not None:
                self._survivors.epochs.check("after a signal")
        except JobFailedError as error:
            return str(error)
        except RankLostError:
            return None  # the others go on
        return self._lost or None
