"""An attempt on several ranks: stopping together, the job's first failure on every rank, and its record."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from pipegrid.schedules import JobFailedError, Monitor, gpipe
from pipegrid.topology import control_store
from pipegrid.training import NO_PROGRESS, PREEMPTED, Attempt, RestartError
from pipegrid.training.restart import read_attempts


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        monkeypatch.delenv(name)


def watched(ranks, deadline=20.0):
    return Monitor(
        control_store("attempt"), rank=dist.get_rank(), ranks=range(ranks.world_size), deadline=deadline, interval=0.1
    )


@pytest.mark.ranks(3)
def test_a_signal_on_one_rank_stops_all_after_the_same_step(ranks):
    directory = ranks.shared_path / "run"
    with Attempt(directory) as attempt:
        assert attempt.exit_code == 0
        for step in range(attempt.begin(4) + 1, 100):
            if (step, dist.get_rank()) == (7, 1):
                os.kill(os.getpid(), signal.SIGTERM)
                while attempt._signals.received is None:
                    time.sleep(0.001)
            if attempt.completed(step):
                break
    assert (step, attempt.exit_code) == (7, PREEMPTED)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # it exits by itself now
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    dist.barrier()
    assert [(one.step, one.end) for one in read_attempts(attempt.directory)] == [(7, "preempted")]


@pytest.mark.ranks(3)
def test_an_exception_outside_of_a_step_is_the_first_failure_on_every_rank(ranks):
    directory = ranks.shared_path / "run"
    expected = ValueError if dist.get_rank() == 1 else JobFailedError
    began = time.monotonic()
    with (
        pytest.raises(expected, match="no more samples") as caught,
        Attempt(directory, monitor=watched(ranks)) as attempt,
    ):
        for step in range(attempt.begin(0) + 1, 100):
            if (step, dist.get_rank()) == (3, 1):
                raise ValueError("no more samples")
            attempt.completed(step)
    if dist.get_rank() != 1:
        assert "rank 1: ValueError: no more samples" in str(caught.value)
    assert time.monotonic() - began < 20
    assert [(one.step, one.end) for one in read_attempts(attempt.directory)] == [(2, "")]


@pytest.mark.ranks(2)
def test_a_restart_without_progress_ends_on_every_rank_before_a_step(ranks, monkeypatch):
    directory = ranks.shared_path / "run"
    for restart in range(3):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        dist.barrier()
        try:
            with Attempt(directory) as attempt:
                attempt.completed(attempt.begin(8))
                raise OSError("a disk is full")
        except RestartError as error:
            assert restart == 2
            assert error.exit_code == NO_PROGRESS
            assert "failed at step 9 in 2 attempts" in str(error)
        except (OSError, JobFailedError) as error:  # the second of the two ranks may name the first one's failure
            assert restart < 2
            assert "OSError: a disk is full" in f"{type(error).__name__}: {error}"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    dist.barrier()
    assert [(one.restart, one.step) for one in read_attempts(attempt.directory)] == [(0, 8), (1, 8)]


@pytest.mark.ranks(3)
@pytest.mark.fault("kill", rank=1, at="between steps")
@pytest.mark.parametrize("watching", [True, False])
def test_a_rank_whose_process_dies_between_steps_is_named_on_every_other_rank(ranks, watching):
    """Also where ranks wait outside of a collective, of which nothing would end: here in the store, for each other."""
    directory = ranks.shared_path / "run"
    monitor = watched(ranks, deadline=60.0) if watching else None
    plan = gpipe(3, 1)
    began = time.monotonic()
    with (
        pytest.raises(JobFailedError, match="lost rank 1: its process has ended without a word"),
        Attempt(directory, monitor=monitor) as attempt,
    ):
        attempt.begin(0)
        ranks.reach("between steps")
        if monitor is not None:
            monitor.begin(plan, where=lambda: "before the step", abort=lambda text: None)
        attempt.completed(1)
    assert time.monotonic() - began < 20
    if monitor is not None:
        monitor.close()


@pytest.mark.ranks(3)
def test_ranks_that_leave_an_attempt_one_by_one_are_not_lost(ranks):
    """Each rank is done at a time of its own; and a world may enter the next attempt at once."""
    for number in range(2):
        with Attempt(ranks.shared_path / "run", monitor=(monitor := watched(ranks))) as attempt:
            attempt.begin(number)
            attempt.completed(number + 1)
            time.sleep(0.2 * ((dist.get_rank() + number) % 3))
        assert attempt._lost == ""
        monitor.check()
        monitor.close()
