"""Which rank gets `kill -9`, when, and what it was doing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from attrs import define, frozen


@frozen
class Death:
    """Of ``rank``, as it comes to ``action`` in ``step``; ``attempt``: how often all ranks had been started again."""

    step: int
    rank: int
    action: str
    attempt: int = 0

    def __str__(self) -> str:
        return f"step {self.step}: kill -9 of rank {self.rank} as it comes to {self.action}"


def deaths(steps: int, every: int) -> list[Death]:
    """One every ``every`` steps, on ranks 0 and 1 of the first stage and 2 and 3 of the last.

    After the third, the last stage is on no rank: all ranks start again, from a checkpoint.
    """
    planned = (
        Death(every, 3, "B"),
        Death(2 * every, 0, "SEND_F"),
        Death(3 * every, 2, "F"),
        Death(4 * every, 1, "optimizer", attempt=1),
    )
    return [death for death in planned if death.step <= steps]


@define(eq=False)
class Killer:
    """Kills this process with SIGKILL where it is its turn. A hook of the steps, for their actions.

    ``last_words`` is called before, for what is drawn.
    """

    turns: frozenset[Death]
    rank: int
    attempt: int
    last_words: Callable[[], object]
    step: int = 0

    def reach(self, action: str) -> None:
        """This rank has come to ``action``."""
        if Death(self.step, self.rank, action, self.attempt) in self.turns:
            self.last_words()
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, action: Any) -> None:
        """Called before each action."""
        self.reach(action.kind.name)

    def after(self, action: Any) -> None:
        """Called after each action."""
