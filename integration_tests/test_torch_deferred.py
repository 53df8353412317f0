"""The page on torch's deferred receives: in a V, messages are received as each other, and no error shows it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV

RANKS, MICROBATCHES = 4, 8


def module(stage):
    torch.manual_seed(stage)
    return nn.Linear(3, 3)


def loss(output, _):
    return (output**3).sum()


@pytest.mark.skipif(
    "defer_pp_recv" not in inspect.signature(ScheduleDualPipeV).parameters, reason="this torch defers no receives"
)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.ranks(RANKS, backend="gloo")  # where each message of torch has a line of its own
def test_gradients_of_a_schedule_in_a_v_are_wrong_with_deferred_receives(ranks, deferred):
    torch.manual_seed(99)
    inputs, targets = torch.randn(MICROBATCHES, 3), torch.zeros(MICROBATCHES, 3)
    whole = nn.Sequential(*map(module, range(2 * RANKS)))
    (loss(whole(inputs), targets) / MICROBATCHES).backward()

    numbers = (ranks.rank, 2 * RANKS - 1 - ranks.rank)
    stages = [PipelineStage(module(number), number, 2 * RANKS, torch.device("cpu")) for number in numbers]
    schedule = ScheduleDualPipeV(stages, MICROBATCHES, loss_fn=loss, **({"defer_pp_recv": True} if deferred else {}))
    given = {"target": targets} if ranks.rank == 0 else {}
    schedule.step(*([inputs] if ranks.rank == 0 else []), **given)
    right = [
        torch.allclose(stage.submod.weight.grad, whole[stage.stage_index].weight.grad, rtol=1e-4) for stage in stages
    ]
    assert right == [not deferred] * 2
