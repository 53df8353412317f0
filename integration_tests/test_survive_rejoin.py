"""Ranks killed with -9 whose place a new process takes: the job goes on with it, and the weights are as undisturbed."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from datetime import timedelta
from threading import Timer

import pytest
import torch
from torch.distributed import TCPStore

from survive.launching import keep_running

from .kit.processes import logs
from .survive_cases import ANY, Case, Kill
from .survive_ranks import ALONE, rank_main

SECONDS = 90.0


def play(context, case, folder):
    """Run a case, whose killed ranks are started again: outcomes and exit codes by rank, and what they have printed."""
    folder.mkdir(parents=True)
    limit = timedelta(seconds=30)
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=limit)
    started = {rank: [] for rank in range(case.world_size)}

    def start(rank):
        process = context.Process(target=rank_main, args=(case, rank, store.port, str(folder), len(started[rank])))
        process.start()
        started[rank].append(process)
        return process

    def show():
        for processes in started.values():
            if processes[-1].exitcode is None:
                os.kill(processes[-1].pid, signal.SIGUSR1)  # its stacks go to its log

    stuck = Timer(SECONDS - 2, show)
    stuck.start()
    codes = keep_running(start, case.world_size, seconds=SECONDS)
    stuck.cancel()
    files = {rank: folder / f"outcome.{rank}" for rank in codes}
    return {rank: torch.load(path) for rank, path in files.items() if path.exists()}, codes, logs(folder)


def require_undisturbed(context, case, folder, *, came=None):
    """Run a case whose ranks are all back in the end, with what one process has.

    ``came``: how often a process of each rank came in, as far as the ranks know that live all the time; None: for each
    kill once.
    """
    outcomes, codes, said = play(context, case, folder)
    wanted, faults = ALONE[case.job](case), []
    died = Counter(kill.rank for kill in case.kills)
    if codes != {rank: [-signal.SIGKILL] * died[rank] + [0] for rank in range(case.world_size)}:
        faults.append(f"exit codes {codes}")
    for rank, outcome in outcomes.items():
        if "error" in outcome:
            faults.append(f"rank {rank}: {outcome['error']}")
            continue
        far = {name: (value - wanted[name]).abs().max().item() for name, value in outcome["weights"].items()}
        faults += [f"rank {rank}: {name} differs by {by}" for name, by in far.items() if not by <= 1e-12]
        found = Counter(int(n) for event in outcome["events"] for n in re.findall(r"new process of rank (\d+)", event))
        if not died[rank] and found != (died if came is None else Counter(came)):
            faults.append(f"rank {rank}: new processes of {found}; events {outcome['events']}")
    if faults:
        pytest.fail("\n".join([*faults, said]), pytrace=False)


COME_BACK = {
    "2 x 2, twice": Case("pipeline", 2, 2, (Kill(3, "F", 1, 1), Kill(3, "B", 5, 1, process=1)), back=(3, 7)),
}


@pytest.mark.parametrize("case", COME_BACK.values(), ids=COME_BACK)
def test_a_new_process_takes_the_place_of_a_killed_one(context, tmp_path, case):
    require_undisturbed(context, case, tmp_path / "case")


@pytest.mark.nightly
def test_another_peer_sends_the_state_where_one_dies_as_it_sends(context, tmp_path):
    """The peer comes back as well."""
    case = Case("pipeline", 2, 4, (Kill(5, "F"), Kill(4, "send state", ANY, 4)), back=(3, 5))
    require_undisturbed(context, case, tmp_path / "case")


@pytest.mark.nightly
def test_the_job_goes_on_where_the_new_process_dies_as_it_receives_and_the_next_one_comes_in(context, tmp_path):
    kills = (Kill(3, "B"), Kill(3, "receive state", -1, 4, process=1))
    case = Case("pipeline", 2, 2, kills, back=(3, 5), heartbeat=2.0)
    require_undisturbed(context, case, tmp_path / "case", came={3: 2})


@pytest.mark.nightly
def test_a_position_whose_state_is_lost_on_its_way_ends_the_job_by_its_name(context, tmp_path):
    case = Case("pipeline", 2, 2, (Kill(3, "F"), Kill(2, "send state", ANY, 4)), back=(3,), heartbeat=2.0)
    outcomes, _, said = play(context, case, tmp_path / "case")
    errors = {rank: outcome.get("error", "") for rank, outcome in outcomes.items()}
    for rank in (0, 1):
        assert errors[rank].startswith("JobFailedError: position 1 of the pipeline is dead in all 2 replicas"), said
