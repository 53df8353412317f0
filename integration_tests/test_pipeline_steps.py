"""Transport and schedules composed on real ranks: a pipelined step has the gradients of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.schedules import SCHEDULES, Forwarded, PipelineRuntime, lower
from pipegrid.schedules.megatron.config import PipelineConfig
from pipegrid.schedules.megatron.step_functions import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from pipegrid.transport import P2PCommunicator

WIDTH = 8


class Part(nn.Module):
    def __init__(self, stage, config, device):
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).to(device))
        self.config = config
        self.received = [None]

    def set_input_tensor(self, received):
        self.received = received

    def forward(self, x):
        return torch.tanh(x @ self.weight)


def microbatch(index, rows, device):
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(device)


def rows_of(index, *, vary):
    return 2 + index % 3 if vary else 4


def loss_func(output):
    loss = (output**2).mean()
    return loss, {"loss": loss.item()}


def step(iterator, model, *, vary, device):
    x = model.received[0]
    if x is None:
        index = next(iterator)
        x = microbatch(index, rows_of(index, vary=vary), device)
    return model(x), loss_func


def reference(stages, microbatches, *, vary, config, device):
    parts = [Part(stage, config, device) for stage in range(stages)]
    infos = []
    for index in range(microbatches):
        x = microbatch(index, rows_of(index, vary=vary), device)
        for part in parts:
            x = part(x)
        loss, info = loss_func(x)
        (loss / microbatches).backward()
        infos.append(info)
    return parts, infos


@pytest.mark.ranks(4)
@pytest.mark.parametrize("microbatches", [1, 4, 10])
@pytest.mark.parametrize(
    "options",
    [{}, {"variable_seq_lengths": True}, {"deallocate_pipeline_outputs": True}, {"communicators": "shared"}],
    ids=str,
)
def test_1f1b_on_real_ranks(ranks, microbatches, options):
    config = PipelineConfig(
        pipeline_dtype=torch.float64, strict=ranks.strict_sends, staged=ranks.backend == "staged", **options
    )
    vary = config.variable_seq_lengths
    communicator = P2PCommunicator(dist.group.WORLD, config)
    part = Part(ranks.rank, config, ranks.device)
    for _ in range(2):
        part.weight.grad = None
        infos = forward_backward_pipelining_without_interleaving(
            forward_step_func=partial(step, vary=vary, device=ranks.device),
            data_iterator=iter(range(microbatches)),
            model=part,
            num_microbatches=microbatches,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=communicator,
        )
        parts, expected = reference(ranks.world_size, microbatches, vary=vary, config=config, device=ranks.device)
        assert infos == (expected if ranks.rank == ranks.world_size - 1 else [])
        assert torch.equal(part.weight.grad, parts[ranks.rank].weight.grad)
    communicator.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("chunks", "microbatches"), [(2, 2), (2, 8), (3, 4)])
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap_p2p_comm": True, "microbatch_group_size_per_vp_stage": 2}, {"communicators": "shared"}],
    ids=str,
)
def test_interleaving_on_two_real_ranks(ranks, chunks, microbatches, options):
    check_interleaving(ranks, chunks, microbatches, options)


@pytest.mark.ranks(4)
def test_interleaving_on_four_real_ranks_with_lengths_that_vary(ranks):
    check_interleaving(ranks, 2, 8, {"variable_seq_lengths": True, "deallocate_pipeline_outputs": True})


def check_interleaving(ranks, chunks, microbatches, options):
    config = PipelineConfig(
        pipeline_dtype=torch.float64, strict=ranks.strict_sends, staged=ranks.backend == "staged", **options
    )
    vary = config.variable_seq_lengths
    communicator = P2PCommunicator(dist.group.WORLD, config)
    size = ranks.world_size
    own = [Part(chunk * size + ranks.rank, config, ranks.device) for chunk in range(chunks)]
    for _ in range(2):
        for part in own:
            part.weight.grad = None
        infos = forward_backward_pipelining_with_interleaving(
            forward_step_func=partial(step, vary=vary, device=ranks.device),
            data_iterator=[iter(range(microbatches)) for _ in own],
            model=own,
            num_microbatches=microbatches,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=communicator,
        )
        parts, expected = reference(size * chunks, microbatches, vary=vary, config=config, device=ranks.device)
        assert infos == (expected if ranks.rank == size - 1 else [])
        for part, other in zip(own, parts[ranks.rank :: size], strict=True):
            assert torch.equal(part.weight.grad, other.weight.grad)
    communicator.close()


class Computation:
    """A stage for the runtime: the same part, and the same loss."""

    def __init__(self, plan, stage, config, device):
        self.model = Part(stage, config, device)
        self.outgoing = [edge for edge in plan.graph.stage_edges if edge.source == stage]
        self.count = plan.num_microbatches

    def forward(self, index, inputs):
        arriving = next(iter(inputs.values()), None)
        device = self.model.weight.device
        output = self.model(microbatch(index, 4, device) if arriving is None else arriving)
        return Forwarded(
            dict.fromkeys(self.outgoing, output), None if self.outgoing else (output**2).mean() / self.count
        )


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "name", [name for name, schedule in SCHEDULES.items() if schedule.trains and not schedule.sliced]
)
def test_every_schedule_on_real_ranks(ranks, name):
    plan = lower(SCHEDULES[name].plan(ranks.world_size, 5))
    config = PipelineConfig(pipeline_dtype=torch.float64, strict=ranks.strict_sends, staged=ranks.backend == "staged")
    communicator = P2PCommunicator(dist.group.WORLD, config, placement=[positions[0] for positions in plan.placement])
    stages = {stage: Computation(plan, stage, config, ranks.device) for stage in plan.stages_at[ranks.rank]}
    runtime = PipelineRuntime(plan, stages, communicator)
    expected, _ = reference(plan.num_stages, 5, vary=False, config=config, device=ranks.device)
    runtime.eval()
    for _ in range(2):
        for stage in stages.values():
            stage.model.weight.grad = None
        runtime.step()
        for number, stage in stages.items():
            assert torch.allclose(stage.model.weight.grad, expected[number].weight.grad, rtol=1e-12, atol=0)
    communicator.close()
