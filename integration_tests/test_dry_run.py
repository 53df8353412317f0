"""A dry run: one rank of a world of 512 that does not exist otherwise, over torch's fake backend."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipegrid.bridges import (
    BridgeCommunicator,
    ColocatedBridgeCommunicator,
    MultiModulePipelineCommunicator,
    VTPCommunicator,
    VTPTopology,
)
from pipegrid.schedules import PipelineRuntime, clip_grad_norm_, lower, reduce_gradients, zero_bubble_h1
from pipegrid.schedules.megatron.config import PipelineConfig
from pipegrid.topology import (
    HyperCommGrid,
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
    create_grid_groups,
)
from pipegrid.transport import P2PCommunicator, P2PConfig

from .kit.models import Part, call, forward_step
from .kit.stages import Stage

WORLD, RANK, WIDTH, MICROBATCHES = 512, 100, 8, 32
SHAPE = (4, 2, WIDTH)
CONFIG = P2PConfig(pipeline_dtype=torch.float32, deadline=20.0, open_deadline=20.0)


@pytest.fixture(autouse=True)
def _world(request):
    rank = getattr(request, "param", RANK)
    began = time.monotonic()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    yield
    dist.destroy_process_group()
    assert time.monotonic() - began < 20, "something waited for a rank that does not exist"


def as_rank(*ranks):
    return pytest.mark.parametrize("_world", ranks, indirect=True, ids=[f"rank {rank}" for rank in ranks])


def pipeline():
    """Groups of this rank in a grid of tp 4, dp 8, pp 16."""
    grid = HyperCommGrid([4, 8, 16], ["tp", "dp", "pp"])
    grid.create_pgs(["tp", "dp", "pp"])
    return grid, ProcessGroupCollection.from_grid(grid)


@as_rank(0, RANK, WORLD - 1)
def test_steps_of_a_step_function_with_the_reduction_of_gradients():
    grid, groups = pipeline()
    config = PipelineConfig(pipeline_dtype=torch.float32, deadline=20.0, open_deadline=20.0)
    communicator = P2PCommunicator(groups.pp, config, tensor_shape=SHAPE)
    part = Part(0, WIDTH, config, dtype=torch.float32)
    for _ in range(2):
        infos = call(
            model=part,
            count=MICROBATCHES,
            forward_step_func=partial(forward_step, data=lambda _: torch.ones(SHAPE)),
            p2p_communicator=communicator,
            pg_collection=groups,
        )
        reduce_gradients(part, groups)
        assert clip_grad_norm_(part, groups, 1.0).isfinite()
    assert len(infos) == (MICROBATCHES if dist.get_rank() == WORLD - 1 else 0)
    assert part.layer.weight.grad is not None
    sends = [lane for lane in communicator.lanes.values() if lane.spec.source == dist.get_rank()]
    assert all(lane.stats.messages in (0, 2 * MICROBATCHES) for lane in sends)
    communicator.close()
    grid.destroy()


def test_a_runtime_runs_the_plan_of_its_position():
    _, groups = pipeline()
    plan = lower(zero_bubble_h1(16, MICROBATCHES))
    stage = groups.pp.rank()
    communicator = P2PCommunicator(groups.pp, CONFIG, tensor_shape=SHAPE, traffic=plan.traffic)
    runtime = PipelineRuntime(
        plan, {stage: Stage(plan.graph, stage, Part(0, WIDTH, dtype=torch.float32))}, communicator
    )
    for _ in range(2):
        runtime.step()
    assert {lane.stats.messages for lane in communicator.lanes.values()} == {2 * MICROBATCHES}
    communicator.close()


@as_rank(RANK, 300)
def test_communicators_between_grids_open_and_send():
    grids = {
        "images": HyperCommGrid([4, 64], ["tp", "dp"]),
        "language": HyperCommGrid([8, 16, 2], ["tp", "dp", "pp"], rank_offset=256),
    }
    create_grid_groups({grid: ["tp", "dp"] for grid in grids.values()})
    assert len(MultiModuleProcessGroupCollection.from_grids(grids)) == 1
    bridge = BridgeCommunicator(*grids.values(), config=CONFIG)
    if dist.get_rank() < 256:
        bridge.isend_forward(torch.ones(2, 4, WIDTH)).wait()
    bridge.destroy()
    modules = MultiModulePipelineCommunicator(grids, {"images": ["language"], "language": []}, CONFIG)
    assert modules.communicators > 0
    modules.destroy()


def test_communicators_of_one_grid_and_of_variable_tensor_parallel_stages_open():
    source, destination = HyperCommGrid([4, 128], ["tp", "dp"]), HyperCommGrid([8, 64], ["tp", "dp"])
    create_grid_groups({source: ["tp", "dp"], destination: ["tp", "dp"]})
    colocated = ColocatedBridgeCommunicator(source, destination)
    assert colocated.communicate(torch.ones(SHAPE)).shape == (8, 2, WIDTH)
    colocated.destroy()
    stages = VTPCommunicator(VTPTopology([2, 4, 2], dp=64), CONFIG)
    assert stages.communicators > 0
    stages.close()
