"""A step over the fake NCCL: launches from the plan's thread, no race between streams, no wait but back-pressure."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from pipegrid.fake_nccl import FakeWork
from pipegrid.schedules import PipelineRuntime, lower, one_f_one_b
from pipegrid.transport import P2PCommunicator, P2PConfig

from .kit.models import Part, require_same_gradients
from .kit.stages import Stage, in_one_process

STAGES, MICROBATCHES, WIDTH = 2, 6, 4


def layer(plan, number, **options):
    """A linear stage; the mean square of the last one is the loss."""
    return Stage(
        plan.graph,
        number,
        Part(number, WIDTH, dtype=torch.float32),
        data=lambda _: torch.ones(3, WIDTH),
        loss=lambda y: y.square().mean() / MICROBATCHES,
        **options,
    )


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.ranks(STAGES, backend="fake_nccl", fake_nccl=mode))
        for mode in ("streams", "serial")
    ],
)
def test_a_step_has_the_gradients_of_one_process_no_race_and_no_wait_but_back_pressure(ranks, mode, device):
    plan = lower(one_f_one_b(STAGES, MICROBATCHES))
    communicator = P2PCommunicator(dist.group.WORLD, P2PConfig(pipeline_dtype=torch.float32, deadline=30.0))
    stage = layer(plan, ranks.rank, before=lambda microbatch: ranks.reach(f"F{microbatch}"))
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
    layers = [layer(plan, number) for number in range(STAGES)]
    in_one_process(layers, MICROBATCHES)
    require_same_gradients(stage.model, layers[ranks.rank].model, rtol=1e-5, atol=1e-8)
    communicator.close()


@pytest.mark.ranks(STAGES, backend="fake_nccl")
def test_a_wait_that_orders_nothing_is_a_race(ranks, device, monkeypatch):
    for kind in (FakeWork, *FakeWork.__subclasses__()):  # of every mode
        monkeypatch.setattr(kind, "wait", lambda work, timeout=None: work.entry.ended.wait())
    plan = lower(one_f_one_b(STAGES, MICROBATCHES))
    communicator = P2PCommunicator(dist.group.WORLD, P2PConfig(pipeline_dtype=torch.float32, deadline=30.0))
    with device.streams.watch():
        PipelineRuntime(plan, {ranks.rank: layer(plan, ranks.rank)}, communicator).step()
    assert any("race: " in text and "entry" in text for text in device.violations)
    device.violations.clear()
    communicator.close()
