"""Every generated plan runs under NCCL's rules: a stream for each communicator, and one serial stream for all.

Where microbatches are cut into slices, each row of a stage is over the sum of the rows up to it, and a slice is a row.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.schedules import SCHEDULES, Forwarded, PipelineRuntime, lower
from pipegrid.transport import P2PCommunicator, P2PConfig

WIDTH, ROWS = 4, 3


class Layer:
    """A linear stage in float64; the mean square of the last one is the loss."""

    def __init__(self, stage, plan, device):
        generator = torch.Generator().manual_seed(stage)
        self.model = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(device)
        self.out = [edge for edge in plan.graph.stage_edges if edge.source == stage]
        self.device, self.losses = device, []

    def forward(self, microbatch, inputs, part=None):
        whole = data(microbatch, self.device)
        x = next(iter(inputs.values()), whole if part is None else whole[part.index : part.index + 1])
        y = self.model(x if part is None else part.extend("rows", x, dim=0).sum(0, keepdim=True))
        if self.out:
            return Forwarded(dict.fromkeys(self.out, y))
        loss = y.square().sum() / whole.numel()
        self.losses.append(loss.item())
        return Forwarded({}, loss)


def data(microbatch, device):
    rows = torch.linspace(1.0 + microbatch, 2.0 + microbatch, ROWS, dtype=torch.float64)
    return rows[:, None].expand(ROWS, WIDTH).to(device)


def reference(plan, device):
    """The stages after the same step in one process."""
    layers = [Layer(stage, plan, device) for stage in range(plan.num_stages)]
    for microbatch in range(plan.num_microbatches):
        x = whole = data(microbatch, device)
        for layer in layers:
            x = layer.model(x if plan.num_slices == 1 else x.cumsum(0))
        losses = [y.square().sum() / whole.numel() for y in x.split(ROWS // plan.num_slices)]
        sum(losses).backward()
        layers[-1].losses += [loss.item() for loss in losses]
    return layers


def check(ranks, name, counts):
    """Run the plans of one schedule for ``counts`` microbatches, each from its first message's agreement on shapes."""
    schedule = SCHEDULES[name]
    slices = ROWS if schedule.sliced else None
    placement = [positions[0] for positions in schedule.plan(ranks.world_size, 2).placement]
    config = P2PConfig(pipeline_dtype=torch.float64, staged=ranks.backend == "staged")
    communicator = P2PCommunicator(dist.group.WORLD, config, placement=placement)
    for microbatches in counts:
        for receives in ("late", "early"):
            ranks.report_position(f"{name}, {microbatches} microbatches, {receives} receives")
            plan = lower(schedule.plan(ranks.world_size, microbatches, num_slices=slices), receives=receives)
            stages = {stage: Layer(stage, plan, ranks.device) for stage in plan.stages_at[ranks.rank]}
            PipelineRuntime(plan, stages, communicator).step()
            expected = reference(plan, ranks.device)
            for number, stage in stages.items():
                assert sorted(stage.losses) == pytest.approx(sorted(expected[number].losses), rel=1e-12)
                if number not in plan.forward_only:
                    for mine, theirs in zip(stage.model.parameters(), expected[number].model.parameters(), strict=True):
                        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-10)
            communicator.renew_shapes()
    communicator.close()


def on(*sizes, deadline):
    return [
        pytest.param(mode, marks=pytest.mark.ranks(size, backend="fake_nccl", fake_nccl=mode, deadline=deadline))
        for size in sizes
        for mode in ("streams", "serial")
    ]


@pytest.mark.parametrize("mode", on(3, deadline=240))
def test_a_plan_of_every_schedule(ranks, mode):
    for name in SCHEDULES:
        check(ranks, name, [4])


@pytest.mark.ranks(3)
def test_a_plan_of_every_schedule_with_slices(ranks):
    """Over the backend of the session: gloo, NCCL, or staged through host memory."""
    for name, schedule in SCHEDULES.items():
        if schedule.sliced:
            check(ranks, name, [4])


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("mode", on(2, 3, 4, deadline=1800))
def test_every_plan_of_every_schedule(ranks, mode, name):
    check(ranks, name, range(2, 9))
