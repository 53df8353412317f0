"""Ranks killed at random moments, saves included, until the run is done: the weights of an undisturbed one.

A server that has imported everything forks the ranks, so that a restart costs a fraction of torchrun's. They use one
store over all restarts, as torchrun's do.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from integration_tests.restart_ranks import lines_of, rank_main, said_by
from torch.distributed import TCPStore

from pipegrid.training.restart import read_attempts
from restart import job

from .kit import processes
from .test_restart import require_undisturbed

KILLS = 200
EPISODES = 20  # runs from the first step to the last, in each of which a share of the kills happens
STEPS = 60
LEAVE_SECONDS = 30.0  # for the ranks that are left; seconds, and this machine may do other work


def start(context, world_size, port, directory, options, lines=()):
    lines = dict.fromkeys(range(world_size)) | dict(lines)
    ranks = [
        context.Process(target=rank_main, args=(rank, world_size, port, str(directory), options, line))
        for rank, line in lines.items()
    ]
    for rank in ranks:
        rank.start()
    return ranks


def end(ranks, seconds=LEAVE_SECONDS):
    """The exit codes; a rank that does not leave in time is a failure."""
    stuck = processes.end(ranks, seconds)
    assert stuck == [], f"ranks {stuck} had not ended {seconds} s after a rank was killed"
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "kills"),
    [(1000, 3), *(pytest.param(number, KILLS // EPISODES, marks=pytest.mark.nightly) for number in range(EPISODES))],
)
def test_a_run_whose_ranks_are_killed_at_random_has_the_weights_of_an_undisturbed_one(
    tmp_path, context, number, kills, capsys
):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    options = [f"--steps={STEPS}", "--every=3", "--pause=0.02", "--deadline=20"]
    run, chance, saves = tmp_path / "run", random.Random(number), 0
    for _ in range(kills):
        ranks = start(context, 2, store.port, run, options)
        kind = wait_to_kill(chance, run, ranks)
        victim = chance.choice(ranks)
        saves += kind == "saving" and saving(run)
        victim.kill()
        for rank in ranks:
            if rank is not victim and rank.exitcode is None:
                rank.terminate()  # as torchrun does
        codes = end(ranks)
        assert victim.exitcode in (-signal.SIGKILL, 0), codes  # 0: the run was done before
    assert end(start(context, 2, store.port, run, options), seconds=120.0) == [0, 0]
    require_undisturbed(run, STEPS)
    assert json.loads((run / "losses.jsonl").read_text().splitlines()[-1])["step"] == STEPS
    attempts = len(read_attempts(run))
    with capsys.disabled():
        sys.stdout.write(f"\nrun {number}: {kills} kills, {saves} during a save; {attempts} attempts recorded\n")
    assert attempts >= min(2, kills // 3)  # a rank that is killed at its start has recorded none


# Without an Attempt on every rank nothing watches: there, SIGTERM ends a rank that waits for a dead one.
TYPED = re.compile(r"(JobFailed|Pipeline|P2P\w+|Checkpoint|Disagreement)Error: .*(lost rank|is gone)", re.DOTALL)


def status_of(rank):
    """What the kernel says of a process: its state, and the signals for which it has handlers. Empty if it is gone."""
    try:
        status = Path(f"/proc/{rank.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return dict(re.findall(r"^(State|SigCgt):\s*(\w+)", status, re.MULTILINE))


def request_stop(rank, seconds):
    """SIGTERM once it is a request there: `Attempt.begin` was called. A rank that ends by itself gets none.

    It stands still meanwhile: a rank that leaves takes its handler away.
    """
    stop = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):  # it has ended
        while rank.exitcode is None and time.monotonic() < stop:
            os.kill(rank.pid, signal.SIGSTOP)
            while (status := status_of(rank)).get("State", "Z") not in "TZX":
                time.sleep(0.001)
            asked = bool(int(status.get("SigCgt", "0"), 16) >> (signal.SIGTERM - 1) & 1)
            if asked:
                rank.terminate()
            os.kill(rank.pid, signal.SIGCONT)
            if asked:
                return
            time.sleep(0.01)


def require_typed_ends(context, directory, world_size, victim, lines, *, begun=False):
    """A rank dies before each line of its job at a time; the others end by a typed error, or, at the start, SIGTERM.

    With ``begun``, SIGTERM comes when all others have begun their attempt: only a typed error is left.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    options = ["--steps=3", "--every=1", f"--pp={world_size}", "--deadline=60"]
    codes = {}
    for line in lines:
        run = directory / str(line)
        ranks = start(context, world_size, store.port, run, options, {victim: line})
        ranks[victim].join(60)
        for rank in ranks:
            if begun:
                request_stop(rank, LEAVE_SECONDS)
            else:
                rank.terminate()
        codes[line] = end(ranks, seconds=15.0)
        for rank, code in enumerate(codes[line]):
            file = said_by(run, rank)
            said = file.read_text() if file.exists() else ""  # SIGTERM may come before a rank has made it
            assert code in (0, 1, -signal.SIGTERM, -signal.SIGKILL), (line, codes[line], said)
            assert code != 1 or TYPED.search(said), (line, rank, said)
    return codes


def line_with(text):
    """The number of the line of the job's file that has ``text``."""
    (found,) = [n for n, line in enumerate(inspect.getsource(job).splitlines(), start=1) if text in line]
    return found


@pytest.mark.thorough
def test_a_rank_that_dies_outside_of_a_step_ends_the_others_by_a_typed_error_in_seconds(tmp_path, context):
    """Before its first step, in which the others wait for all; and between steps, in a collective of the script."""
    lines = [line_with("loss = train_step(step)"), line_with("dist.all_reduce(loss)")]
    codes = require_typed_ends(context, tmp_path, 2, 1, lines, begun=True)
    assert list(codes.values()) == [[1, -signal.SIGKILL]] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (2, 1), (4, 2)])
def test_a_rank_that_dies_before_any_line_of_its_job_ends_the_others_in_seconds(
    tmp_path, context, world_size, victim, part, capsys
):
    lines = sorted(lines_of(job.train.__code__) | lines_of(job.main.__code__))[part::4]
    codes = require_typed_ends(context, tmp_path, world_size, victim, lines)
    typed = sum(1 in each for each in codes.values())
    with capsys.disabled():
        sys.stdout.write(f"\n{len(codes)} lines, rank {victim} of {world_size}: {typed} ends by a typed error\n")
    assert typed >= len(codes) // 4
