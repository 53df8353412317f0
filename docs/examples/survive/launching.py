"""Ranks as processes of this machine that live on when one dies: that one starts again, or all if they cannot go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
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


def keep_running(
    start: Callable[[int], BaseProcess], ranks: int, *, seconds: float, restarts: int = 8
) -> dict[int, list[int]]:
    """Start the ranks, and each one that is killed again; the exit codes of the processes of each rank.

    Args:
        start: called with a rank; its process, started.
        ranks: how many.
        seconds: for all; then what is left is killed.
        restarts: of a rank, at most.
    """
    running, end = {rank: start(rank) for rank in range(ranks)}, time.monotonic() + seconds
    codes: dict[int, list[int]] = {rank: [] for rank in running}
    while running and time.monotonic() < end:
        wait([process.sentinel for process in running.values()], timeout=1.0)
        for rank, process in [*running.items()]:
            if process.exitcode is None:
                continue
            codes[rank].append(process.exitcode)
            if process.exitcode < 0 and len(codes[rank]) <= restarts:  # ended by a signal
                running[rank] = start(rank)
            else:
                del running[rank]
    for process in running.values():
        process.kill()
        process.join()
    return codes


def _codes(ranks: Sequence[BaseProcess], seconds: float) -> list[int]:
    """Wait until all ranks have ended. A rank that is killed ends no other."""
    end = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
        if rank.exitcode is None:
            rank.kill()
            rank.join()
    return [rank.exitcode or 0 for rank in ranks]
