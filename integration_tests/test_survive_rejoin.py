"""Ranks killed with -9 whose place a new process takes: the job goes on with it, and the weights are as undisturbed."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the forked ranks as well, which find their function by name

from integration_tests.survive_ranks import ALONE, Case, Kill, rank_main

SECONDS = 90.0


@pytest.fixture(scope="module")
def context():
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["torch._dynamo", "integration_tests.survive_ranks"])
    return made


class Launcher:
    """Starts the ranks of a case, and each killed one again."""

    def __init__(self, context, case, folder):
        folder.mkdir(parents=True)
        self.context, self.case, self.folder = context, case, folder
        limit = timedelta(seconds=30)
        self.store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=limit)
        self.started = Counter()
        self.running = {rank: self.start(rank) for rank in range(case.world_size)}

    def start(self, rank):
        arguments = self.case, rank, self.store.port, str(self.folder), self.started[rank]
        self.started[rank] += 1
        process = self.context.Process(target=rank_main, args=arguments)
        process.start()
        return process

    def run(self):
        """Until all have ended: outcomes by rank, and what they have printed."""
        end = time.monotonic() + SECONDS
        while self.running and time.monotonic() < end:
            time.sleep(0.02)
            for rank, process in [*self.running.items()]:
                if process.exitcode == -signal.SIGKILL:
                    self.running[rank] = self.start(rank)
                elif process.exitcode is not None:
                    del self.running[rank]
        stuck = sorted(self.running)
        for process in self.running.values():
            os.kill(process.pid, signal.SIGUSR1)  # its stacks go to its log
        for process in self.running.values():
            time.sleep(0.3)
            process.kill()
            process.join()
        logs = "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(self.folder.glob("log.*")))
        assert stuck == [], f"ranks {stuck} had not ended after {SECONDS} s\n{logs}"
        files = {rank: self.folder / f"outcome.{rank}" for rank in range(self.case.world_size)}
        return {rank: torch.load(path) for rank, path in files.items() if path.exists()}, logs


def require_undisturbed(context, case, folder):
    """Run a case whose ranks are all back in the end, with what one process has; who was killed, and how often."""
    launcher = Launcher(context, case, folder)
    outcomes, logs = launcher.run()
    wanted, faults = ALONE[case.job](case), []
    if outcomes.keys() != {*range(case.world_size)}:
        faults.append(f"outcomes of ranks {sorted(outcomes)}")
    for rank, outcome in outcomes.items():
        if "error" in outcome:
            faults.append(f"rank {rank}: {outcome['error']}")
            continue
        far = {name: (value - wanted[name]).abs().max().item() for name, value in outcome["weights"].items()}
        faults += [f"rank {rank}: {name} differs by {by}" for name, by in far.items() if not by <= 1e-12]
    died = Counter(kill.rank for kill in case.kills)
    if launcher.started - Counter(range(case.world_size)) != died:
        faults.append(f"processes started {dict(launcher.started)}")
    came = Counter()
    for outcome in outcomes.values():
        found = Counter(int(n) for event in outcome["events"] for n in re.findall(r"new process of rank (\d+)", event))
        came |= found
    if faults:
        pytest.fail("\n".join([*faults, logs]), pytrace=False)
    return came, logs


COME_BACK = {
    "2 x 2, twice": Case("pipeline", 2, 2, (Kill(3, "F", 1, 1), Kill(3, "B", 5, 1, process=1)), back=(3, 7)),
}


@pytest.mark.parametrize("case", COME_BACK.values(), ids=COME_BACK)
def test_a_new_process_takes_the_place_of_a_killed_one(context, tmp_path, case):
    came, logs = require_undisturbed(context, case, tmp_path / "case")
    assert came == Counter(kill.rank for kill in case.kills), logs
