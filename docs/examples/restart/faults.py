"""Faults that a rank does to itself in the middle of a step: one for each attempt, until none is left."""

from __future__ import annotations

import os
import signal
import time
from typing import Final

from attrs import define, frozen

from pipegrid.schedules import Action

KINDS: Final = ("kill", "raise", "hang")


class InjectedFault(RuntimeError):  # noqa: N818 -- planned
    """What a ``raise`` raises."""


@frozen
class Fault:
    """``kind`` on rank ``rank`` in step ``step``, written ``kill@7:1``."""

    kind: str
    step: int
    rank: int

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read ``kind@step:rank``."""
        kind, _, where = text.partition("@")
        step, _, rank = where.partition(":")
        if kind not in KINDS:
            raise ValueError(f"fault {text!r}: kind@step:rank, with a kind of {', '.join(KINDS)}")
        return cls(kind, int(step), int(rank))

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}:{self.rank}"


@define
class FaultHook:
    """A hook of the runtime that commits the fault before the third action of its step, on its rank."""

    fault: Fault | None
    rank: int
    step: int = 0
    actions: int = 0

    def start(self, step: int) -> None:
        """A step begins."""
        self.step, self.actions = step, 0

    def before(self, action: Action) -> None:
        """See `pipegrid.schedules.Hook`."""
        del action
        self.actions += 1
        if self.fault is None or self.actions != 3 or (self.step, self.rank) != (self.fault.step, self.fault.rank):
            return
        if self.fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault.kind == "hang":
            time.sleep(3600)
        raise InjectedFault(str(self.fault))

    def after(self, action: Action) -> None:
        """See `pipegrid.schedules.Hook`."""
