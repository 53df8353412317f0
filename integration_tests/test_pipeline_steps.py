"""Transport and schedules composed on real ranks: a pipelined step has the gradients of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist

from pipegrid.schedules import SCHEDULES, PipelineRuntime, lower
from pipegrid.schedules.megatron.step_functions import (
    forward_backward_pipelining_with_interleaving,
)
from pipegrid.transport import P2PCommunicator

from .kit.data import normal
from .kit.models import Part, call, chain_in_one_process, config_for, forward_step, require_same_gradients
from .kit.stages import Stage

WIDTH = 8


def microbatch(index, *, vary, device):
    return normal(1000 + index, 2 + index % 3 if vary else 4, WIDTH, device=device)


def reference(stages, microbatches, *, vary, device):
    """The parts with their gradients, and the infos."""
    parts = [Part(stage, WIDTH).to(device) for stage in range(stages)]
    data = [microbatch(index, vary=vary, device=device) for index in range(microbatches)]
    return parts, chain_in_one_process(parts, data, microbatches)


@pytest.mark.few(6)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("microbatches", [1, 4, 10])
@pytest.mark.parametrize(
    "options",
    [{}, {"variable_seq_lengths": True}, {"deallocate_pipeline_outputs": True}, {"communicators": "shared"}],
    ids=str,
)
def test_1f1b_on_real_ranks(ranks, microbatches, options):
    config = config_for(ranks, **options)
    vary = config.variable_seq_lengths
    communicator = P2PCommunicator(dist.group.WORLD, config)
    part = Part(ranks.rank, WIDTH, config).to(ranks.device)
    step = partial(forward_step, data=partial(microbatch, vary=vary, device=ranks.device))
    for _ in range(2):
        part.zero_grad()
        infos = call(model=part, count=microbatches, forward_step_func=step, p2p_communicator=communicator)
        parts, expected = reference(ranks.world_size, microbatches, vary=vary, device=ranks.device)
        assert infos == (expected if ranks.rank == ranks.world_size - 1 else [])
        require_same_gradients(part, parts[ranks.rank], rtol=0, atol=0)
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
    config = config_for(ranks, **options)
    vary = config.variable_seq_lengths
    communicator = P2PCommunicator(dist.group.WORLD, config)
    size = ranks.world_size
    own = [Part(chunk * size + ranks.rank, WIDTH, config).to(ranks.device) for chunk in range(chunks)]
    given = {
        "forward_step_func": partial(forward_step, data=partial(microbatch, vary=vary, device=ranks.device)),
        "p2p_communicator": communicator,
    }
    for _ in range(2):
        for part in own:
            part.zero_grad()
        infos = call(forward_backward_pipelining_with_interleaving, model=own, count=microbatches, **given)
        parts, expected = reference(size * chunks, microbatches, vary=vary, device=ranks.device)
        assert infos == (expected if ranks.rank == size - 1 else [])
        for part, other in zip(own, parts[ranks.rank :: size], strict=True):
            require_same_gradients(part, other, rtol=0, atol=0)
    communicator.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "name", [name for name, schedule in SCHEDULES.items() if schedule.trains and not schedule.sliced]
)
def test_every_schedule_on_real_ranks(ranks, name):
    plan = lower(SCHEDULES[name].plan(ranks.world_size, 5))
    config = config_for(ranks)
    communicator = P2PCommunicator(dist.group.WORLD, config, placement=[positions[0] for positions in plan.placement])
    data = partial(microbatch, vary=False, device=ranks.device)
    stages = {
        stage: Stage(
            plan.graph,
            stage,
            Part(stage, WIDTH).to(ranks.device),
            data=data,
            loss=lambda output: output.square().mean() / plan.num_microbatches,
        )
        for stage in plan.stages_at[ranks.rank]
    }
    runtime = PipelineRuntime(plan, stages, communicator)
    expected, _ = reference(plan.num_stages, 5, vary=False, device=ranks.device)
    runtime.eval()
    for _ in range(2):
        for stage in stages.values():
            stage.model.zero_grad()
        runtime.step()
        for number, stage in stages.items():
            require_same_gradients(stage.model, expected[number], rtol=1e-12, atol=0)
    communicator.close()
