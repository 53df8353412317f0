"""Communicators made with the traffic of a plan open its lanes and no others, and run it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipegrid.bridges import ModuleGraph, MultiModulePipelineCommunicator, VTPCommunicator, VTPTopology
from pipegrid.schedules import PipelineRuntime, lower, multi_module_1f1b, one_f_one_b, verify
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import Direction, Edge, P2PCommunicator, P2PConfig

from .kit.stages import Scale, Stage

CONFIG = P2PConfig(pipeline_dtype=torch.float32, deadline=30.0, open_deadline=30.0)
CHAIN = lower(one_f_one_b(3, 4))


def run(plan, stage, communicator, device):
    """Each stage doubles its input; the last stage's loss is the sum."""
    scale = Scale(2.0, (2, 4), device=device)
    here = Stage(plan.graph, stage, scale, data=lambda _: torch.ones(2, 4, device=device), loss=torch.sum)
    PipelineRuntime(plan, {stage: here}, communicator).step()
    assert torch.equal(
        scale.weight.grad.cpu(), torch.full((2, 4), 2.0 ** (plan.num_stages - 1) * plan.num_microbatches)
    )


@pytest.mark.ranks(3)
def test_a_chain_opens_as_many_communicators_as_the_proof_counts(ranks):
    communicator = P2PCommunicator(dist.group.WORLD, CONFIG, traffic=CHAIN.traffic, device=ranks.device)
    assert len(communicator.lanes) == verify(CHAIN).communicators[ranks.rank]
    run(CHAIN, ranks.rank, communicator, ranks.device)
    communicator.close()


@pytest.mark.ranks(3)
def test_modules_open_as_many_communicators_as_the_proof_counts(ranks):
    plan = lower(multi_module_1f1b(ModuleGraph({"images": 1, "language": 2}, {"images": ["language"]}), 4))
    grids = {
        "images": HyperCommGrid([1], ["dp"], world_size=3),
        "language": HyperCommGrid([2], ["pp"], rank_offset=1, world_size=3),
    }
    communicator = MultiModulePipelineCommunicator(
        grids,
        {"images": ["language"]},
        CONFIG,
        module_output_ndim={"images": 2, "language": 2},
        traffic=plan.traffic,
        device=ranks.device,
    )
    assert communicator.communicators == verify(plan).communicators[ranks.rank]
    run(plan, ranks.rank, communicator, ranks.device)
    communicator.destroy()


@pytest.mark.ranks(3)
def test_stages_of_equal_tensor_parallel_size_open_as_many_communicators_as_the_proof_counts(ranks):
    communicator = VTPCommunicator(VTPTopology([1, 1, 1]), CONFIG, traffic=CHAIN.traffic, device=ranks.device)
    assert communicator.communicators == verify(CHAIN).communicators[ranks.rank]
    run(CHAIN, ranks.rank, communicator, ranks.device)
    communicator.close()


def test_the_traffic_of_a_plan_is_its_edges_and_directions():
    forward, backward = Direction
    assert CHAIN.traffic == tuple((Edge(s, s + 1), direction) for s in (0, 1) for direction in (forward, backward))
    assert one_f_one_b(3, 4).traffic == ()  # computes alone
