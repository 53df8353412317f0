"""Points at which the host waits for the device, with their source lines."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from attrs import frozen

_NOT_THE_CALLER = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@frozen
class HostSync:
    """A point at which the host would wait for the GPU.

    Attributes:
        what: the call.
        where: its source line, ``file:line``.
        stack: the lines of its callers, the innermost first.

    Examples:
        >>> str(HostSync("aten::item", "train.py:12"))
        'aten::item at train.py:12'
    """

    what: str
    where: str
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


def caller() -> tuple[str, tuple[str, ...]]:
    """The innermost source line that is neither torch's nor this package's, and all such lines from it outwards."""
    frames = [each for each in traceback.extract_stack() if not each.filename.startswith(_NOT_THE_CALLER)]
    stack = tuple(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames))
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "", stack
