"""Ranks killed at random moments, saves included, until the run is done: the weights of an undisturbed one.

A server that has imported everything forks the ranks, so that a restart costs a fraction of torchrun's. They use one
store over all restarts, as torchrun's do.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from pipegrid.training.restart import read_attempts

from .test_restart import require_undisturbed

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the forked ranks as well, which find their function by name

from integration_tests.restart_ranks import rank_main

KILLS = 200
EPISODES = 20  # runs from the first step to the last, in each of which a share of the kills happens
STEPS = 60
LEAVE_SECONDS = 30.0  # for the ranks that are left; seconds, and this machine may do other work


def start(context, world_size, port, directory, options):
    ranks = [
        context.Process(target=rank_main, args=(rank, world_size, port, str(directory), options))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def end(ranks):
    """Wait for the ranks that are left; kill what does not leave in time, which is a failure."""
    stop, stuck = time.monotonic() + LEAVE_SECONDS, []
    for rank in ranks:
        rank.join(max(0.0, stop - time.monotonic()))
        if rank.exitcode is None:
            stuck.append(rank.pid)
            rank.kill()
            rank.join()
    assert stuck == [], f"ranks {stuck} had not ended {LEAVE_SECONDS} s after a rank was killed"
    return [rank.exitcode for rank in ranks]


def saving(directory):
    return any(directory.glob(".saving-*"))


def wait_to_kill(chance, directory, ranks):
    """Until the moment of a kill: while a checkpoint is being written, or some time after the start or a step."""
    begun = time.monotonic()
    kind = chance.choice(["saving", "step", "start"])
    seen = len(read_attempts(directory))
    while all(rank.exitcode is None for rank in ranks) and time.monotonic() - begun < 60:
        attempts = read_attempts(directory)
        if kind == "start" or (kind == "saving" and saving(directory)):
            break
        if kind == "step" and len(attempts) > seen and attempts[-1].step > 0:
            break
        time.sleep(0.001)
    time.sleep(chance.random() * {"saving": 0.02, "step": 0.3, "start": 1.5}[kind])
    return kind


def episode(context, port, directory, *, seed, kills, options):
    """A run with ``kills`` kills; how many fell into a save."""
    chance, saves = random.Random(seed), 0
    for _ in range(kills):
        ranks = start(context, 2, port, directory, options)
        kind = wait_to_kill(chance, directory, ranks)
        victim = chance.choice(ranks)
        saves += kind == "saving" and saving(directory)
        victim.kill()
        for rank in ranks:
            if rank is not victim and rank.exitcode is None:
                rank.terminate()  # as torchrun does
        codes = end(ranks)
        assert victim.exitcode in (-signal.SIGKILL, 0), codes  # 0: the run was done before
    codes = end_of_run(context, port, directory, options)
    assert codes == [0, 0]
    return saves


def end_of_run(context, port, directory, options):
    ranks = start(context, 2, port, directory, options)
    for rank in ranks:
        rank.join(120)
    return end(ranks)


@pytest.fixture
def context():
    """Ranks are forked by a server that has imported the job."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["pytest", "torch._dynamo", "integration_tests.restart_ranks"])
    return made


def require_killed_run(tmp_path, context, episodes, kills):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    attempts = saves = 0
    for number in episodes:
        directory = tmp_path / str(number)
        options = [f"--steps={STEPS}", "--every=3", "--pause=0.02", "--deadline=20"]
        saves += episode(context, store.port, directory, seed=number, kills=kills, options=options)
        require_undisturbed(directory, STEPS)
        attempts += len(read_attempts(directory))
    return attempts, saves


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(EPISODES))
def test_a_run_whose_ranks_are_killed_at_random_has_the_weights_of_an_undisturbed_one(
    tmp_path, context, number, capsys
):
    kills = KILLS // EPISODES
    attempts, saves = require_killed_run(tmp_path, context, [number], kills)
    with capsys.disabled():
        sys.stdout.write(f"\nrun {number}: {kills} kills, {saves} during a save; {attempts} attempts recorded\n")
    assert attempts >= 2


def test_a_run_whose_ranks_are_killed_a_few_times_has_the_weights_of_an_undisturbed_one(tmp_path, context):
    require_killed_run(tmp_path, context, [1000], 3)
    assert (tmp_path / "1000" / "losses.jsonl").stat().st_size > 0
    assert json.loads((tmp_path / "1000" / "losses.jsonl").read_text().splitlines()[-1])["step"] == STEPS
