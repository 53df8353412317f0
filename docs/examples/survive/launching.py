"""Ranks as processes of this machine that live on when one dies, and are started again when they cannot go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

from pipegrid.training.restart import NO_PROGRESS, PREEMPTED


def until_done(start: Callable[[int], Sequence[BaseProcess]], *, restarts: int, seconds: float) -> list[list[int]]:
    """Start all ranks, and all of them again when no rank has come to the end; the exit codes of each attempt.

    Args:
        start: called with the number of an attempt, from 0; the ranks, started.
        restarts: at most.
        seconds: for an attempt; then what is left of it is killed.
    """
    attempts: list[list[int]] = []
    while len(attempts) <= restarts:
        attempts.append(_codes(start(len(attempts)), seconds))
        if {0, PREEMPTED, NO_PROGRESS} & {*attempts[-1]}:
            break
    return attempts


def _codes(ranks: Sequence[BaseProcess], seconds: float) -> list[int]:
    """Wait until all ranks have ended. A rank that is killed ends no other."""
    end = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
        if rank.exitcode is None:
            rank.kill()
            rank.join()
    return [rank.exitcode or 0 for rank in ranks]
