"""A step over the fake NCCL: launches from the plan's thread, no race between streams, no wait but back-pressure."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.schedules import Forwarded, PipelineRuntime, lower, one_f_one_b
from pipegrid.testing.fake_nccl import FakeWork
from pipegrid.transport import P2PCommunicator, P2PConfig, streams

STAGES, MICROBATCHES, WIDTH = 2, 6, 4


class Layer:
    """A linear stage; the mean square of the last one is the loss."""

    def __init__(self, stage, plan, ranks):
        torch.manual_seed(stage)
        self.model, self.ranks = nn.Linear(WIDTH, WIDTH), ranks
        self.out = [edge for edge in plan.graph.stage_edges if edge.source == stage]
        self.data = torch.ones(3, WIDTH)

    def forward(self, microbatch, inputs):
        self.ranks.reach(f"F{microbatch}")
        y = self.model(next(iter(inputs.values()), self.data))
        return Forwarded(dict.fromkeys(self.out, y), None if self.out else y.square().mean() / MICROBATCHES)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.ranks(STAGES, backend="fake_nccl", fake_nccl=mode))
        for mode in ("streams", "serial")
    ],
)
def test_a_step_has_the_gradients_of_one_process_no_race_and_no_wait_but_back_pressure(ranks, mode, monkeypatch):
    device = ranks.fake_device
    monkeypatch.setattr(streams, "cuda", device.streams)
    monkeypatch.setattr(streams, "types", {"cpu"})
    plan = lower(one_f_one_b(STAGES, MICROBATCHES))
    communicator = P2PCommunicator(dist.group.WORLD, P2PConfig(pipeline_dtype=torch.float32, deadline=30.0))
    stage = Layer(ranks.rank, plan, ranks)
    runtime = PipelineRuntime(plan, {ranks.rank: stage}, communicator)
    with device.streams.watch():
        runtime.step()  # connects, and agrees on shapes
    stage.model.zero_grad()
    before = len(device.launches)
    with device.streams.watch() as syncs:
        runtime.step()
    # Back-pressure alone: one event per microbatch, so that the host is only so far ahead.
    assert {sync.what for sync in syncs} <= {"Event.synchronize"}
    assert len(syncs) <= MICROBATCHES
    assert device.violations == []
    launches = device.launches[before:]
    assert len(launches) == 2 * MICROBATCHES
    assert {launch.thread for launch in launches} == {threading.get_ident()}
    layers = [Layer(number, plan, ranks) for number in range(STAGES)]
    for _ in range(MICROBATCHES):
        y = layers[1].model(layers[0].model(layers[0].data))
        (y.square().mean() / MICROBATCHES).backward()
    for found, expected in zip(stage.model.parameters(), layers[ranks.rank].model.parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad, rtol=1e-5)
    communicator.close()


@pytest.mark.ranks(STAGES, backend="fake_nccl")
def test_a_wait_that_orders_nothing_is_a_race(ranks, monkeypatch):
    device = ranks.fake_device
    monkeypatch.setattr(streams, "cuda", device.streams)
    monkeypatch.setattr(streams, "types", {"cpu"})
    for kind in (FakeWork, *FakeWork.__subclasses__()):  # of every mode
        monkeypatch.setattr(kind, "wait", lambda work, timeout=None: work.entry.ended.wait())
    plan = lower(one_f_one_b(STAGES, MICROBATCHES))
    communicator = P2PCommunicator(dist.group.WORLD, P2PConfig(pipeline_dtype=torch.float32, deadline=30.0))
    with device.streams.watch():
        PipelineRuntime(plan, {ranks.rank: Layer(ranks.rank, plan, ranks)}, communicator).step()
    assert any("race: " in text and "entry" in text for text in device.violations)
    device.violations.clear()
    communicator.close()
