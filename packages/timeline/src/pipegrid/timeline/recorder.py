"""A runtime hook that records when each action ran: one rank's `Track` of a `Recording`.

Times are the host's monotonic clock. On CUDA an action is noted when it was issued; the host runs ahead of the
device there, so a track shows the order and the host's share, not the kernels.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from pipegrid.plans.plan import Action, ActionKind, Plan, require_plan
from pipegrid.timeline.recording import Aside, Recorded, TimelineError, Track


class Recorder:
    """Records the start and end of every action; of a message and a ``COLLECTIVE``, posting and completion.

    Call `start`, run a step, and take this rank's `track`. Tracks are plain data, fit for
    `torch.distributed.all_gather_object`. So that tracks of several ranks share a zero, give all ranks of a host the
    same ``zero``; across hosts, whose clocks have nothing in common, call `start` right after a barrier.

    ``memory``: bytes that are allocated now, such as `torch.cuda.memory_allocated`; then the recording knows the
    activations of each stage as well.

    Examples:
        >>> recorder = Recorder()
        >>> with recorder.aside("data"):
        ...     batch = [1, 2, 3]
        ...
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, memory: Callable[[], int] | None = None
    ) -> None:
        self._clock, self._memory = clock, memory
        self._zero = clock()
        self._begun: dict[Action, tuple[float, int]] = {}  # when each that runs began, and bytes that were held
        self._spans: list[tuple[Action, float, float, int | None]] = []  # start, end and bytes of each
        self._completed: dict[Action, float] = {}
        self._asides: list[Aside] = []

    def start(self, zero: float | None = None) -> None:
        """Clear the recording, and count seconds from now, or from ``zero`` on the recorder's clock."""
        self._spans, self._completed, self._asides = [], {}, []
        self._zero = self._clock() if zero is None else zero

    @property
    def now(self) -> float:
        """Seconds since `start`."""
        return self._clock() - self._zero

    def before(self, action: Action) -> None:
        """Note the start of an action, and the memory in use."""
        held = 0 if self._memory is None else self._memory()
        self._begun[action] = self.now, held

    def after(self, action: Action) -> None:
        """Record the span of an action (of a message: its posting) and the memory that it added."""
        end, (since, held) = self.now, self._begun.pop(action)
        self._spans.append((action, since, end, None if self._memory is None else self._memory() - held))

    def completed(self, action: Action) -> None:
        """Note the time at which the message of ``action`` arrived, or left."""
        self._completed[action] = self.now

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Record an activity outside the plan: ``with recorder.aside("optimizer"): ...``."""
        start = self.now
        try:
            yield
        finally:
            self._asides.append(Aside(name, start, self.now))

    @property
    def computing(self) -> float:
        """Seconds spent in forwards and backwards since `start`."""
        return sum(end - start for action, start, end, _ in self._spans if action.kind.is_compute)

    def track(self, plan: Plan, *, rank: int, position: int) -> Track:
        """The actions recorded since `start`, by their index in ``plan``; of several steps, the last."""
        require_plan(plan, error=TimelineError)
        places: dict[Action, list[int]] = defaultdict(list)  # several of UNSHARD, RESHARD and REDUCE_GRAD
        for index, action in enumerate(plan.actions(position)):
            places[action].append(index)
        recorded: dict[int, Recorded] = {}
        at = -1
        for action, start, end, grown in self._spans:
            if action not in places:
                raise TimelineError(f"{action} was recorded, and position {position} of the plan has no such action")
            # Actions run in the plan's order; one that lies behind is of the next step.
            at = next((place for place in places[action] if place > at), places[action][0])
            posted = end if action.kind.is_message or action.kind is ActionKind.COLLECTIVE else None
            recorded[at] = Recorded(at, start, self._completed.get(action, end), posted, grown)
        return Track(rank, position, [recorded[index] for index in sorted(recorded)], self._asides)
