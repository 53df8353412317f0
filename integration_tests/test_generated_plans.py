"""Every generated plan runs under NCCL's rules: a stream for each communicator, and one serial stream for all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.schedules import SCHEDULES, Forwarded, PipelineRuntime, lower
from pipegrid.transport import P2PCommunicator, P2PConfig

WIDTH, ROWS = 4, 2


class Layer:
    """A linear stage in float64; the mean square of the last one is the loss."""

    def __init__(self, stage, plan):
        generator = torch.Generator().manual_seed(stage)
        self.model = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        self.out = [edge for edge in plan.graph.stage_edges if edge.source == stage]
        self.losses = []

    def forward(self, microbatch, inputs):
        y = self.model(next(iter(inputs.values()), data(microbatch)))
        if self.out:
            return Forwarded(dict.fromkeys(self.out, y))
        loss = y.square().mean()
        self.losses.append(loss.item())
        return Forwarded({}, loss)


def data(microbatch):
    return torch.full((ROWS, WIDTH), 1.0 + microbatch, dtype=torch.float64)


def reference(plan):
    """The stages after the same step in one process."""
    layers = [Layer(stage, plan) for stage in range(plan.num_stages)]
    for microbatch in range(plan.num_microbatches):
        x = data(microbatch)
        for layer in layers:
            x = layer.model(x)
        loss = x.square().mean()
        loss.backward()
        layers[-1].losses.append(loss.item())
    return layers


def check(ranks, name, counts):
    """Run the plans of one schedule for ``counts`` microbatches, each from its first message's agreement on shapes."""
    placement = [positions[0] for positions in SCHEDULES[name].plan(ranks.world_size, 2).placement]
    config = P2PConfig(pipeline_dtype=torch.float64, staged=ranks.backend == "staged")
    communicator = P2PCommunicator(dist.group.WORLD, config, placement=placement)
    for microbatches in counts:
        for receives in ("late", "early"):
            ranks.report_position(f"{name}, {microbatches} microbatches, {receives} receives")
            plan = lower(SCHEDULES[name].plan(ranks.world_size, microbatches), receives=receives)
            stages = {stage: Layer(stage, plan) for stage in plan.stages_at[ranks.rank]}
            PipelineRuntime(plan, stages, communicator).step()
            expected = reference(plan)
            for number, stage in stages.items():
                assert sorted(stage.losses) == pytest.approx(sorted(expected[number].losses), rel=1e-12)
                if number not in plan.forward_only:
                    for mine, theirs in zip(stage.model.parameters(), expected[number].model.parameters(), strict=True):
                        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-10)
            communicator.renew_shapes()
    communicator.close()


WHOLE = [name for name, schedule in SCHEDULES.items() if not schedule.sliced]  # those of whole microbatches


def on(*sizes, deadline):
    return [
        pytest.param(mode, marks=pytest.mark.ranks(size, backend="fake_nccl", fake_nccl=mode, deadline=deadline))
        for size in sizes
        for mode in ("streams", "serial")
    ]


@pytest.mark.parametrize("mode", on(3, deadline=240))
def test_a_plan_of_every_schedule(ranks, mode):
    for name in WHOLE:
        check(ranks, name, [4])


@pytest.mark.nightly
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("mode", on(2, 3, 4, deadline=1800))
def test_every_plan_of_every_schedule(ranks, mode, name):
    check(ranks, name, range(2, 9))
