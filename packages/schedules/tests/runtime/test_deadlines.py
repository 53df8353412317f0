"""The deadline of a step holds for its sends as well, of which a rank may post several before it waits for one."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from pipegrid.core.graph import ModuleGraph
from pipegrid.schedules import PipelineError, PipelineRuntime, gpipe, lower, verify
from pipegrid.transport import P2PCommunicator, P2PConfig

from ..kit.stages import Function

PAIR = ModuleGraph({"model": 2})


def slow_step(ranks, communicator, deadline):
    """A step whose second stage needs 3 s for its first forward, as one that compiles."""
    weight = torch.ones(4, device=ranks.device, requires_grad=True)

    def second(microbatch, x):
        if microbatch == 0:
            time.sleep(3)
        return (x * weight).sum()

    function = second if ranks.rank else lambda microbatch: weight * 1.0
    stages = {ranks.rank: Function(PAIR, ranks.rank, function)}
    # Late receives: that of the second microbatch is posted after the first forward.
    plan = verify(lower(gpipe(2, 4), receives="late"))
    PipelineRuntime(plan, stages, communicator, deadline=deadline).step()
    return weight.grad


@pytest.mark.ranks(2)
def test_a_send_has_the_deadline_of_its_step_where_that_is_longer(ranks):
    communicator = P2PCommunicator(dist.group.WORLD, P2PConfig(deadline=1))
    gradient = slow_step(ranks, communicator, deadline=60)
    communicator.close()
    assert gradient.tolist() == [4.0] * 4


@pytest.mark.ranks(2, backend="gloo")
def test_without_one_a_send_has_that_of_the_communicator(ranks):
    communicator = P2PCommunicator(dist.group.WORLD, P2PConfig(deadline=1))
    with pytest.raises(PipelineError, match="rank 0 waited 1 s for"):
        slow_step(ranks, communicator, deadline=None)
    communicator.close()
