"""The checkpoints of a job whose first rank is stopped, or out of reach: it holds the lock, and the others go on."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from pipegrid.checkpoint import Checkpoints, TrainingState
from pipegrid.checkpoint.stored import lock
from pipegrid.monitor.epochs import Epoch
from pipegrid.schedules import one_f_one_b
from pipegrid.stages.errors import CheckpointError
from pipegrid.survive import PipelineJob
from pipegrid.topology import HyperCommGrid


@pytest.mark.ranks(3)
def test_the_others_take_the_lock_of_a_first_rank_that_is_stopped_and_it_saves_nothing_more(ranks, monkeypatch):
    monkeypatch.setattr(lock, "_ENDING", 0.1)
    rank, directory = dist.get_rank(), ranks.shared_path / "a"
    job = PipelineJob(HyperCommGrid([3, 1], ["dp", "pp"]), one_f_one_b(1, 2), checkpoints=directory)
    state = TrainingState(stages={"model": {0: nn.Linear(2, 2).requires_grad_(False)}})
    for value in state.stages["model"][0].parameters():
        value.fill_(1.0)
    world = job(Epoch(0, (0, 1, 2)))
    world.checkpoints.save(state, step=1)
    if rank == 2:
        with pytest.raises(CheckpointError, match="is in use by process"):
            lock.Lock(directory)
    ranks.barrier()
    if rank > 0:  # epoch 1 is without rank 0, whose process has the lock still
        world.abort("rank 0 is stopped")
        world.close()
        world = job(Epoch(1, (1, 2)))
        world.checkpoints.save(state, step=2)
    if rank == 2:
        with pytest.raises(CheckpointError, match="is in use by process"):
            lock.Lock(directory)
    ranks.barrier()
    if rank == 0:
        with pytest.raises(CheckpointError):
            world.checkpoints.save(state, step=3)
        world.abort("fenced")
        world.close()
        assert (directory / ".lock").is_file()  # that of rank 1
    ranks.barrier()
    if rank > 0:
        assert world.checkpoints.steps() == [2, 1]
        assert list(directory.glob(".saving*")) == []
        world.close()
    ranks.barrier()
    if rank == 0:
        assert not (directory / ".lock").exists()


@pytest.mark.ranks(2)
def test_a_process_outside_of_the_job_keeps_its_lock(ranks):
    """Another run, in the same directory."""
    directory = ranks.shared_path / "a"
    job = PipelineJob(HyperCommGrid([1, 1], ["dp", "pp"], rank_offset=dist.get_rank()), one_f_one_b(1, 2))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    if dist.get_rank() == 0:
        other = Checkpoints(directory, group=alone)
    ranks.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(CheckpointError, match="is in use by process"):
            PipelineJob(job.grid, job.plan, checkpoints=directory)(Epoch(1, (1,)))
    ranks.barrier()
    if dist.get_rank() == 0:
        other.close()
