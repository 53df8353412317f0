"""Steps on a device that runs late: the host waits for nothing but its own lead."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.schedules import SCHEDULES, Forwarded, PipelineRuntime, lower
from pipegrid.testing.fake_nccl import Mark
from pipegrid.transport import P2PCommunicator, P2PConfig, streams

MICROBATCHES, ROWS, WIDTH = 8, 16, 8
MOST_AHEAD = 3  # microbatches, of `HostLead`


class Layers:
    """A stage: two linear layers on the sum of its inputs; the mean square of the last one is the loss."""

    def __init__(self, stage, plan, rows=ROWS):
        torch.manual_seed(stage)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.out = [edge for edge in plan.graph.stage_edges if edge.source == stage]
        self.data = torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH)

    def forward(self, microbatch, inputs):
        y = self.model(sum(inputs.values()) if inputs else self.data * (microbatch + 1))
        return Forwarded(dict.fromkeys(self.out, y), None if self.out else y.square().mean() / MICROBATCHES)


class Marks:
    """A hook that marks every compute, before and after."""

    def __init__(self, device):
        self.device = device

    def before(self, action):
        if action.kind.is_compute:
            self.device.mark(f"{action} begins")

    def after(self, action):
        if action.kind.is_compute:
            self.device.mark(f"{action} ends")


@pytest.fixture
def device(ranks, monkeypatch):
    made = ranks.fake_device
    monkeypatch.setattr(streams, "cuda", made.streams)
    monkeypatch.setattr(streams, "has_streams", lambda device: True)
    return made


def late_step(runtime, stages, device):
    """One step in the steady state on the late device; the run and what happened."""
    with device.late():
        runtime.step()  # connects, and agrees on shapes
        device.streams.synchronize()
        for stage in stages.values():
            stage.model.zero_grad()
    device.timeline.clear()
    with device.late() as late:
        runtime.step()
        syncs = late.syncs
    return late, syncs, list(device.timeline)


def require_no_wait_but_back_pressure(syncs):
    assert not [sync for sync in syncs if "schedules/runtime/hooks.py" not in sync.where], syncs
    assert len(syncs) <= MICROBATCHES


def most_ahead(timeline, plan, position):
    """The most microbatches that the host had issued whole and the device had not reached the end of, at a compute."""
    last = {action.microbatch: f"{action} ends" for action in plan.actions(position) if action.kind.is_compute}
    ends, most = set(last.values()), 0
    issued = 0
    for moment in timeline:
        if isinstance(moment.of, Mark):
            if moment.of.text in ends:
                issued += {"marked": 1, "reached": -1}[moment.what]
            elif moment.what == "marked":
                most = max(most, issued)
    return most


def gradients_of_one_process(plan):
    stages = [Layers(number, plan) for number in range(plan.num_stages)]
    for microbatch in range(MICROBATCHES):
        payload = {}
        for stage in stages:
            made = stage.forward(microbatch, payload)
            payload = made.outputs
        made.loss.backward()
    return stages


@pytest.mark.ranks(2, backend="fake_nccl")
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zero_bubble_v"])
def test_the_host_waits_for_nothing_but_its_lead(ranks, device, name):
    plan = lower(SCHEDULES[name].plan(2, MICROBATCHES))
    communicator = P2PCommunicator(
        dist.group.WORLD,
        P2PConfig(pipeline_dtype=torch.float32, deadline=30.0),
        placement=[positions[0] for positions in plan.placement],
    )
    stages = {number: Layers(number, plan) for number in plan.stages_at[ranks.rank]}
    runtime = PipelineRuntime(plan, stages, communicator, hooks=[Marks(device)])
    _, syncs, timeline = late_step(runtime, stages, device)
    require_no_wait_but_back_pressure(syncs)
    assert 1 <= most_ahead(timeline, plan, ranks.rank) <= MOST_AHEAD
    assert device.violations == []
    reference = gradients_of_one_process(plan)
    for number, stage in stages.items():
        for found, expected in zip(stage.model.parameters(), reference[number].model.parameters(), strict=True):
            assert torch.allclose(found.grad, expected.grad, rtol=1e-4)
    communicator.close()
