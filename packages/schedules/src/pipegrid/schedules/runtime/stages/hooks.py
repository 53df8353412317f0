"""Hooks around every action of a step: for tracing, fault injection, user code."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from pipegrid.plans.plan.actions import Action
from pipegrid.transport import streams


@runtime_checkable
class Hook(Protocol):
    """Called around every action: for tracing, fault injection, user code."""

    def before(self, action: Action) -> None:
        """The action's inputs are there; it starts now."""

    def after(self, action: Action) -> None:
        """The action is done (a message: posted)."""


@runtime_checkable
class MessageHook(Hook, Protocol):
    """A hook with a call for the end of a message."""

    def completed(self, action: Action) -> None:
        """The message of ``action`` has arrived, or has left."""


class ProfilerRanges:
    """A `Hook` that opens a profiler range per action, named as in the plan: ``3F7``.

    The ranges are those of `torch.profiler.record_function`: the torch profiler shows them, and so does Nsight
    (as NVTX) under ``torch.autograd.profiler.emit_nvtx``. A range costs a few microseconds even without a profiler.
    """

    def __init__(self) -> None:
        self._ranges: dict[Action, torch.profiler.record_function] = {}

    def before(self, action: Action) -> None:
        """Open the action's range."""
        opened = self._ranges[action] = torch.profiler.record_function(str(action))
        opened.__enter__()  # type: ignore[no-untyped-call]  # as torch has it

    def after(self, action: Action) -> None:
        """Close it."""
        self._ranges.pop(action).__exit__(None, None, None)


class HostLead:
    """A `Hook` that holds the host at most ``most`` microbatches ahead of a device with streams.

    It records an event after the last compute of each microbatch, and before each compute waits until at most ``most``
    of them are pending. A wait ends without this host: all that the event depends on was issued before it, here and, in
    a verified plan, on the other positions.
    """

    def __init__(self, actions: Iterable[Action], device: torch.device, most: int = 3) -> None:
        computes = [action for action in actions if action.kind.is_compute]
        self._last = frozenset({action.microbatch: action for action in computes}.values())
        self._device, self._most = device, most
        self._pending: deque[Sequence[Any]] = deque()

    def before(self, action: Action) -> None:
        """See `Hook`."""
        while action.kind.is_compute and len(self._pending) > self._most:
            for event in self._pending.popleft():
                event.synchronize()

    def after(self, action: Action) -> None:
        """See `Hook`."""
        if action in self._last:
            self._pending.append(streams.mark(self._device))
