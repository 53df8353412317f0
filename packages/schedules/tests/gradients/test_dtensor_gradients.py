"""Gradients of DTensors, reduced and clipped beside plain tensors: those of one process, whatever sharded them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from autograd_kit.gradients import gradients_of
from pipegrid.core.graph import ModuleGraph
from pipegrid.gradients import (
    GradientError,
    LossScale,
    LossScaler,
    clip_grad_norm_,
    fresh_gradients,
    reduce_gradients,
)
from pipegrid.gradients.dtensors import fsdp_divisors
from pipegrid.schedules import PipelineRuntime, lower, zero_bubble_v
from plan_kit.groups import Groups

from ..kit.models import in_one_process
from ..kit.stages import stages_of

WIDTH, LENGTH, LANES = 4, 6, 2
MAX_NORM = 1e-2


class Block(nn.Module):
    """What tensor parallelism has: a norm inside sequence parallelism, and a pair of linear layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh())
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)
        self.double()

    def forward(self, x):
        return self.down(self.up(self.norm(x))) * 1.0  # FSDP2 warns of a module whose output is a view


def sample(lane, microbatch=0):
    generator = torch.Generator().manual_seed(10 * lane + microbatch)
    return torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=generator)


def weigh(lane, output):
    """A sum over tokens, of which the lanes have different numbers, and that number."""
    tokens = 3 + 4 * lane
    return output.square().sum(-1).flatten()[:tokens].sum(), tokens


def of_one_process(model, lanes, *, per_token, microbatches=1):
    """The gradients of the whole batch."""
    tokens = sum(weigh(lane, model(sample(lane)))[1] for lane in range(lanes)) * microbatches
    for lane in range(lanes):
        for microbatch in range(microbatches):
            loss, own = weigh(lane, model(sample(lane, microbatch)))
            (loss / tokens if per_token else loss / own / lanes / microbatches).backward()
    return gradients_of(model)


assert_close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-14)


def compare(model, gradients, groups):
    """Gradients, their norm, and the clipped gradients."""
    assert_close(gradients_of(model), gradients)
    whole = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    norm = clip_grad_norm_(model, groups, MAX_NORM)
    torch.testing.assert_close(norm.cpu(), whole, rtol=1e-12, atol=0.0)
    assert_close(gradients_of(model), [gradient * (MAX_NORM / (whole + 1e-6)) for gradient in gradients])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "tokens"])
@pytest.mark.parametrize("factor", [None, 1.0, 3.0])
def test_what_fully_shard_has_averaged_is_divided_by_what_the_loss_asks_for(ranks, factor, per_token):
    """Two microbatches and two steps; one linear layer is left plain, another has a divide factor of its own."""
    model = Block().to(ranks.device)
    mesh = init_device_mesh(ranks.device.type, (2,))
    fully_shard(model.up, mesh=mesh)
    if factor is not None:
        model.up.set_gradient_divide_factor(factor)
    fully_shard(model, mesh=mesh, ignored_params=set(model.down.parameters()))
    assert set(fsdp_divisors(model).values()) == {factor, None}
    groups = Groups(dp=dist.group.WORLD)
    for _ in range(2):
        with fresh_gradients(model):
            counted = 0
            for microbatch in range(2):
                loss, tokens = weigh(ranks.rank, model(sample(ranks.rank, microbatch).to(ranks.device)))
                (loss if per_token else loss / tokens / 2).backward()
                counted += tokens
            reduce_gradients(model, groups, num_tokens=counted if per_token else None)
    twice = [2 * gradient for gradient in of_one_process(Block(), 2, per_token=per_token, microbatches=2)]
    assert LossScaler(LossScale(scale=2.0)).unscale(model)
    scaled = [gradient / 2 for gradient in twice]
    compare(model, scaled, groups)


def sequence_parallel(model, mesh):
    """Tensor parallel with the norm on parts of the sequence; the output whole on every rank."""
    plan = {
        "norm": SequenceParallel(),
        "up.0": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    cut = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    return parallelize_module(model, mesh, cut)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "tokens"])
@pytest.mark.parametrize("sharded", ["tp", "tp and fsdp", "hsdp"])
def test_tensor_parallel_and_sharded_gradients_are_those_of_one_process(ranks, sharded, per_token):
    """2 replicas x tp 2, or four lanes that are sharded two by two; beside a plain module on all ranks."""
    mesh = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("outer", "inner"))
    model, lanes = Block().to(ranks.device), 4
    if sharded == "hsdp":
        fully_shard(model, mesh=mesh)
        groups, lane = Groups(dp=dist.group.WORLD), ranks.rank
    else:
        sequence_parallel(model, mesh["inner"])
        lanes, lane = 2, ranks.rank // 2
        groups = Groups(dp=mesh.get_group("outer"), tp=mesh.get_group("inner"))
        if sharded == "tp and fsdp":
            fully_shard(model, mesh=mesh["outer"])
    plain = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).to(ranks.device)
    nn.init.eye_(plain.weight)
    nn.init.zeros_(plain.bias)
    both = nn.ModuleList([model, plain])
    loss, tokens = weigh(lane, plain(model(sample(lane).to(ranks.device))))
    (loss if per_token else loss / tokens).backward()
    if sharded == "tp":
        assert any(placement.is_partial() for placement in model.norm.weight.grad.placements), "the test's own premise"
        with pytest.raises(GradientError, match="of which a norm needs the sum: call reduce_gradients first"):
            clip_grad_norm_(both, groups, 1.0)
    first = sharded == "hsdp" or ranks.rank % 2 == 0
    reduce_gradients(both, groups, num_tokens=(tokens if first else 0) if per_token else None)
    reference = nn.ModuleList([Block(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)])
    reference[1].load_state_dict({name: value.cpu() for name, value in plain.state_dict().items()})
    whole = nn.Sequential(*reference)
    compare(both, of_one_process(whole, lanes, per_token=per_token), groups)
    for parameter in model.parameters():
        assert parameter.grad.placements == parameter.placements


