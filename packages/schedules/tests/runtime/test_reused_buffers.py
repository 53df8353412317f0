"""Buffers of activations, given back and used again: as many as the plan says, and the gradients of one process."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.plans.generators.registry import SCHEDULES
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan.actions import ActionKind
from pipegrid.schedules.runtime import PipelineRuntime
from pipegrid.transport import Direction, Edge, P2PCommunicator, P2PConfig

from ..kit.stages import differentiate, stages_of

WIDTH = 5


class Layer(nn.Module):
    """A linear layer; the identity where ``passes``, whose output is a view of what came in."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.weight, self.passes = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)), number % 3 == 2

    def forward(self, x):
        return x.view(2, WIDTH) if self.passes else (x @ self.weight).tanh()


def stages(plan):
    def data(microbatch):
        return torch.arange(1.0 + microbatch, 1 + microbatch + WIDTH, dtype=torch.float64).expand(2, WIDTH).sin()

    models = [Layer(number) for number in range(plan.num_stages)]
    return stages_of(plan.graph, models, data=data, loss=lambda output, _: (output * output).sum())


def most_at_once(plan, position, stages, ahead):
    """Of the messages that ``stages`` receive, how many are posted or in use at once: until their last backward.

    ``ahead``: how many are posted before their turn.
    """
    actions = [*plan.actions(position)]
    last = ActionKind.W if any(action.kind is ActionKind.W for action in actions) else ActionKind.B
    received = [action.kind is ActionKind.RECV_F and action.edge.destination in stages for action in actions]
    turns = sum(received)
    posted = [min(turn + ahead, turns) for turn in accumulate(received)]
    given_back = accumulate(action.kind is last and action.stage in stages for action in actions)
    return max(have - gone for have, gone in zip(posted, given_back, strict=True))


def received_by_lane(plan, position):
    """Per position that sends activations here, the stages that receive them: those share a lane."""
    at = [positions[0] for positions in plan.placement]
    lanes = {}
    for stage in plan.stages_at[position]:
        if stage > 0 and at[stage - 1] != position:
            lanes.setdefault(at[stage - 1], []).append(stage)
    return lanes.values()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strict", [False, True], ids=["buffered", "strict"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v"])
def test_as_many_buffers_as_the_plan_says_and_the_same_gradients(ranks, name, strict):
    plan, steps = lower(SCHEDULES[name].plan(3, 7)), 3
    every, expected = stages(plan), differentiate(plan, stages(plan))
    held = {stage: every[stage] for stage in plan.stages_at[ranks.rank]}
    communicator = P2PCommunicator(
        dist.group.WORLD,
        P2PConfig(pipeline_dtype=torch.float64, strict=strict),
        placement=[positions[0] for positions in plan.placement],
    )
    runtime = PipelineRuntime(plan, held, communicator, reuse_buffers=True)
    for step in range(steps):
        runtime.step()
        for number, stage in held.items():
            if not stage.model.passes:
                wanted = (step + 1) * expected[number].model.weight.grad
                assert torch.allclose(stage.model.weight.grad, wanted, rtol=1e-12), (step, number)
    for receiving in received_by_lane(plan, ranks.rank):
        stats = communicator.lane(Edge(receiving[0] - 1, receiving[0]), Direction.FORWARD).stats
        # The output of one that hands on to its own rank may be needed after its own backward: it gives nothing back.
        lending = [stage for stage in receiving if stage + 1 not in held]
        assert stats.live == (len(receiving) - len(lending)) * steps * plan.num_microbatches
        if lending == receiving:
            assert stats.allocations == most_at_once(plan, ranks.rank, receiving, 0 if strict else 1)
    communicator.close()


@pytest.mark.ranks(2)
def test_an_evaluation_gives_nothing_back_and_without_the_option_nothing_is(ranks):
    plan = lower(SCHEDULES["1f1b"].plan(2, 4))
    for reuse, verb, live in ((True, "eval", 4), (False, "step", 4), (True, "step", 0)):
        communicator = P2PCommunicator(dist.group.WORLD, P2PConfig(pipeline_dtype=torch.float64))
        stage = dist.get_rank()
        runtime = PipelineRuntime(plan, {stage: stages(plan)[stage]}, communicator, reuse_buffers=reuse)
        getattr(runtime, verb)()
        if stage == 1:
            assert communicator.lane(Edge(0, 1), Direction.FORWARD).stats.live == live
        ranks.barrier()
        communicator.close()
