"""A new process of a dead rank asks the members of a job for the rank's place."""

from __future__ import annotations

import time

from pipegrid.monitor.control import Failure
from pipegrid.monitor.epochs.errors import FencedError
from pipegrid.monitor.epochs.heartbeat import WATCHED, Heartbeat
from pipegrid.monitor.epochs.records import Epoch, Verdict
from pipegrid.monitor.epochs.stored_epochs import LEFT, StoredEpochs
from pipegrid.monitor.monitor import JobFailedError


def admission(stored: StoredEpochs, heartbeat: Heartbeat, epoch: Epoch, deadline: float) -> Verdict | Failure:
    """Ask to join, and wait for the vote result by which this process is a member, or that the job has failed.

    It may take as long as a step, or until other new processes, with which this one computes, have asked as well.
    ``stored`` is over this thread's connection; the current epoch is found from ``epoch``; ``deadline``: seconds in
    which some member's heartbeat is seen, or an earlier process of the rank is voted out. Raises as `Epochs.join`.
    """
    rank, own, began = heartbeat.rank, heartbeat.incarnation, time.monotonic()
    stored.ask(rank, own)
    known, seen = dict[int, int](), began
    while True:
        outcome = stored.verdict(epoch.number)
        if isinstance(outcome, Failure) or (outcome is not None and outcome.epoch.has(rank, own)):
            return outcome
        if heartbeat.failure:
            raise JobFailedError(heartbeat.failure)
        if outcome is not None:
            epoch = outcome.epoch
            continue
        if stored.asking()[rank] > own or epoch.incarnations[rank] > own:
            raise FencedError(f"another process of rank {rank} has come after this one")
        others = [member for member in epoch.members if member != rank][:WATCHED]
        heartbeats = {member: stored.heartbeats(member, epoch.incarnations[member]) for member in others}
        now = time.monotonic()
        if all(count >= LEFT for count in heartbeats.values()):
            raise JobFailedError("the job has ended: its ranks have left")
        known, seen = heartbeats, seen if heartbeats == known else now
        if now - seen > deadline:
            raise JobFailedError(
                f"ranks {[*heartbeats]} have been silent for {deadline:.3g} s: the job has ended, or the store is that "
                "of another attempt"
            )
        if rank in epoch.members and now - began > deadline:
            raise FencedError(f"a process of rank {rank} is in the job and lives: end it before another one starts")
        time.sleep(min(0.1, heartbeat.interval))
