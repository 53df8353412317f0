"""A new process of a dead rank asks the members of a job for the rank's place."""

from __future__ import annotations

import time

from pipegrid.monitor.control import Failure
from pipegrid.monitor.epochs.errors import FencedError
from pipegrid.monitor.epochs.ledger import LEFT, Ledger
from pipegrid.monitor.epochs.pulse import WATCHED, Pulse
from pipegrid.monitor.epochs.records import Epoch, Verdict
from pipegrid.monitor.monitor import JobFailedError


def admission(ledger: Ledger, pulse: Pulse, epoch: Epoch, deadline: float) -> Verdict | Failure:
    """Ask to join, and wait for the vote result by which this process is a member, or that the job has failed.

    It may take as long as a step, or until other new processes, with which this one computes, have asked as well.

    Args:
        ledger: the epoch store, over this thread's connection.
        pulse: the heartbeat of this process.
        epoch: the first one, or a later one: the current one is found from it.
        deadline: seconds in which some member's heartbeat is seen, or an earlier process of the rank is voted out.

    Raises:
        FencedError: an earlier process of the rank lives, or a later one has started.
        JobFailedError: the job has ended, or no member has a heartbeat.
    """
    rank, own, began = pulse.rank, pulse.incarnation, time.monotonic()
    ledger.ask(rank, own)
    known, heard = dict[int, int](), began
    while True:
        outcome = ledger.verdict(epoch.number)
        if isinstance(outcome, Failure) or (outcome is not None and outcome.epoch.has(rank, own)):
            return outcome
        if pulse.failure:
            raise JobFailedError(pulse.failure)
        if outcome is not None:
            epoch = outcome.epoch
            continue
        if ledger.asking()[rank] > own or epoch.incarnations[rank] > own:
            raise FencedError(f"another process of rank {rank} has come after this one")
        others = [member for member in epoch.members if member != rank][:WATCHED]
        beats = {member: ledger.beats(member, epoch.incarnations[member]) for member in others}
        now = time.monotonic()
        if all(count >= LEFT for count in beats.values()):
            raise JobFailedError("the job has ended: its ranks have left")
        known, heard = beats, heard if beats == known else now
        if now - heard > deadline:
            raise JobFailedError(
                f"ranks {[*beats]} have been silent for {deadline:.3g} s: the job has ended, or the store is that of "
                "another attempt"
            )
        if rank in epoch.members and now - began > deadline:
            raise FencedError(f"a process of rank {rank} is in the job and lives: end it before another one starts")
        time.sleep(min(0.1, pulse.interval))
