"""A thread beside each rank's step: it publishes the rank's place in the plan, enforces deadlines, relays failures.

The thread reads the runtime's cursor; a step makes no call per action for it. Every call of the store has a deadline,
since the store may be what failed: its process stopped, its node gone.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, frozen

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Index, Seconds, checked, shown
from pipegrid.monitor.control import (
    STORE_VERBS,
    Control,
    ControlStore,
    DisagreementError,
    Failure,
    bounded_store,
    silent,
    where_all_stand,
)
from pipegrid.monitor.device_progress import progress_of
from pipegrid.monitor.last_seen import HEARTBEAT_SECONDS, LastSeen
from pipegrid.topology.addresses import server_of
from pipegrid.topology.bounded_calls import BoundedCall, BoundedCalls, SilentStoreError
from pipegrid.transport.collectives.waiting import (
    BACKSTOP_SECONDS,
    NotDone,
    device_collectives,
    finish,
    host_collectives,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_FIRST_DEADLINE = 60.0
FIRST_STEP_SECONDS = 1800.0
"""A first step on an accelerator: kernels are loaded and compiled and communicators connect, stage after stage."""
# Between two looks at this rank's own place. Local, so it may be short.
_LOOK_SECONDS = 0.1
# Seconds that a look or a failing rank waits for one call of the store, and for the final positions of the others.
_BRIEF_SECONDS = 0.5
_BETWEEN = "between steps"
_STUCK_SECONDS = 0.05  # the same where the last call has not returned


class _Plan(Protocol):
    """The part of a step's plan that ranks compare; digests are equal for equal plans alone."""

    @property
    def num_microbatches(self) -> int: ...
    @property
    def digest(self) -> str: ...


class JobFailedError(RuntimeError):
    """The job has failed, on another rank or in the store; nothing was sent.

    Examples:
        >>> from torch.distributed import HashStore
        >>> monitor = Monitor(HashStore(), rank=0, ranks=[0], deadline=60.0)
        >>> _ = monitor.failed("the data has ended")
        >>> monitor.check()
        Traceback (most recent call last):
            ...
        pipegrid.monitor.monitor.JobFailedError: the data has ended. Rebuild the communicator, the runtime and the
            monitor, with a store of another label
    """


@frozen
class Report:
    """A failing rank's knowledge of the job.

    Attributes:
        first: the job's first failure.
        places: the place of every rank in the plan, a line each; or why it is not known.

    Examples:
        >>> Report(first=Failure(0, "the data has ended"), places="rank 0: step 2").first.rank
        0
    """

    first: Failure
    places: str


@define
class _Watched:
    """The state of a running step that the thread reads."""

    where: Callable[[], str]
    abort: Callable[[str], object]
    deadline: float | None
    running: bool = True
    beside: str = _BETWEEN
    # Of a wait beside the plan that the thread ends: at a time of `time.monotonic`, the error if it is late then.
    late: Callable[[float], str | None] | None = None
    place: str = ""
    published: str = ""
    published_at: float = 0.0
    since: float = 0.0
    unfinished: str = ""

    def stands(self) -> str:
        """The place of this rank now, with the work that the device had not finished at the last look."""
        return (self.where() if self.running else self.beside) + self.unfinished


