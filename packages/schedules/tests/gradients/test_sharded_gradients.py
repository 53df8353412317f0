"""Gradients that are a part on each rank: DTensors, tensor-replicated parameters with partial gradients, replicas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from autograd_kit.blocks import two_layers
from pipegrid.core.graph import ModuleGraph
from pipegrid.gradients import (
    GradientError,
    LossScaler,
    ReplicaError,
    clip_grad_norm_,
    foreach,
    reduce_gradients,
    require_equal_replicas,
)
from pipegrid.gradients.all_reduce import all_reduce
from pipegrid.gradients.reduction.policy import gradient_policy
from pipegrid.monitor.collectives import Waiting
from pipegrid.schedules.megatron import PipelineConfig
from pipegrid.topology import ProcessGroupCollection
from pipegrid.transport import CollectiveFailedError
from plan_kit.groups import Groups


def samples(lane):
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(lane))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_gradients_sharded_by_fsdp2_are_clipped_by_their_shards(ranks, norm_type):
    """No DTensor operation in between: each would be a collective, in which a rank without the parameter is missing."""
    model = two_layers().to(ranks.device)
    fully_shard(model, mesh=init_device_mesh(ranks.device.type, (2,)))
    model(samples(ranks.rank).to(ranks.device)).square().mean().backward()
    reference = two_layers().to(ranks.device)
    (sum(reference(samples(lane).to(ranks.device)).square().mean() for lane in range(2)) / 2).backward()
    whole = torch.cat([p.grad.flatten() for p in reference.parameters()])
    norm = clip_grad_norm_(model, Groups(dp=dist.group.WORLD), 1e-3, norm_type=norm_type)
    assert norm.item() == pytest.approx(torch.linalg.vector_norm(whole, norm_type).item(), rel=1e-12)
    scale = (1e-3 / (norm + 1e-6)).item()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad * scale, rtol=1e-10, atol=1e-15)
    assert LossScaler().unscale(model)


@pytest.mark.ranks(3)
def test_a_module_of_dtensors_is_clipped_with_a_module_of_tensors_on_other_ranks(ranks):
    """Ranks 0-1 share a module over tp; rank 2 has another. Each counts what it holds, once."""
    group = dist.new_group([0, 1])
    gradient = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(4, 2)
    expected = (3 * gradient.square().sum()).sqrt().item()
    if ranks.rank < 2:
        mesh = dist.device_mesh.DeviceMesh.from_group(group, ranks.device.type)
        module = nn.ParameterDict()
        for name, placement in {"sharded": Shard(0), "whole": Replicate()}.items():
            module[name] = nn.Parameter(distribute_tensor(torch.zeros(4, 2, dtype=torch.float64), mesh, [placement]))
            module[name].grad = distribute_tensor(gradient, mesh, [placement])
        collection = Groups(tp=group)
    else:
        module = nn.ParameterDict({"w": nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))}).to(ranks.device)
        module["w"].grad = gradient.to(ranks.device, copy=True)
        collection = Groups()
    norm = clip_grad_norm_(module, collection, 1.0)
    assert norm.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.ranks(2)
def test_a_dtensor_over_tp_is_reduced_over_its_replicas(ranks):
    """One tp rank for each of two replicas: the mesh has no lane but its own."""
    mine = [dist.new_group([rank]) for rank in range(2)][ranks.rank]
    mesh = dist.device_mesh.DeviceMesh.from_group(mine, ranks.device.type)
    module = nn.ParameterDict({"w": nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))})
    module["w"].grad = distribute_tensor(torch.full((4,), 1.0 + ranks.rank), mesh, [Shard(0)])
    reduce_gradients(module, Groups(dp=dist.group.WORLD))
    assert torch.equal(module["w"].grad.to_local().cpu(), torch.full((4,), 1.5))
    module["w"].grad = None if ranks.rank else distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    reduce_gradients(module, Groups(dp=dist.group.WORLD))
    assert isinstance(module["w"].grad, DTensor)
    assert torch.equal(module["w"].grad.to_local().cpu(), torch.full((4,), 0.5))


@pytest.mark.ranks(2)
def test_what_a_dtensor_cannot_be_is_an_error(ranks):
    mesh = init_device_mesh(ranks.device.type, (2,))
    module = nn.ParameterDict({"w": nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))})
    module["w"].grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(GradientError, match="a DTensor over 2 replicas, and not by fully_shard"):
        reduce_gradients(module, Groups(dp=dist.group.WORLD))
    mesh = init_device_mesh(ranks.device.type, (1, 2))  # one of whose dims is enough
    partial = nn.ParameterDict({"w": nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()] * 2))})
    partial["w"].grad = DTensor.from_local(torch.ones(4, device=ranks.device), mesh, [Replicate(), Partial()])
    with pytest.raises(GradientError, match="of which a norm needs the sum: call reduce_gradients first"):
        clip_grad_norm_(partial, Groups(tp=dist.group.WORLD), 1.0)


class Halved(torch.autograd.Function):
    """What sequence parallelism does to a norm: each tp rank computes on its half of the sequence."""

    @staticmethod
    def forward(ctx, x, half):
        ctx.half, ctx.shape = half, x.shape
        return x.chunk(2)[half].clone()

    @staticmethod
    def backward(ctx, gradient):
        whole = gradient.new_zeros(ctx.shape)
        whole.chunk(2)[ctx.half].copy_(gradient)
        return whole, None


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mark", ["sequence_parallel", "partial_over_tp"])
def test_marked_parameters_are_summed_over_tensor_parallel_ranks(ranks, mark):
    """tp 2 x dp 2: gradient and norm of one process; without the mark, tp ranks hold halves and drift apart."""
    tps = [dist.new_group(r) for r in ([0, 1], [2, 3])]
    dps = [dist.new_group(r) for r in ([0, 2], [1, 3])]
    tp, lane = ranks.rank % 2, ranks.rank // 2
    groups = Groups(dp=dps[tp], tp=tps[lane])

    def data(lane):
        return torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(lane)).to(ranks.device)

    def model():
        return nn.LayerNorm(3).double().to(ranks.device)

    def loss(norm, x):
        return (norm(x) ** 3).sum() / 6

    for marked in (False, True):
        part = model()
        for parameter in part.parameters():
            setattr(parameter, mark, marked)
        loss(part, Halved.apply(data(lane), tp)).backward()
        reduce_gradients(part, groups)
        if marked:
            require_equal_replicas(part, groups)
        else:
            with pytest.raises(ReplicaError, match=r"ranks \[\d, \d\] .* gradient of weight by .*partial_over_tp"):
                require_equal_replicas(part, groups)
    whole = model()
    (sum(loss(whole, data(lane)) for lane in range(2)) / 2).backward()
    for mine, other in zip(part.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-14)
    expected = torch.cat([p.grad.flatten() for p in whole.parameters()]).norm()
    torch.testing.assert_close(clip_grad_norm_(part, groups, 1.0), expected, rtol=1e-12, atol=0.0)


@pytest.mark.ranks(2)
def test_a_mark_that_cannot_be_obeyed_is_an_error(ranks):
    module = nn.Linear(2, 2)
    module.weight.sequence_parallel = True
    with pytest.raises(GradientError, match=r"shape \(2, 2\) .* is marked as partial over tp .* has no tp group"):
        reduce_gradients(module, Groups())
    module.weight.tensor_model_parallel = True
    with pytest.raises(GradientError, match="marked as partial over tp .*, and as tensor_model_parallel;"):
        reduce_gradients(module, Groups(tp=dist.group.WORLD))
    with pytest.raises(GradientError, match="nothing sums it over tp"):
        gradient_policy(
            models={0: module},
            config=PipelineConfig(),
            communicator=None,
            graph=ModuleGraph({"model": 1}),
            pg_collection=None,
        )


@pytest.mark.ranks(2)
def test_replicas_that_differ_after_a_step_are_found_on_every_rank(ranks):
    module = two_layers().to(ranks.device)
    require_equal_replicas({"net": module}, Groups(dp=dist.group.WORLD))
    with torch.no_grad():
        module[1].bias.add_(float(ranks.rank))
    with pytest.raises(ReplicaError, match=r"ranks \[0, 1\] .* the parameter of net\.1\.bias by "):
        require_equal_replicas({"net": module}, Groups(dp=dist.group.WORLD))


@pytest.mark.ranks(2)
def test_a_job_of_several_modules_says_whose_lanes_the_loss_has(ranks):
    """Each module's own lanes would be wrong by their ratio to the loss side's."""
    module = two_layers()
    with pytest.raises(GradientError, match="loss_lanes is not given, and the job has several modules"):
        reduce_gradients({"images": module}, {"images": Groups(dp=dist.group.WORLD)})
    reduce_gradients({"images": module}, {"images": Groups(dp=dist.group.WORLD)}, loss_lanes=1)


@pytest.mark.ranks(2)
def test_a_reduction_that_a_rank_does_not_join_ends_with_the_deadline(ranks):
    summed, normed = dist.new_group([0, 1]), dist.new_group([0, 1])  # each is cut when it is late
    if ranks.rank == 0:
        module = two_layers()
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        for call in (
            lambda: reduce_gradients(module, Groups(dp=summed), deadline=0.3),
            lambda: clip_grad_norm_(module, Groups(), 1.0, job_group=normed, deadline=0.3),
        ):
            with pytest.raises(CollectiveFailedError, match="did not end within the deadline of 0.3 s"):
                call()
    dist.barrier()


@pytest.mark.ranks(1)
def test_foreach_operations_are_those_of_torch(ranks):
    """Pins what torch does not document: mixed dtypes, scalar tensors, the dtype of norms."""

    def tensors():
        torch.manual_seed(0)
        return [torch.randn(4, dtype=dtype) * 3 for dtype in (torch.float64, torch.float32, torch.bfloat16)]

    for order in (1.0, 2.0, 3.5, float("inf")):
        expected = [torch.linalg.vector_norm(t, order, dtype=torch.float64) for t in tensors()]
        torch.testing.assert_close(foreach.norms(tensors(), order), torch.stack(expected), rtol=1e-12, atol=0.0)
    assert foreach.norms([torch.full((4,), 6e4, dtype=torch.float16)], 2.0).item() == pytest.approx(1.2e5, rel=1e-3)
    assert foreach.norms([torch.tensor([1.0, float("nan")])], float("inf")).isnan().all()
    for factor in (0.5, torch.tensor(0.5, dtype=torch.float64)):
        scaled = tensors()
        foreach.scale_(scaled, factor)
        assert all(torch.equal(a, b * 0.5) for a, b in zip(scaled, tensors(), strict=True))
    for divisor in (3, torch.tensor(3.0, dtype=torch.float64)):
        divided = tensors()
        foreach.divide_(divided, divisor)
        for mine, other in zip(divided, tensors(), strict=True):
            assert torch.equal(mine, (other.float() / 3).to(other.dtype) if other.itemsize < 8 else other / 3)
    added, copied = tensors(), tensors()
    foreach.add_(added, tensors())
    foreach.copy_(copied, added)
    assert all(torch.equal(a, b * 2) for a, b in zip(copied, tensors(), strict=True))
    value = torch.ones(2)
    all_reduce(value, None)(Waiting())
    assert torch.equal(value, torch.ones(2))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mark", ["allreduce", "expert"])
def test_experts_are_summed_over_lanes_of_their_own_and_counted_once(ranks, mark):
    """Four replicas, two expert-parallel ranks: the expert of a rank has seen the tokens of its pair."""
    pairs = [dist.new_group(r) for r in ([0, 2], [1, 3])]  # replicas of an expert
    expert, pair = ranks.rank % 2, ranks.rank // 2
    groups = ProcessGroupCollection(dp=dist.group.WORLD, expt_dp=pairs[expert])
    held = nn.ParameterDict({name: nn.Parameter(torch.zeros(3, dtype=torch.float64)) for name in ("dense", "expert")})
    held["dense"].grad = torch.full((3,), 1.0 + ranks.rank, dtype=torch.float64)
    held["expert"].grad = torch.full((3,), 10.0 * (1 + expert) + pair, dtype=torch.float64)
    setattr(held["expert"], mark, mark == "expert")
    held.to(ranks.device)
    reduce_gradients(held, groups)
    assert torch.equal(held["dense"].grad.cpu(), torch.full((3,), (1 + 2 + 3 + 4) / 4, dtype=torch.float64))
    experts = [(20.0 * (1 + one) + 1) / 4 for one in range(2)]
    assert torch.equal(held["expert"].grad.cpu(), torch.full((3,), experts[expert], dtype=torch.float64))
    require_equal_replicas(held, groups)
    norm = clip_grad_norm_(held, groups, 1e9)
    assert norm.item() == pytest.approx((3 * (2.5**2 + experts[0] ** 2 + experts[1] ** 2)) ** 0.5, rel=1e-12)
    with pytest.raises(GradientError, match="is an expert's .* no expt_dp group to sum it over"):
        reduce_gradients(held, Groups(dp=dist.group.WORLD))
