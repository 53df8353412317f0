"""Every generated plan runs under NCCL's rules: a stream for each communicator, and one serial stream for all.

Where microbatches are cut into slices, each row of a stage is over the sum of the rows up to it, and a slice is a row.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipegrid.schedules import SCHEDULES, PipelineRuntime, lower
from pipegrid.transport import P2PCommunicator, P2PConfig

from .kit.models import require_same_gradients
from .kit.rows import ROWS, Layer, in_one_process


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
            stages = {stage: Layer(plan, stage, ranks.device) for stage in plan.stages_at[ranks.rank]}
            PipelineRuntime(plan, stages, communicator).step()
            expected = in_one_process(plan, ranks.device)
            for number, stage in stages.items():
                assert sorted(stage.losses) == pytest.approx(sorted(expected[number].losses), rel=1e-12)
                if number not in plan.forward_only:
                    require_same_gradients(stage.model, expected[number].model, rtol=1e-10)
            communicator.renew_shapes()
    communicator.close()


def on(*sizes, deadline):
    return [
        pytest.param(mode, marks=pytest.mark.ranks(size, backend="fake_nccl", fake_nccl=mode, deadline=deadline))
        for size in sizes
        for mode in ("streams", "serial")
    ]


@pytest.mark.thorough
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
