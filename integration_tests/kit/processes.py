"""Ranks that are processes of their own: where they write, and their end."""

from __future__ import annotations

import os
import signal
import time


def write_to(log):
    """What this process writes from now on, that of other languages included, goes to ``log``."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def end(ranks, seconds):
    """Wait for processes; those that have not ended after ``seconds`` are killed, and their numbers returned.

    SIGUSR1 comes before, at which a process with a handler writes its stacks to its log.
    """
    stop = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0.0, stop - time.monotonic()))
    stuck = {number: rank for number, rank in enumerate(ranks) if rank.exitcode is None}
    for rank in stuck.values():
        os.kill(rank.pid, signal.SIGUSR1)
    for rank in stuck.values():
        rank.join(0.3)
        rank.kill()
        rank.join()
    return list(stuck)


def logs(folder):
    """The ends of all logs in ``folder``."""
    paths = sorted(folder.rglob("log.*"))
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in paths)
