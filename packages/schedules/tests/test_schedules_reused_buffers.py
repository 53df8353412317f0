"""Buffers of activations, given back and used again: as many as the plan says, and the gradients of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipegrid.schedules.actions import ActionKind
from pipegrid.schedules.catalogue import SCHEDULES
from pipegrid.schedules.lowering import lower
from pipegrid.schedules.runtime import Forwarded, PipelineRuntime
from pipegrid.transport import Direction, Edge, P2PCommunicator, P2PConfig

WIDTH = 5


class Layer:
    """A linear layer; the identity where ``passes``, whose output is a view of what came in."""

    def __init__(self, stage, last, *, passes):
        generator = torch.Generator().manual_seed(stage)
        self.stage, self.last, self.passes = stage, last, passes
        self.weight = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()

    def forward(self, microbatch, inputs):
        if inputs:
            (x,) = inputs.values()
        else:
            x = torch.arange(1.0 + microbatch, 1 + microbatch + WIDTH, dtype=torch.float64).expand(2, WIDTH).sin()
        y = x.view(2, WIDTH) if self.passes else (x @ self.weight).tanh()
        if self.stage == self.last:
            return Forwarded({}, (y * y).sum())
        return Forwarded({Edge(self.stage, self.stage + 1): y})


def layers(plan):
    return [Layer(stage, plan.num_stages - 1, passes=stage % 3 == 2) for stage in range(plan.num_stages)]


def expected_gradients(plan):
    model = layers(plan)
    for microbatch in range(plan.num_microbatches):
        inputs = {}
        for layer in model:
            forwarded = layer.forward(microbatch, inputs)
            inputs = forwarded.outputs
        forwarded.loss.backward()
    return [layer.weight.grad for layer in model]


def most_at_once(plan, position, stage):
    """Of the messages that ``stage`` receives, how many are posted or in use at once: until their last backward."""
    last = ActionKind.W if any(action.kind is ActionKind.W for action in plan.actions(position)) else ActionKind.B
    count = peak = 0
    for action in plan.actions(position):
        if action.kind is ActionKind.RECV_F and action.edge.destination == stage:
            count += 1
        elif action.kind is last and action.stage == stage:
            count -= 1
        peak = max(peak, count)
    return peak


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strict", [False, True], ids=["buffered", "strict"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v"])
def test_as_many_buffers_as_the_plan_says_and_the_same_gradients(ranks, name, strict):
    plan = lower(SCHEDULES[name].plan(3, 7))
    model = layers(plan)
    position = dist.get_rank()
    placement = [positions[0] for positions in plan.placement]
    config = P2PConfig(pipeline_dtype=torch.float64, strict=strict)
    with_loss = expected_gradients(plan)
    communicator = P2PCommunicator(dist.group.WORLD, config, placement=placement)
    held = {stage: model[stage] for stage in plan.stages_at[position]}
    runtime = PipelineRuntime(plan, held, communicator, reuse_buffers=True)
    for step in range(3):
        runtime.step()
        for stage in held:
            if model[stage].passes:
                continue
            assert torch.allclose(model[stage].weight.grad, (step + 1) * with_loss[stage], rtol=1e-12), (step, stage)
    for stage in held:
        edge = Edge(stage - 1, stage)
        handed_on = stage + 1 in held
        if stage == 0 or stage - 1 in held:
            continue
        stats = communicator.lane(edge, Direction.FORWARD).stats
        into = [s for s in held if s > 0 and s - 1 not in held and placement[s - 1] == placement[stage - 1]]
        if len(into) == 1 and not handed_on:
            assert (stats.allocations, stats.live) == (most_at_once(plan, position, stage), 0)
        elif handed_on and len(into) == 1:
            assert stats.live == 3 * plan.num_microbatches  # its output may be needed after its own backward
    communicator.close()


@pytest.mark.ranks(2)
def test_an_evaluation_gives_nothing_back_and_without_the_option_nothing_is(ranks):
    plan = lower(SCHEDULES["1f1b"].plan(2, 4))
    for reuse, verb, live in ((True, "eval", 4), (False, "step", 4), (True, "step", 0)):
        communicator = P2PCommunicator(dist.group.WORLD, P2PConfig(pipeline_dtype=torch.float64))
        stage = dist.get_rank()
        runtime = PipelineRuntime(plan, {stage: layers(plan)[stage]}, communicator, reuse_buffers=reuse)
        getattr(runtime, verb)()
        if stage == 1:
            assert communicator.lane(Edge(0, 1), Direction.FORWARD).stats.live == live
        ranks.barrier()
        communicator.close()
