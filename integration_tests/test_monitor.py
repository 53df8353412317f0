"""A rank that fails, dies or stops in a step: every surviving rank says whose failure it was and where all stood."""

import time

import pytest
import torch

from pipegrid.schedules import (
    DisagreementError,
    Monitor,
    PipelineError,
    PipelineRuntime,
    lower,
    one_f_one_b,
)
from pipegrid.testing import Fault
from pipegrid.topology import control_store
from pipegrid.transport import P2PCommunicator, P2PConfig

from .kit.stages import Scale, Stage

STAGES, MICROBATCHES = 4, 6
# The lanes alone would wait that long: what ends a step sooner is the monitor, or the lane to a rank that is gone.
LANE_DEADLINE = 60.0


def step(ranks, *, microbatches=MICROBATCHES, told_before=None, **deadlines):
    """One watched step; the text of its error and how long it took.

    Rank 2 comes to its forward ``told_before`` when all ranks have published a place inside of the step: after a
    failure in the first moments of a step others may know of a rank that it had begun, and no more.
    """
    plan = lower(one_f_one_b(STAGES, microbatches))
    config = P2PConfig(pipeline_dtype=torch.float32, deadline=LANE_DEADLINE)
    communicator = P2PCommunicator(torch.distributed.group.WORLD, config)
    monitor = Monitor(control_store("monitor"), rank=ranks.rank, ranks=range(STAGES), interval=0.1, **deadlines)

    def all_have_begun():
        return all(", step" in place for place in monitor._control.positions(seconds=0).values())

    def before(microbatch):
        while ranks.rank == 2 and microbatch == told_before and not all_have_begun():
            time.sleep(0.02)
        ranks.reach(f"F{microbatch}")

    def data(_):
        return torch.ones(3, device=ranks.device)

    scale = Scale(1.0, (1,), device=ranks.device)
    stages = {ranks.rank: Stage(plan.graph, ranks.rank, scale, data=data, loss=torch.sum, before=before)}
    runtime = PipelineRuntime(plan, stages, communicator, monitor=monitor)
    ranks.barrier()
    began = time.monotonic()
    try:
        with pytest.raises((PipelineError, DisagreementError)) as found:
            runtime.step()
        return str(found.value), time.monotonic() - began
    finally:
        monitor.close()
        communicator.close()


@pytest.mark.ranks(STAGES)
def test_an_error_on_one_rank_is_every_ranks_first_failure(ranks):
    ranks.plan_fault(Fault("raise", rank=2, at="F3"))
    text, seconds = step(ranks, told_before=3)
    assert text.startswith("rank 2, stage 2, microbatch 3: ")
    if ranks.rank != 2:
        assert f"\n  rank {ranks.rank}, stage {ranks.rank}, microbatch" in text
    for rank in range(STAGES):
        assert f"rank {rank}: position {rank}, step" in text
    assert seconds < LANE_DEADLINE


@pytest.mark.thorough
@pytest.mark.ranks(STAGES)
def test_a_rank_that_dies_leaves_its_last_word(ranks):
    ranks.plan_fault(Fault("kill", rank=2, at="F3"))
    text, seconds = step(ranks)
    assert "rank 2: position 2, " in text
    assert "last heard" in text
    assert seconds < LANE_DEADLINE


@pytest.mark.ranks(STAGES)
def test_a_rank_that_stops_is_noticed_at_the_deadline(ranks):
    ranks.plan_fault(Fault("stop", rank=2, at="F3"))
    text, seconds = step(ranks, deadline=4.0, first_deadline=4.0)
    assert " has been at " in text
    assert "rank 2: position 2, " in text
    assert "last heard" in text
    assert seconds < LANE_DEADLINE


@pytest.mark.ranks(STAGES)
def test_counts_of_microbatches_that_differ_are_seen_before_the_step(ranks):
    text, seconds = step(ranks, microbatches=MICROBATCHES + (ranks.rank == 1))
    assert "ranks 0, 2-3: 6 microbatches" in text
    assert "rank 1: 7 microbatches" in text
    assert seconds < LANE_DEADLINE