@pytest.mark.ranks(2)
def test_partial_gradients_in_several_buckets_some_without_a_gradient_here(ranks):
    """Every lane starts its sums in one order, whatever it has a gradient of; a part of a sum, or of a mean."""
    mesh = init_device_mesh(ranks.device.type, (2,))
    module = nn.ParameterDict(
        {
            "whole": nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()])),
            "mean": nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()])),
            "none": nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()])),
            "plain": nn.Parameter(torch.zeros(4, device=ranks.device)),
        }
    )
    part = torch.arange(4.0, device=ranks.device) + 10 * ranks.rank
    module["whole"].grad = DTensor.from_local(part.clone(), mesh, [Partial()])
    module["mean"].grad = DTensor.from_local(part.clone(), mesh, [Partial("avg")])
    module["plain"].grad = part.clone()
    reduce_gradients(module, Groups(tp=dist.group.WORLD), bucket_bytes=16)
    total = 2 * torch.arange(4.0) + 10
    assert torch.equal(module["whole"].grad.to_local().cpu(), total)
    assert torch.equal(module["mean"].grad.to_local().cpu(), total / 2)
    assert module["mean"].grad.placements == module["mean"].placements
    assert module["none"].grad is None
    assert torch.equal(module["plain"].grad, part)


@pytest.mark.ranks(2)
def test_dtensors_whose_reduction_is_not_known_are_errors(ranks):
    mesh = init_device_mesh(ranks.device.type, (2,))
    module = nn.ParameterDict({"w": nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))})
    module["w"].grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(GradientError, match="a DTensor over 2 replicas, and not by fully_shard"):
        reduce_gradients(module, Groups(dp=dist.group.WORLD))
    sharded = Block().to(ranks.device)
    fully_shard(sharded, mesh=mesh)
    with pytest.raises(GradientError, match="by fully_shard over a mesh of 2 ranks, of which 1 are of its 1 replicas;"):
        reduce_gradients(sharded, Groups())
    module = nn.ParameterDict({"w": nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))})
    module["w"].grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(GradientError, match=r"no sum makes its shard: placements \(S.*of a parameter with \(R"):
        reduce_gradients(module, Groups(tp=dist.group.WORLD))
    module["w"].grad = DTensor.from_local(torch.ones(4, device=ranks.device), mesh, [Partial("max")])
    with pytest.raises(GradientError, match=r"no sum makes its shard: placements \(P.*of a parameter with \(R"):
        reduce_gradients(module, Groups(tp=dist.group.WORLD))


def stages_on(models, lane, device):
    """The stages of one position over the data of a lane."""

    graph, data = ModuleGraph({"model": len(models)}), lambda microbatch: sample(lane, microbatch).to(device)
    return dict(enumerate(stages_of(graph, models, data=data, loss=lambda output, _: output.square().mean() / 2)))


class Beside(nn.Module):
    """A plain layer on the input's path, and a sharded one beside it, whose own input needs no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.plain, self.table = Block(), Block()

    def forward(self, x):
        return self.plain(x) * self.table(torch.ones_like(x.detach()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", ["whole", "hidden", "inside", "beside the input's path"])
def test_split_backwards_of_sharded_stages_reduce_whole_gradients(ranks, sharded):
    """FSDP2 reduces at the gradient of a module's inputs, when the weight half has not run."""
    mesh = init_device_mesh(ranks.device.type, (2,))
    models = [Block().to(ranks.device), Beside().to(ranks.device)]
    parts = {"inside": [models[1].plain], "beside the input's path": [models[1].table]}
    for model in parts.get(sharded, models):
        fully_shard(model, mesh=mesh)
    called = [model.__call__ for model in models] if sharded == "hidden" else models  # of a function no module is known
    PipelineRuntime(lower(zero_bubble_v(1, 2)), stages_on(called, ranks.rank, ranks.device), None).step()
    both = nn.ModuleList(models)
    groups = Groups(dp=dist.group.WORLD)
    reduce_gradients(both, groups)
    reference = nn.ModuleList([Block(), Beside()])
    in_one_process(reference, [sample(lane, microbatch) for lane in range(2) for microbatch in range(2)], 4)
    compare(both, gradients_of(reference), groups)


@pytest.mark.ranks(2)
def test_split_backwards_of_tensor_parallel_stages(ranks):
    mesh = init_device_mesh(ranks.device.type, (2,))
    models = [sequence_parallel(Block().to(ranks.device), mesh) for _ in range(2)]
    PipelineRuntime(lower(zero_bubble_v(1, 2)), stages_on(models, 0, ranks.device), None).step()
    groups = Groups(tp=dist.group.WORLD)
    both = nn.ModuleList(models)
    reduce_gradients(both, groups)
    reference = nn.ModuleList([Block(), Block()])
    in_one_process(reference, [sample(0, microbatch) for microbatch in range(2)], 2)
    compare(both, gradients_of(reference), groups)
