"""A thread beside each rank's step: it publishes where the rank stands, enforces a deadline, and passes failures on.

The thread looks at the runtime; the runtime does nothing for it but let it look, so a step costs the same with it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attrs import define

from pipegrid.schedules.arguments import as_number, require_integer, require_items, shown
from pipegrid.schedules.monitor.control import (
    STORE_VERBS,
    Control,
    ControlStore,
    DisagreementError,
    Failure,
    where_all_stand,
)
from pipegrid.schedules.monitor.device_progress import DeviceProgress

if TYPE_CHECKING:
    import torch

    from pipegrid.schedules.plan.plan import Plan

_AGREE_SECONDS = 60.0


class MonitorError(ValueError):
    """A monitor was given something it cannot watch."""


class JobFailedError(RuntimeError):
    """A rank failed before this step began; nothing was sent."""


@define
class _Watched:
    """What the thread looks at while a step runs."""

    where: Callable[[], str]
    abort: Callable[[str], object]
    running: bool = True
    place: str = ""
    since: float = 0.0


class Monitor:
    """Watches this rank, and tells it of the others.

    Give one to `PipelineRuntime`; it may serve many steps and many runtimes, one at a time. When a rank fails or
    stands still for too long, the first failure is the job's: every rank ends its transfers, and its error says
    whose failure it was and where all ranks stood.

    Args:
        store: of the job's own, such as `pipegrid.topology.control_store("monitor")`; a prefix for each monitor.
        rank: this rank.
        ranks: all ranks of the job that run steps.
        deadline: seconds that a rank may stand at one step of its plan, computing and waiting included; None
            leaves deadlines to the transfers.
        interval: seconds between two looks.
        device: on CUDA, the device's own progress is watched as well as the host's.
        agree_seconds: how long to wait for all ranks before the first step of a plan.

    Raises:
        MonitorError: a number of seconds that is not positive, a rank that is not among ``ranks``, or an argument of
            another kind.
    """

    def __init__(
        self,
        store: ControlStore,
        *,
        rank: int,
        ranks: Sequence[int],
        deadline: float | None = None,
        interval: float = 0.5,
        device: torch.device | None = None,
        agree_seconds: float = _AGREE_SECONDS,
    ) -> None:
        for name, seconds in (("deadline", deadline), ("interval", interval), ("agree_seconds", agree_seconds)):
            if seconds is not None or name != "deadline":
                as_number(name, seconds, "give a positive number of seconds", above=0.0, error=MonitorError)
        for verb in STORE_VERBS:
            if isinstance(store, type) or not callable(getattr(store, verb, None)):
                raise MonitorError(f"store is {shown(store)}, without {verb}(); give control_store('monitor')")
        require_integer("rank", rank, "give this rank", least=0, error=MonitorError)
        ranks = require_items("ranks", ranks, int, "give the list of all ranks that run steps", error=MonitorError)
        if rank not in ranks:
            raise MonitorError(f"rank {rank} is not among the ranks {list(ranks)}: give all ranks that run steps")
        self.deadline = deadline
        self.interval = interval
        self.marks = DeviceProgress() if device is not None and device.type == "cuda" else None
        self._control = Control(store, rank, ranks)
        self._agree_seconds = agree_seconds
        self._watched: _Watched | None = None
        self._failure: Failure | None = None
        self._unreachable: str | None = None
        self._steps = 0
        self._plan: tuple[Plan, str] | None = None
        self._threads: list[threading.Thread] = []  # one at most, once it runs
        self._stop = threading.Event()
        # Also at the interpreter's exit, which a thread inside a store's call would not survive.
        self._finalizer = weakref.finalize(self, _end, self._stop, self._threads)

    # For the runtime

    def begin(self, plan: Plan, *, where: Callable[[], str], abort: Callable[[str], object]) -> None:
        """A step of ``plan`` starts. Waits for the others only where this rank's plan is not the last step's.

        Raises:
            DisagreementError: ranks run different plans; nothing was sent.
            JobFailedError: the job has failed already.
            MonitorError: the monitor was closed.
        """
        if self._failure is None and self._stop.is_set():
            raise MonitorError("this monitor was closed, so nothing would watch the step: make another one")
        what = self._name(plan)
        changed = self._plan is None or self._plan[1] != what
        self._plan = plan, what
        self._steps += 1
        if self._failure is None and changed:
            self._failure = self._control.agree(self._steps, what, seconds=self._agree_seconds)
        elif self._failure is None:
            self._control.announce(self._steps, what)
        if self._failure is not None and self._failure.disagreement:
            raise DisagreementError(self._failure.text)
        if self._failure is not None:
            raise JobFailedError(
                f"rank {self._failure.rank} failed before this step: {self._failure.text}. Rebuild the communicator, "
                "the runtime and the monitor, with a store of another label"
            )
        self._watched = _Watched(where, abort, since=time.monotonic())
        if not self._threads:
            # A rank that goes before the thread's first look has said all the same where it began.
            self._watched.place = self._place(self._watched)
            self._control.publish(self._watched.place)
            # The thread must not keep the monitor alive: whoever drops it ends it.
            arguments = (weakref.ref(self), self._stop, self.interval)
            self._threads.append(
                threading.Thread(target=_look_on, args=arguments, name="pipegrid-monitor", daemon=True)
            )
            self._threads[0].start()

    def end(self) -> None:
        """The step is through. The device may still be at work; it stays watched."""
        if self._watched is not None:
            self._watched.running = False

    def failed(self, text: str) -> str:
        """This rank's step failed: tell all, end its transfers, and return what to say beside ``text``.

        That is: the first failure of the job where it was another's, and where every rank stood.
        """
        watched, self._watched = self._watched, None
        try:
            first = self._failure = self._control.record(text)
            if watched is not None:
                self._control.publish(watched.where(), last=True)
                watched.abort(text)
            positions = self._control.positions(seconds=2 * self.interval + 1)
        except RuntimeError as error:  # the store's server is gone: its process was the first to fail, perhaps
            return f". Where the other ranks stood is not known: the control store does not answer ({error})"
        own = first == Failure(self._control.rank, text)
        cause = "" if own else f". The first failure of the job was recorded by rank {first.rank}: {first.text}"
        return f"{cause}. Where the ranks stood:\n{where_all_stand(positions)}"

    def close(self) -> None:
        """End the thread. Twice is harmless."""
        self._finalizer()

    # The thread

    def look(self) -> None:
        """One look: publish what changed, pass on another's failure, note a deadline that passed."""
        watched = self._watched
        if watched is None or self._failure is not None:
            return
        place = self._place(watched)
        if place != watched.place:
            watched.place, watched.since = place, time.monotonic()
            self._control.publish(place)
        stood = time.monotonic() - watched.since
        if self.deadline is not None and stood > self.deadline and self._busy(watched):
            self._control.record(
                f"rank {self._control.rank} stood for {stood:.3g} s at {place}; the deadline is {self.deadline:.3g} s. "
                "Look at what it waits for; if it is only slow, give the monitor a longer deadline"
            )
        failure = self._control.failure()
        if failure is not None:  # never write None: the step's own thread may have set it meanwhile
            self._failure = failure
            self._control.publish(place, last=True)
            watched.abort(f"rank {failure.rank} failed: {failure.text}")

    def _busy(self, watched: _Watched) -> bool:
        return watched.running or (self.marks is not None and self.marks.oldest() is not None)

    def _place(self, watched: _Watched) -> str:
        place = watched.where() if watched.running else "between steps"
        unfinished = None if self.marks is None else self.marks.oldest()
        return place if unfinished is None else f"{place}; the device has not finished {unfinished}"

    def _name(self, plan: Plan) -> str:
        if self._plan is not None and self._plan[0] is plan:
            return self._plan[1]
        return f"{plan.num_microbatches} microbatches, plan {plan.digest}"


def _end(stop: threading.Event, threads: list[threading.Thread]) -> None:
    stop.set()
    for thread in threads:
        if thread is not threading.current_thread():  # which may be the last to hold the monitor
            thread.join()


def _look_on(monitor: weakref.ref[Monitor], stop: threading.Event, interval: float) -> None:
    while not stop.wait(interval):
        watching = monitor()
        if watching is None:
            return
        try:
            watching.look()
        except RuntimeError:  # the store's server is gone; the rank whose process it was is missed by its neighbours
            return
        del watching
