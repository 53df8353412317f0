"""Modules with different numbers of replicas, a mean and a token-weighted loss: the gradients of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.schedules import PipelineConfig, clip_grad_norm_, forward_backward_pipelining_without_interleaving
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, replica_samples

MICROBATCHES, BATCH, WIDTH = 3, 4, 5


def layer(seed, device):
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH).double().to(device)


class Stage(nn.Module):
    def __init__(self, seed, device, config):
        super().__init__()
        self.layer = layer(seed, device)
        self.config = config
        self.received = {}

    def set_input_tensor(self, received):
        self.received = received

    def forward(self, x):
        return torch.tanh(self.layer(x))


def microbatch(index, device):
    generator = torch.Generator().manual_seed(index)
    return torch.randn(BATCH, 2, WIDTH, dtype=torch.float64, generator=generator).to(device)


def weights(index, device):
    """Tokens that count, per sample: uneven between microbatches and lanes."""
    return torch.randint(0, 2, (BATCH, 2), generator=torch.Generator().manual_seed(50 + index)).to(device)


def loss_of(output, counted, *, per_token):
    if per_token:
        return (output.square().mean(dim=-1) * counted).sum(), counted.sum(), None
    return output.square().mean(), None


@pytest.mark.ranks(3)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "tokens"])
@pytest.mark.parametrize("lanes", [(2, 1), (1, 2)], ids=str)
def test_gradients_and_norm_are_those_of_one_process(ranks, lanes, per_token):
    grids = {
        "images": HyperCommGrid([lanes[0], 1], ["dp", "pp"]),
        "language": HyperCommGrid([lanes[1], 1], ["dp", "pp"], rank_offset=lanes[0]),
    }
    name = "images" if ranks.rank < lanes[0] else "language"
    config = PipelineConfig(
        pipeline_dtype=torch.float64,
        calculate_per_token_loss=per_token,
        strict=ranks.strict_sends,
        staged=ranks.backend == "staged",
        deadline=30,
    )
    for grid in grids.values():
        grid.create_pg("dp")
    groups = ProcessGroupCollection.from_grid(grids[name])
    communicator = MultiModulePipelineCommunicator(grids, {"images": ["language"]}, config)
    stage = Stage(["images", "language"].index(name), ranks.device, config)
    share = replica_samples(BATCH, grids[name])

    def step(indices, model):
        index = next(indices)
        if name == "images":
            return {"images": model(microbatch(index, ranks.device)[share.start : share.stop])}, None
        counted = weights(index, ranks.device)[share.start : share.stop]
        return model(model.received["images"]), lambda output: loss_of(output, counted, per_token=per_token)

    forward_backward_pipelining_without_interleaving(
        forward_step_func=step,
        data_iterator=iter(range(MICROBATCHES)),
        model=stage,
        num_microbatches=MICROBATCHES,
        seq_length=2,
        micro_batch_size=BATCH,
        p2p_communicator=communicator,
        pg_collection=groups,
    )
    reference = [layer(0, ranks.device), layer(1, ranks.device)]
    tokens = sum(weights(index, ranks.device).sum() for index in range(MICROBATCHES))
    for index in range(MICROBATCHES):
        output = torch.tanh(reference[1](torch.tanh(reference[0](microbatch(index, ranks.device)))))
        loss = loss_of(output, weights(index, ranks.device), per_token=per_token)[0]
        (loss / (tokens if per_token else MICROBATCHES)).backward()
    expected = reference[["images", "language"].index(name)]
    for ours, theirs in zip(stage.layer.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)
    whole = torch.cat([p.grad.flatten() for module in reference for p in module.parameters()]).norm()
    assert torch.allclose(clip_grad_norm_(stage, groups, 1e-3), whole, rtol=1e-10)
    communicator.destroy()
    dist.barrier()
