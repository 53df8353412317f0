"""What a person sees of the training: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import frozen
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_EVERY = 10.0
"""Seconds between plain lines."""


@frozen(kw_only=True)
class Figures:
    """Where the training is. ``accuracy`` and ``bubble`` are shares; None where not measured yet.

    ``attempt`` counts the starts of the run: more than 1 where it was resumed.
    """

    step: int
    loss: float
    samples_per_second: float
    accuracy: float | None
    bubble: float | None
    attempt: int = 1

    def __str__(self) -> str:
        parts = [f"loss {self.loss:.4f}", f"{self.samples_per_second:.0f} samples/s"]
        if self.accuracy is not None:
            parts.append(f"test accuracy {100 * self.accuracy:.1f}%")
        if self.bubble is not None:
            parts.append(f"bubble {100 * self.bubble:.0f}%")
        return "  ".join(parts)


class Display:
    """Shows `Figures` as they come."""

    def __init__(self, steps: int, progress: Progress | None) -> None:
        self._steps = steps
        self._progress = progress
        self._task = None if progress is None else progress.add_task("training", total=steps, figures="")
        self._said = 0.0

    def show(self, figures: Figures) -> None:
        """On a terminal every call, in a pipe every few seconds and at the end."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=figures.step, figures=str(figures))
        elif time.monotonic() - self._said > PLAIN_EVERY or figures.step == self._steps:
            self._said = time.monotonic()
            print(f"step {figures.step}/{self._steps}  {figures}", flush=True)


@contextmanager
def display(steps: int) -> Iterator[Display]:
    """A `Display` for ``steps`` steps, live if standard output is a terminal."""
    if not sys.stdout.isatty():
        yield Display(steps, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console()) as progress:
        yield Display(steps, progress)
