"""A stretch of training without failures, in closed form: steps and checkpoints after so many seconds."""

from __future__ import annotations

import math

from attrs import frozen

EDGE = 1e-6
"""Part of a step: a time this close to the end of a step counts as that end."""


def whole(steps: float) -> int:
    """Number of complete steps in ``steps``."""
    return math.floor(steps + EDGE)


@frozen
class Stretch:
    """Training from ``done`` steps on, with a checkpoint of ``saved`` of them.

    A step takes ``step`` seconds. After ``every`` steps since the last checkpoint (None: never) training stops for
    ``checkpoint`` seconds; ``write`` seconds later, while it goes on, the checkpoint can be loaded, and not before that
    begins the next. A checkpoint that a failure has prevented is made up for after one step.
    """

    step: float
    every: int | None
    checkpoint: float
    write: float
    done: int
    saved: int

    @property
    def first(self) -> int:
        """Steps before the first checkpoint."""
        return max(1, (self.every or 0) - (self.done - self.saved))

    @property
    def spacing(self) -> int:
        """Steps between checkpoints."""
        return max(self.every or 1, math.ceil(self.write / self.step - EDGE))

    def at(self, elapsed: float) -> tuple[float, int, float]:
        """After ``elapsed`` seconds: steps done, steps that a checkpoint keeps, seconds in checkpoints."""
        head = self.first * self.step
        if self.every is None or elapsed < head:
            return self.done + elapsed / self.step, self.saved, 0.0
        cycle = self.checkpoint + self.spacing * self.step
        slack = EDGE * self.step
        turn = math.floor((elapsed - head + slack) / cycle)
        rest = max(0.0, elapsed - head - turn * cycle)
        base = self.done + self.first
        steps = min(max(0.0, rest - self.checkpoint) / self.step, self.spacing)
        kept = math.floor((elapsed - head - self.checkpoint - self.write + slack) / cycle)
        return (
            base + turn * self.spacing + steps,
            base + kept * self.spacing if kept >= 0 else self.saved,
            turn * self.checkpoint + min(rest, self.checkpoint),
        )

    def next_edge(self, elapsed: float) -> float:
        """Seconds at which a step ends, or the checkpoint after it: the first such at ``elapsed`` or later."""
        head, slack = self.first * self.step, EDGE * self.step
        if self.every is None or elapsed <= head + slack:
            return math.ceil(elapsed / self.step - EDGE) * self.step
        cycle = self.checkpoint + self.spacing * self.step
        start = head + math.floor((elapsed - head + slack) / cycle) * cycle
        if elapsed <= start + slack:
            return elapsed
        steps = max(0, math.ceil((elapsed - start - self.checkpoint) / self.step - EDGE))
        return start + self.checkpoint + steps * self.step
