"""Transport and schedules composed on real ranks: a pipelined step has the gradients of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.schedules.config import PipelineConfig
from pipegrid.schedules.forward_backward import forward_backward_pipelining_without_interleaving
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
    config = PipelineConfig(pipeline_dtype=torch.float64, strict=ranks.strict_sends, **options)
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
