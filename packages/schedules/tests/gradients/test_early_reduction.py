"""Gradients that are reduced while the step goes on: of plain, sharded and shared parameters, in any order."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from autograd_kit.gradients import gradients_of
from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.plans.plan import parse_action
from pipegrid.schedules import PipelineConfig, compute_plan, get_forward_backward_func, zero_bubble_v
from pipegrid.schedules.megatron.prepared import last_backwards
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection

from ..kit.models import WIDTH, Model, call, in_one_process, microbatch, step_on

LARGE = 2**17  # float64 values of 1 MiB: such a gradient is reduced in place


class Part(Model):
    """Linear layers, a gain that stays plain and is used at several depths, and a large plain table."""

    def __init__(self, seed, *, layers, twice, gain=None):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(layers))
        self.gain = nn.Parameter(0.5 + torch.rand(WIDTH, WIDTH, dtype=torch.float64)) if gain is None else gain
        self.table = nn.Parameter(torch.rand(LARGE, dtype=torch.float64) if seed % 2 else torch.rand(3).double())
        self.twice = twice

    def forward(self, x):
        x = torch.tanh(x @ self.gain)
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.twice:
                x = x @ self.gain
        return x * self.table.mean() + self.table[:3].sum()


def parts(choice, count):
    """The stages of one random job, equal on each rank and in one process."""
    made = []
    shared = choice.random() < 0.5
    for _ in range(count):
        gain = made[0].gain if made and shared else None
        made.append(Part(choice.randrange(100), layers=choice.randint(1, 2), twice=choice.random() < 0.5, gain=gain))
    return made


def shard(stage, choice, mesh):
    """``fully_shard`` of some layers, and of the stage without its plain parameters."""
    plain = {stage.gain, stage.table}
    for layer in stage.layers:
        if choice.random() < 0.3:
            plain |= set(layer.parameters())
        elif choice.random() < 0.7:
            fully_shard(layer, mesh=mesh)
    if plain.issuperset(stage.parameters()):  # nothing would be sharded
        plain -= set(stage.layers[0].parameters())
    fully_shard(stage, mesh=mesh, ignored_params=plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble_v"])
@pytest.mark.parametrize("when", [None, "step", "microbatch"])
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 6), marks=pytest.mark.nightly)], ids=str)
def test_plain_parameters_beside_sharded_ones_have_the_gradients_of_one_process(ranks, schedule, when, seeds):
    """Two replicas of one position: any mix of sharded, plain, large, reused and shared parameters."""
    grid = HyperCommGrid([2, 1], ["dp", "pp"])
    grid.create_pgs(["dp", "pp"])
    mesh = grid.to_device_mesh(["dp"], device_type=ranks.device.type)
    for seed in seeds:
        choice = random.Random(f"{schedule} {when} {seed}")
        chunks = 2 if schedule == "zero_bubble_v" else choice.randint(2, 3)
        count, bucket = choice.randint(2, 4), choice.choice([1, 2**25])
        drawn = choice.getstate()
        stages = [stage.to(ranks.device) for stage in parts(choice, chunks)]
        config = PipelineConfig(
            pipeline_dtype=torch.float64, shard=when, prefetch=1, grad_bucket_bytes=bucket, check_replicas=True
        )
        for stage in stages:
            stage.config = config
            if when is not None:
                shard(stage, choice, mesh)
        pipe = MultiModulePipelineCommunicator(
            {"model": grid}, {"model": []}, config, stage_placement={"model": (0,) * chunks}
        )
        call(
            get_forward_backward_func(schedule=schedule),
            model=stages,
            count=count,
            forward_step_func=step_on(ranks.rank, ranks.device),
            p2p_communicator=pipe,
            pg_collection=ProcessGroupCollection.from_grid(grid),
        )
        choice.setstate(drawn)
        whole = parts(choice, chunks)
        in_one_process(whole, [microbatch(m, lane) for lane in range(2) for m in range(count)], 2 * count)
        for mine, its in zip(gradients_of(stages), gradients_of(whole), strict=True):
            assert (mine - its).norm() < 1e-10 * its.norm(), seed
        pipe.destroy()
        dist.barrier()


def test_the_last_backwards_of_stages_are_in_the_order_of_the_plan():
    """Stage 1 begins its backwards first and ends them last."""
    tokens = ["0F0", "1F0", "0F1", "1F1", "1I0", "0I0", "0W0", "1I1", "0I1", "0W1", "1W0", "1W1"]
    plan = compute_plan([[*map(parse_action, tokens)]], graph=2, placement=[0, 0], num_microbatches=2)
    assert list(last_backwards(plan, 0).items()) == [(9, 0), (11, 1)]
    for position in range(2):
        plan = zero_bubble_v(2, 4)
        actions = list(plan.actions(position))
        for place, stage in last_backwards(plan, position).items():
            later = [a for a in actions[place + 1 :] if a.stage == stage and a.kind.value in ("B", "I", "W")]
            assert actions[place].stage == stage
            assert not later