class Monitor:
    """Watches this rank's steps and relays failures between all ranks of the job.

    One monitor may serve many runtimes, one at a time. When a rank fails or exceeds the deadline, every rank ends its
    transfers, and its error starts with that failure.

    Args:
        store: for this monitor alone, such as `pipegrid.topology.control_store("monitor")`.
        rank: this rank.
        ranks: all ranks of the job that run steps.
        deadline: seconds that a rank may spend at one step of its plan, waiting included; None leaves deadlines to the
            transfers.
        first_deadline: the same for the first step of each plan, in which ranks compile, allocate and connect, and for
            the wait of all ranks for each other before it. None: 60 seconds, with an accelerator as ``device`` 30
            minutes, or ``deadline`` if that is longer.
        interval: seconds between two looks at the store.
        device: on CUDA, the device's own progress counts as well as the host's.

    Raises:
        StepArgumentError: seconds that are not positive, or a rank that is not among ``ranks``.

    Examples:
        >>> from torch.distributed import HashStore
        >>> monitor = Monitor(HashStore(), rank=0, ranks=[0], deadline=60.0)
        >>> monitor.failed("the data has ended").first.text
        'the data has ended'
        >>> monitor.close()
    """

    def __init__(
        self,
        store: ControlStore,
        *,
        rank: int,
        ranks: Sequence[int],
        deadline: float | None = None,
        first_deadline: float | None = None,
        interval: float = 0.5,
        device: torch.device | None = None,
    ) -> None:
        deadline = checked(deadline, Seconds | None, "deadline", StepArgumentError)
        first_deadline = checked(first_deadline, Seconds | None, "first_deadline", StepArgumentError)
        interval = checked(interval, Seconds, "interval", StepArgumentError)
        if lacking := [verb for verb in STORE_VERBS if not callable(getattr(store, verb, None))]:
            raise StepArgumentError(f"store is {shown(store)}, without {lacking[0]}(); give control_store('monitor')")
        if device is not None and not isinstance(getattr(device, "type", None), str):
            raise StepArgumentError(f"device is {shown(device)}; give the torch.device that computes, or None")
        rank = checked(rank, Index, "rank", StepArgumentError)
        everyone: tuple[int, ...] = checked(ranks, tuple[Index, ...], "ranks", StepArgumentError)
        if rank not in everyone:
            raise StepArgumentError(f"rank {rank} is not among the ranks {list(everyone)}: give all that run steps")
        self.rank, self.deadline, self.interval = rank, deadline, interval
        least = _FIRST_DEADLINE if device is None or device.type == "cpu" else FIRST_STEP_SECONDS
        self.first_deadline = max(least, deadline or 0.0) if first_deadline is None else first_deadline
        self.progress = None if device is None else progress_of(device)
        self._calls = BoundedCalls()
        self._patience = patience = deadline or self.first_deadline
        self._control = Control(bounded_store(store, self._calls, patience), rank, everyone)
        self._unbounded = Control(store, rank, everyone)  # for announcements: whole ones are waited for, not each call
        # For looks and for a failing rank: a store that is silent delays neither.
        brief = bounded_store(store, self._calls, min(_BRIEF_SECONDS, patience), stuck=_STUCK_SECONDS)
        self._brief = Control(brief, rank, everyone)
        self._last_seen = LastSeen(self._brief, server_of(store))
        self._watched: _Watched | None = None
        self._failure: Failure | None = None
        self._untold = False  # whether the store does not have it yet
        self._telling = threading.Lock()  # from several threads: the place that is published last was read last
        self._steps = 0
        self._agreed: set[str] = set()  # the plans that all ranks have run
        self._silent: str | None = None  # why a step was not announced
        self._announcing = threading.Lock()
        self._unannounced: str | None = None  # what the running step runs, unless it was announced
        self._announcement: BoundedCall | None = None  # of the running step, under way
        self._plan: tuple[_Plan, str] | None = None
        self._threads: list[threading.Thread] = []  # one at most, once it runs
        self._stop = threading.Event()
        # Also at the interpreter's exit, which a thread inside a store's call would not survive.
        self._finalizer = weakref.finalize(self, _end, self._stop, self._threads, self._calls)

    def begin(self, plan: _Plan, *, where: Callable[[], str], abort: Callable[[str], object]) -> None:
        """Start a step of ``plan``. Waits for all ranks, and the store, if this rank has not run the plan before.

        A plan that all ranks have run is announced beside the step (`announce`): the last to announce another one fails
        the job.

        Raises:
            DisagreementError: ranks run different plans, or one did not arrive; nothing was sent.
            JobFailedError: the job has failed already, or its store does not answer.
            StepArgumentError: the monitor was closed.
        """
        if self._failure is None and self._stop.is_set():
            raise StepArgumentError("this monitor was closed, so nothing would watch the step: make another one")
        before, named = self._plan or (None, "")
        what = named if before is plan else f"{plan.num_microbatches} microbatches, plan {plan.digest}"
        changed = named != what
        self._plan = plan, what
        self._steps += 1
        try:
            if self._failure is None and not self._threads:
                self._last_seen.introduce(self._control.store)
            self._unannounced = what if what in self._agreed else None
            if self._failure is None and what not in self._agreed:
                self._failure = self._control.agree(self._steps, what, seconds=self.first_deadline)
                self._agreed.add(what)
            if self._failure is None and not self._threads:
                # A rank that dies before the thread's first look has published where it began.
                self._control.publish(where())
        except RuntimeError as error:
            told = self._record(self._unanswered(error)).text  # where it answers again: others may wait for this rank
            abort(told)
            raise JobFailedError(f"before step {self._steps}, {told.splitlines()[0]}. {_REBUILD}") from error
        self._require_agreement()
        if self._failure is not None:
            first = self._failure.text.splitlines()[0]
            raise JobFailedError(f"rank {self._failure.rank} failed before this step: {first}. {_REBUILD}")
        deadline = self.first_deadline if changed and self.deadline is not None else self.deadline
        self._watched = _Watched(where, abort, deadline, since=time.monotonic())
        if not self._threads:
            # The thread must not keep the monitor alive: dropping it ends the thread.
            given = weakref.ref(self), self._stop, min(self.interval, _LOOK_SECONDS)
            self._threads.append(threading.Thread(target=_look_on, args=given, name="pipegrid-monitor", daemon=True))
            self._threads[0].start()

    def end(self) -> None:
        """End the step. The device may still be at work; it stays watched.

        Raises:
            DisagreementError, JobFailedError: as `begin`, of what was announced beside the step.
        """
        self.announce()
        call, self._announcement = self._announcement, None
        if call is not None:
            try:
                self._calls.wait(call, seconds=self._patience)
            except Exception as error:  # noqa: BLE001 -- the errors of any store; raised below as JobFailedError
                self._not_announced(error)
        if self._watched is not None:
            self._watched.running = False
        self._require_agreement()
        if self._silent is not None:
            raise JobFailedError(self._silent)

    def _require_agreement(self) -> None:
        if self._failure is not None and self._failure.disagreement:
            raise DisagreementError(self._failure.text)

    def announce(self) -> None:
        """Start to announce the running step, on the thread that asks the store, unless that was done; from any thread.

        The thread takes a core from the step for a moment. So a runtime calls this where that delays no other rank,
        behind its first message; without one the next look does, or the end of the step.
        """
        with self._announcing:
            what, self._unannounced = self._unannounced, None
            if what is not None and self._failure is None:
                self._announcement = self._calls.start(self._unbounded.announce, self._steps, what)
                self._calls.start(self._unbounded.tidy)  # for which no step waits

    def _require_announced(self, now: float) -> None:
        """Abort this rank's transfers where the announcement of the step has failed, or the store's answer is late.

        ``now``: in `time.monotonic` seconds.
        """
        call = self._announcement
        if call is not None and not call.done.locked() and call.error is not None:
            self._not_announced(call.error)
        elif call is not None and call.done.locked() and now - call.begun > self._patience:
            self._not_announced(SilentStoreError(f"the store did not answer within {self._patience:.3g} s"))

    def _not_announced(self, error: BaseException) -> None:
        text, watched = self._unanswered(error), self._watched  # once: another thread may end the watch meanwhile
        self._silent = f"before step {self._steps}, {text}. {_REBUILD}"
        if self._failure is None:
            self._failure = Failure(self.rank, text)
            if watched is not None:
                watched.abort(text)

    def _unanswered(self, error: BaseException) -> str:
        """Describe that the store has not answered, or that its host is out of reach if that is another one."""
        self._last_seen.unanswered()
        silence = self._last_seen.silence()
        if not silence or isinstance(error, SilentStoreError):
            return silence or silent(error)
        return f"{silence} ({' '.join(str(error).split())[:200]})"

    def failed(self, text: str) -> Report:
        """Record that this rank has failed, end its transfers, and report the job's first failure.

        The record and this rank's place are written before the abort, so that ranks which it reaches find them; a store
        that does not answer meanwhile is asked once more after it.
        """
        watched, self._watched = self._watched, None
        first = self._record(text)
        if watched is not None:
            self._untold = self._untold or not self._tells(watched.where)
            watched.abort(first.text)
        try:
            if self._untold:
                first = self._failure = self._brief.record(first.text, rank=first.rank)
                self._untold = False
                if watched is not None:
                    self._brief.publish(watched.where(), last=True)
            places = where_all_stand(self._brief.positions(seconds=min(self.interval, _BRIEF_SECONDS) + 0.1))
        except RuntimeError as error:
            places = f"  not known: {silent(error)}"
        return Report(first, places)

    def lost(self, rank: int, text: str) -> None:
        """Record that ``rank`` is gone, and end this rank's transfers. From any thread."""
        watched, known = self._watched, self._failure
        first = self._record(text, rank)
        if known is None and watched is not None:
            self._fail(watched, first)

    @property
    def failure(self) -> str | None:
        """The job's first failure, as far as this rank knows of one. Local."""
        return None if self._failure is None else self._failure.text

    def check(self) -> None:
        """Raise the job's first failure, if this rank knows of one. Local.

        Raises:
            JobFailedError: the job has failed.
        """
        if self._failure is not None:
            raise JobFailedError(f"{self._failure.text.splitlines()[0]}. {_REBUILD}")

    def wait(self, work: Any, what: str, *, on_device: bool | None = None) -> None:
        """Wait for a collective beside the plan (a reduction, a norm) as for an action: under the deadline.

        On CUDA only the current stream waits for it, and the device's progress is watched; a collective that fails
        there later is the job's failure as soon as the thread sees it.

        Args:
            work: of a collective that was started with ``async_op=True``.
            what: for errors, such as ``"all-reduce of gradients"``.
            on_device: whether its tensors are on a device with streams; None: if this monitor has such a device.

        Raises:
            JobFailedError: another rank failed first, or the deadline passed.
            RuntimeError: the collective failed.
        """
        on_device = self.progress is not None if on_device is None else on_device
        failed = self.finish(work, None, what, on_device=on_device)
        if failed is not None and failed.error is not None:
            raise failed.error

    def finish(
        self,
        work: Any,
        group: ProcessGroup | None,
        what: str,
        *,
        on_device: bool,
        host: bool = False,
        deadline: float | None = None,
        look: Callable[[], object] = lambda: None,
        absent: Callable[[], str] = str,
    ) -> NotDone | None:
        """Wait as `wait` does for a collective of ``group`` (None: the default one); return its failure, if any.

        Where its tensors are on a device with streams, the host waits as well if ``host``, or if nothing watches the
        device's progress: meanwhile it calls ``look`` several times a second. Past the deadline (``deadline``, of a
        monitor without one) ``absent`` names the ranks that have not joined, in words.

        Raises:
            JobFailedError: another rank failed first, or the deadline passed.
        """
        watched, began, backstop = self._watched, time.monotonic(), 0.0
        deadline = self.deadline or deadline
        if watched is not None:
            watched.beside = what

        def given_up() -> str | None:
            look()
            return self.failure

        def late(now: float) -> str | None:
            passed = deadline is not None and now - began > deadline
            return self._late(now - began, what, deadline or 0.0, absent) if passed else None

        if watched is not None and getattr(work, "single", False):
            watched.late, backstop = late, BACKSTOP_SECONDS  # its own end closes connections before the cause is known

        try:
            end = None if deadline is None else began + deadline + backstop
            host = host or self.progress is None
            failed = finish(work, group, on_device=on_device, host=host, end=end, given_up=given_up)
        finally:
            if watched is not None:
                watched.late = None
        if failed is not None and failed.why == "late" and (text := late(time.monotonic())) is not None:
            self._failure = self._record(text)
            if watched is not None:
                watched.abort(self._failure.text)
        if failed is not None and failed.error is None:
            host_collectives.cut([group])  # after the record of the cause
        if failed is None or failed.error is None:
            self.check()
        if failed is None and self.progress is not None and on_device:
            self.progress.mark(what)
        if failed is None and watched is not None:
            watched.beside = _BETWEEN
        return failed

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._finalizer()

    def look(self, now: float, *, ask: bool = True) -> None:
        """One look: note this rank's place and its deadline; where ``ask``, publish it and look for failures."""
        watched = self._watched
        if watched is None or self._failure is not None:
            return
        self.announce()
        try:
            device_collectives.check()
        except RuntimeError as error:
            self._fail(watched, self._record(f"rank {self.rank}: {error}"))
            return
        unfinished = None if self.progress is None else self.progress.oldest()
        watched.unfinished = "" if unfinished is None else f"; the device has not finished {unfinished}"
        place = watched.stands()
        if place != watched.place:
            watched.place, watched.since = place, now
        stood = now - watched.since
        busy = watched.running or unfinished is not None
        if watched.deadline is not None and stood > watched.deadline and busy:
            self._fail(watched, self._record(self._late(stood, place, watched.deadline)))
            return
        if (late := watched.late) is not None and (text := late(now)) is not None:
            self._fail(watched, self._record(text))
            return
        self._require_announced(now)  # after the place: where both are late, the error is that of the step
        if ask and self._failure is None:
            try:
                if place != watched.published or now - watched.published_at > HEARTBEAT_SECONDS:
                    self._brief.publish(place)
                    watched.published, watched.published_at = place, now
                failure = self._brief.failure()
                self._last_seen.answered()
                self._last_seen.listen(stood if place != _BETWEEN else 0.0, watched.deadline)
            except RuntimeError:
                self._last_seen.unanswered()
                return  # neighbours notice the death of its process, and deadlines hold without the store
            if failure is not None:
                self._fail(watched, failure)

    def fail_here(self, error: Exception) -> None:
        """End this rank's transfers with the ``error`` of the thread, which cannot look any more."""
        text = f"rank {self.rank}: the monitor's thread has failed: {type(error).__name__}: {error}"
        if self._failure is None and self._watched is not None:
            self._fail(self._watched, Failure(self.rank, text))

    def _fail(self, watched: _Watched, failure: Failure) -> None:
        self._failure = failure
        told = not self._untold and self._tells(watched.stands)  # before the abort, as in `failed`
        watched.abort(failure.text)
        if not told:
            self._tells(watched.stands)

    def _tells(self, place: Callable[[], str]) -> bool:
        """Publish the ``place``, read now: a step may have left what a look has seen. Whether the store answered."""
        try:
            with self._telling:
                self._brief.publish(place(), last=True)
        except RuntimeError:
            return False
        return True

    def _record(self, text: str, rank: int | None = None) -> Failure:
        """The job's first failure: one known here, else the store's, else this one."""
        if self._failure is None:
            try:
                self._failure = self._brief.record(text, rank=rank)
            except RuntimeError:  # the store is busy, or gone with its process
                self._failure, self._untold = Failure(self.rank if rank is None else rank, text), True
        return self._failure

    def _late(self, stood: float, place: str, deadline: float, absent: Callable[[], str] = str) -> str:
        text = f"rank {self.rank} has been at {place} for {stood:.3g} s; the deadline is {deadline:.3g} s"
        silence = self._last_seen.silence()
        return f"{silence} ({text})" if silence else f"{text}: {absent() or 'look at what it waits for'}"


_REBUILD = "Rebuild the communicator, the runtime and the monitor, with a store of another label"


def _end(stop: threading.Event, threads: list[threading.Thread], calls: BoundedCalls) -> None:
    stop.set()
    for thread in threads:
        if thread is not threading.current_thread():  # which may be the last to hold the monitor
            thread.join()
    calls.close()


def _look_on(monitor: weakref.ref[Monitor], stop: threading.Event, seconds: float) -> None:
    asked = -1.0
    while not stop.wait(seconds):
        if (watching := monitor()) is None:
            return
        now = time.monotonic()
        ask = now - asked >= watching.interval
        try:
            watching.look(now, ask=ask)
        except Exception as error:  # noqa: BLE001 -- a thread that ends without a word leaves the job without deadlines
            watching.fail_here(error)
            return
        if ask:
            asked = now
        del watching
