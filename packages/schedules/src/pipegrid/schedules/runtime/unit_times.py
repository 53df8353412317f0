"""A hook that measures what a unit costs this rank, step by step, and finds the ranks that are slow."""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import mean
from typing import Any

import cattrs
import torch
import torch.distributed as dist

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Count, checked
from pipegrid.monitor.collectives import Waiting, texts_of_ranks
from pipegrid.plans.plan import Action, ActionKind, Actor
from pipegrid.schedules.speeds import Planned, SlowRank, UnitSeconds, slow_ranks
from pipegrid.transport import streams
from pipegrid.transport.control.opening import resolve_device


class UnitTimes:
    """A `Hook` that measures how long the computes of one unit take on this rank; of the last ``steps`` steps.

    ::

        times = UnitTimes(Actor(position, replica))
        config = PipelineConfig(hooks=[times])
        for step in range(steps):
            forward_backward(...)
            times.end_step()
            if (step + 1) % 10 == 0:
                slow = times.slow(job_group)  # on all ranks; equal there
                routes = reroute(home, speeds=measured_speeds(slow))

    A step's value is the sum, over the kinds of compute of each stage here, of their mean duration: it does not depend
    on how many units a rank has, so ranks whose units have moved are measured on. Waits for messages are no part of it.
    On a device with streams the times are those of the device: two events around each compute, read by `slow`.

    Args:
        actor: this rank's position and replica.
        device: that computes; None is the CPU.
        steps: a rank is slow that was so in all of the last ``steps`` steps.
        clock: in seconds, of the host.
    """

    def __init__(
        self,
        actor: Actor,
        *,
        device: torch.device | None = None,
        steps: int = 10,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._steps = checked(steps, Count, "steps", StepArgumentError)
        self._actor, self._clock = actor, clock
        self._device = device if device is not None and streams.has_streams(device) else None
        self._spans: dict[tuple[ActionKind, int], list[tuple[Any, Any]]] = defaultdict(list)
        self._ended: deque[dict[tuple[ActionKind, int], list[tuple[Any, Any]]]] = deque(maxlen=self._steps)
        self._began: dict[Action, Any] = {}

    def _now(self) -> Any:
        return self._clock() if self._device is None else streams.timed_mark(self._device)

    def before(self, action: Action) -> None:
        """See `Hook`."""
        if action.kind.is_compute:
            self._began[action] = self._now()

    def after(self, action: Action) -> None:
        """See `Hook`."""
        if action.kind.is_compute:
            self._spans[action.kind, action.stage].append((self._began.pop(action), self._now()))

    def end_step(self) -> None:
        """The step has ended."""
        self._ended.append(dict(self._spans))
        self._spans.clear()

    def seconds(self) -> tuple[float, ...]:
        """Seconds of one unit in each of the last steps. On a device with streams the host waits for their end."""
        return tuple([sum(mean(map(self._took, spans)) for spans in step.values()) for step in self._ended])

    def _took(self, span: tuple[Any, Any]) -> float:
        begin, end = span
        return float(end - begin) if self._device is None else streams.seconds_between(begin, end)

    def slow(self, group: dist.ProcessGroup, *, limit: float = 1.5, planned: Planned = None) -> tuple[SlowRank, ...]:
        """The slow ranks of ``group``, by `slow_ranks`; none before ``steps`` steps have ended.

        Two small gathers, which all ranks of the group call after the same step.

        Raises:
            PlanError: as `slow_ranks`.
            CollectiveFailedError: a rank of the group has ended, or has not come within the group's timeout.
        """
        own = json.dumps(cattrs.unstructure(UnitSeconds(dist.get_rank(), self._actor, self.seconds())))
        _, device = resolve_device(None, None, group)
        said = texts_of_ranks(own, group, device, Waiting(what="the comparison of the times of units"))
        measured = [cattrs.structure(json.loads(each), UnitSeconds) for each in said.values()]
        if any(len(each.steps) < self._steps for each in measured):
            return ()
        return slow_ranks(measured, limit=limit, planned=planned)
