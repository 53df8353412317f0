"""A job under torchrun that is killed, stopped and started again: the same weights, codes, and an end of restarts."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pipegrid.training import NO_PROGRESS, PREEMPTED, Checkpoints, TrainingState
from pipegrid.training.restart import read_attempts
from restart import job
from restart.launching import Launch, finish, kill, ranks_of
from restart.model import Stage, samples

from .kit.checkpoints import require_equal, values_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks through /proc")


def one_process(steps):
    """The losses and the weights after ``steps`` steps of the same training in a plain loop."""
    torch.set_num_threads(1)
    model, losses = Stage(0, 1), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    size = job.BATCH // job.MICROBATCHES
    for step in range(steps):
        step_loss = 0.0
        for first in range(step * job.BATCH, (step + 1) * job.BATCH, size):
            x, target = samples(range(first, first + size))
            loss = F.mse_loss(model(x), target)
            (loss / job.MICROBATCHES).backward()
            step_loss += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step_loss / job.MICROBATCHES)
    return losses, values_of(TrainingState(stages={"model": [model]}, optimizers=[optimizer]))


def saved(directory):
    """The newest checkpoint, read into the whole model in this process."""
    model = Stage(0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = TrainingState(stages={"model": [model]}, optimizers=[optimizer])
    return Checkpoints(directory).load(state).step, values_of(state)


def require_undisturbed(directory, steps):
    """Losses, of repeated steps as well, weights and optimizer states are bit for bit those of the plain loop."""
    losses, expected = one_process(steps)
    rows = [json.loads(line) for line in (directory / "losses.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == set(range(1, steps + 1))
    assert [row for row in rows if row["loss"] != losses[row["step"] - 1]] == []
    step, found = saved(directory)
    assert step == steps
    require_equal(found, expected)


@pytest.mark.nightly
def test_a_killed_rank_and_a_failed_one_of_two_agents_cost_nothing_but_time(tmp_path):
    """SIGKILL under one torchrun; then, resumed under two torchruns, an exception."""
    codes, said = Launch(restarts=1).run(tmp_path, ["--steps=8", "--faults=kill@6:1"])
    assert codes == [0], said
    assert "rank 0 lost rank 1" in said  # the typed error of the rank that was left
    assert [(one.restart, one.step, one.end) for one in read_attempts(tmp_path)] == [(0, 5, ""), (1, 8, "finished")]
    codes, said = Launch(ranks=1, agents=2, restarts=1).run(tmp_path, ["--steps=16", "--faults=raise@14:0"])
    assert codes == [0, 0], said
    assert said.count("InjectedFault: raise@14:0") >= 2  # both ranks ended with the first failure
    assert [(one.step, one.end) for one in read_attempts(tmp_path)[2:]] == [(13, ""), (16, "finished")]
    require_undisturbed(tmp_path, 16)


@pytest.mark.thorough
def test_sigterm_on_one_rank_saves_on_all_with_an_exit_code_and_without_a_restart(tmp_path):
    agents = Launch(restarts=2).start(tmp_path, ["--steps=100000", "--every=100000", "--pause=0.02"])
    try:
        wait_for_step(tmp_path, 3)
        os.kill(ranks_of(agents[0].pid)[1], signal.SIGTERM)
        codes, said = finish(agents, seconds=120)
    finally:
        kill(agents)
    (attempt,) = read_attempts(tmp_path)
    assert codes == [1], said  # torchrun has no other code
    assert attempt.end == "preempted"
    assert f"stopped by SIGTERM on rank 1 after step {attempt.step}; exit code {PREEMPTED}" in said
    require_undisturbed(tmp_path, attempt.step)


def wait_for_step(directory, step, seconds=90):
    end = time.monotonic() + seconds
    while not (attempts := read_attempts(directory)) or attempts[-1].step < step:
        assert time.monotonic() < end, attempts
        time.sleep(0.05)


FAILING = """
import os, sys
import torch.distributed as dist
from pipegrid.training import Attempt, RestartError, attempt_store
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", store=attempt_store(), rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
try:
    with Attempt(sys.argv[2]) as attempt:
        for step in range(attempt.begin(0) + 1, 100):
            if step == 5 and rank == 1:
                raise RuntimeError("this step fails on every attempt")
            attempt.completed(step)
except RestartError as error:
    print(f"rank {rank}: {error}", flush=True)
    sys.exit(error.exit_code)
"""


@pytest.mark.thorough
def test_a_second_failure_at_one_step_ends_the_run_and_torchrun(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    codes, said = Launch(restarts=5).run(tmp_path / "run", [], script)
    assert codes == [1], said
    for rank in (0, 1):
        assert f"rank {rank}: the run has failed at step 5 in 2 attempts without getting further (limit 2)" in said
    assert [(one.restart, one.step) for one in read_attempts(tmp_path / "run")] == [(0, 4), (1, 4)]
    assert NO_PROGRESS != PREEMPTED


SIGNALLED = """
import os
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from pipegrid.training import attempt_store
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=attempt_store(), rank=rank, world_size=world_size)
store = _get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
found = "told to dump" if store.check(["exception_dump"]) else "undisturbed"
print(f"rank {rank}, attempt {attempt}: {found}", flush=True)
dist.barrier()
store.set("exception_dump", "as the watchdog of NCCL does")
raise SystemExit(attempt < 2)
"""


@pytest.mark.nightly
def test_a_signal_to_dump_does_not_reach_the_attempts_that_follow(tmp_path):
    script = tmp_path / "signalled.py"
    script.write_text(SIGNALLED)
    codes, said = Launch(restarts=2).run(tmp_path / "run", [], script)
    assert codes == [0], said
    assert "told to dump" not in said
    assert [said.count(f"attempt {attempt}: undisturbed") for attempt in range(3)] == [2, 2, 2], said


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["kill@6:0", "raise@6:1", "hang@6:0", "hang@6:1"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_every_way_to_lose_a_rank_ends_in_seconds_and_is_resumed(tmp_path, fault, schedule):
    began = time.monotonic()
    launch = Launch(restarts=1)
    codes, said = launch.run(tmp_path, ["--steps=12", f"--faults={fault}", "--deadline=4", f"--schedule={schedule}"])
    assert codes == [0], said
    assert time.monotonic() - began < launch.seconds
    if schedule == "1f1b":
        require_undisturbed(tmp_path, 12)
    else:
        assert saved(tmp_path)[0] == 12
