"""Tensor-parallel and FSDP2-sharded parameters: saved and loaded under any other sharding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpoint_kit.checkpoints import require_same, values_of
from pipegrid.checkpoint import Checkpoints, TrainingState, export_safetensors, load_safetensors
from pipegrid.checkpoint.errors import CheckpointMismatchError
from stages_kit.gradients import full

KINDS = ("whole", "tp", "fsdp", "hsdp", "fsdp+tp")


class Net(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 5), nn.LayerNorm(5)


def made(kind, *, seed):
    torch.manual_seed(seed)
    net = Net()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind == "tp":
        parallelize_module(net, init_device_mesh("cpu", (4,)), plan)
    if kind == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
    if kind == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    if kind == "fsdp+tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], plan)
        for part in (net.up, net.down):
            fully_shard(part, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    return net, optimizer, TrainingState(stages={"net": {0: net}}, optimizers=[optimizer])


def train(net, optimizer):
    for parameter in net.parameters():
        parameter.grad = 0.3 * parameter.detach() + 0.1  # sharded as the parameter is
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("source", "targets"),
    [("fsdp+tp", ("whole", "tp", "hsdp")), *(pytest.param(kind, KINDS, marks=pytest.mark.nightly) for kind in KINDS)],
)
def test_a_sharding_is_loaded_by_every_other(ranks, source, targets):
    net, optimizer, state = made(source, seed=1)
    train(net, optimizer)
    expected = values_of([net], optimizer)
    checkpoints = Checkpoints(ranks.shared_path / "run")
    checkpoints.save(state, step=1, blocking=False)
    train(net, optimizer)
    checkpoints.wait()
    target = ranks.shared_path / "net.safetensors"
    if ranks.rank == 0:
        export_safetensors(checkpoints.directory / "save-0001-step-00000001", target)
    ranks.barrier()
    for kind in targets:
        other, trained, state = made(kind, seed=2)
        load_safetensors(state, target)
        require_same(
            {name: full(p) for name, p in other.named_parameters()},
            {n: expected[n] for n in dict(net.named_parameters())},
        )
        checkpoints.load(state)
        require_same(values_of([other], trained), expected)
    checkpoints.close()


@pytest.mark.ranks(2)
def test_a_shard_that_is_no_dtensor_is_never_stored(ranks):
    """Two tensor-parallel ranks with a plain half each: names and shapes are equal, the values are not."""
    half = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        half.weight.fill_(dist.get_rank())
    state = TrainingState(stages={"net": {0: half}})
    checkpoints = Checkpoints(ranks.shared_path / "run")
    with pytest.raises(
        CheckpointMismatchError,
        match="the checksum of model/net/weight .* on rank 0 .* on rank 1; a shard of a tensor must be a DTensor",
    ):
        checkpoints.save(state, step=1)
    assert checkpoints.steps() == []
    checkpoints.close()
    first = Checkpoints(ranks.shared_path / "run", replicas="first")
    first.save(state, step=1)
    first.load(state)
    assert half.weight.unique().item() in (0, 1)
    first.close()
