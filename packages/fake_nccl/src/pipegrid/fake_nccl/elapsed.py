"""Waits whose bound is one of `time.monotonic`, which a test may move: hours pass without a sleep."""

from __future__ import annotations

import time
from typing import Protocol

_LOOK_SECONDS = 0.005


class _Waited(Protocol):
    def wait(self, timeout: float) -> bool: ...


def comes(event: _Waited, seconds: float) -> bool:
    """Whether ``event`` is set within ``seconds`` of the moved clock."""
    end = time.monotonic() + seconds
    while not event.wait(max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True
