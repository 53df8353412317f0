"""Hooks around every action of a step: for tracing, fault injection, user code."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from pipegrid.schedules.plan.actions import Action


@runtime_checkable
class Hook(Protocol):
    """Called around every action: for tracing, fault injection, user code."""

    def before(self, action: Action) -> None:
        """The action's inputs are there; it starts now."""
        ...

    def after(self, action: Action) -> None:
        """The action is done (a message: posted)."""
        ...


@runtime_checkable
class MessageHook(Hook, Protocol):
    """A hook with a call for the end of a message."""

    def completed(self, action: Action) -> None:
        """The message of ``action`` has arrived, or has left."""
        ...


class ProfilerRanges:
    """A `Hook` that opens a profiler range per action, named as in the plan: ``3F7``.

    The ranges are those of `torch.profiler.record_function`: the torch profiler shows them, and so does Nsight
    (as NVTX) under ``torch.autograd.profiler.emit_nvtx``. A range costs a few microseconds even without a profiler.
    """

    def __init__(self) -> None:
        self._names: dict[Action, str] = {}
        self._range: torch.profiler.record_function | None = None

    def before(self, action: Action) -> None:
        """Open the action's range."""
        name = self._names.get(action)
        if name is None:
            name = self._names[action] = str(action)
        self._range = torch.profiler.record_function(name)
        self._range.__enter__()  # type: ignore[no-untyped-call]  # as torch has it

    def after(self, action: Action) -> None:
        """Close it."""
        del action
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
