"""Gradients beside the schedule: sums over unequal replicas, and one norm for the job."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autograd_kit.blocks import two_layers
from autograd_kit.gradients import assert_same_bits
from pipegrid.gradients.all_reduce import all_reduce, reduce_few
from pipegrid.gradients.clip import clip_grad_norm_
from pipegrid.gradients.reduction.buckets import Bucket
from pipegrid.gradients.reduction.reduce import GradientError, GradientReduction, reduce_gradients
from pipegrid.monitor.collectives import Waiting
from plan_kit.groups import Groups


def fill(module, value):
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, value + number)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6])
def test_the_sum_over_lanes_is_divided_by_the_lanes_of_the_loss(ranks, bucket_bytes):
    group = dist.group.WORLD
    module = two_layers()
    fill(module, float(ranks.rank))
    reduce_gradients(module, Groups(dp=group), loss_lanes=2, bucket_bytes=bucket_bytes)
    for number, parameter in enumerate(module.parameters()):
        assert torch.equal(parameter.grad, torch.full_like(parameter, (0 + 1 + 2 + 3 * number) / 2))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX], ids=["sum", "max"])
def test_a_few_numbers_are_reduced_as_an_all_reduce_does(ranks, op):
    for group in (None, dist.group.WORLD):
        numbers = torch.tensor([[0.1, -2.0], [3.0 * ranks.rank, math.inf]], dtype=torch.float64)
        expected = numbers.clone()
        for reduce, tensor in ((reduce_few, numbers), (all_reduce, expected)):
            reduce(tensor, group, op)(Waiting())
        torch.testing.assert_close(numbers, expected, rtol=1e-15, atol=0.0)
    whole = torch.full((), ranks.rank + 1)
    reduce_few(whole, None, op)(Waiting())
    assert whole.item() == (6 if op == dist.ReduceOp.SUM else 3)
    number = torch.tensor([math.nan if ranks.rank == 1 else 1.0])
    reduce_few(number, None, op)(Waiting())
    assert number.isnan()


@pytest.mark.ranks(2)
def test_by_default_a_mean_over_the_modules_own_lanes(ranks):
    module = two_layers()
    fill(module, float(ranks.rank))
    reduce_gradients([module], Groups(dp_cp=dist.group.WORLD))
    assert torch.equal(module[0].weight.grad, torch.full_like(module[0].weight, 0.5))


@pytest.mark.ranks(3)
def test_token_weighted_gradients_are_divided_by_the_tokens_of_the_job(ranks):
    module = two_layers()
    fill(module, 6.0)
    reduce_gradients({"a": module}, {"a": Groups()}, num_tokens=torch.tensor([3, 0, 9][ranks.rank]))
    assert torch.equal(module[0].weight.grad, torch.full_like(module[0].weight, 6.0 / 12))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("counted", "total"),
    [
        ((torch.tensor(0.9), 0, torch.tensor(0.9, dtype=torch.float64)), 0.9 + torch.tensor(0.9).double().item()),
        ((0.125, 0, 0.25), 0.375),
        ((2**53 - 2, 0, 1), 2**53 - 1),
        ((0, 0, 0), 1),
    ],
)
def test_tokens_may_be_weighed_and_whole_ones_are_counted_exactly(ranks, counted, total):
    """The rank without a loss counts 0 whole tokens, not knowing that the others weigh theirs."""
    module = two_layers()
    fill(module, 6.0)
    reduce_gradients(module, Groups(), num_tokens=counted[ranks.rank])
    assert torch.equal(module[0].weight.grad, torch.full_like(module[0].weight, 6.0) / total)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_gradients_are_divided_by_more_tokens_than_their_type_can_hold(ranks, dtype):
    module = two_layers().to(dtype)
    fill(module, 1000.0)
    reduce_gradients(module, Groups(dp=dist.group.WORLD), num_tokens=50_001)
    expected = torch.full_like(module[0].weight, 0.0, dtype=torch.float64) + 2000.0 / 100_002
    assert torch.equal(module[0].weight.grad, expected.to(dtype))


@pytest.mark.ranks(2)
def test_a_gradient_on_one_lane_only_counts_as_zero_on_the_other(ranks):
    module = two_layers()
    if ranks.rank == 1:
        module[0].weight.grad = torch.ones_like(module[0].weight)
    reduce_gradients(module, Groups(dp=dist.group.WORLD), loss_lanes=1)
    assert torch.equal(module[0].weight.grad, torch.ones_like(module[0].weight))
    assert module[1].weight.grad is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("held", ["both", "one", "transposed"])
def test_a_large_gradient_is_summed_where_it_is(ranks, held):
    weight = nn.Parameter(torch.zeros(512, 512))  # 1 MB
    module = nn.ParameterList([weight, nn.Parameter(torch.zeros(512, 512)), nn.Parameter(torch.zeros(3))])
    values = torch.arange(512.0 * 512).view(512, 512)
    if held != "one" or ranks.rank == 1:
        weight.grad = values.clone().t() if held == "transposed" else values.clone()
    module[2].grad = torch.full((3,), 2.0 * ranks.rank)
    before = None if weight.grad is None else weight.grad.data_ptr()
    reduction = GradientReduction.of(module, Groups(dp=dist.group.WORLD), loss_lanes=4, bucket_bytes=2**20)
    reduction.ready(module)
    (summed,) = (bucket.values for bucket in reduction.buckets if bucket.parameters[0] is weight)
    assert (summed.data_ptr() == before) == (held == "both" or (held == "one" and ranks.rank == 1))
    reduction.finish(None, Waiting(20.0))
    whole = values.t() if held == "transposed" else values
    assert torch.equal(weight.grad, whole * (1 if held == "one" else 2) / 4)
    assert before in (None, weight.grad.data_ptr())
    assert module[1].grad is None
    assert module[2].grad.tolist() == [0.5] * 3


@pytest.mark.ranks(2)
def test_gradients_that_become_whole_one_by_one_cost_one_look_at_each_bucket(ranks, monkeypatch):
    module = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(60)])
    reduction = GradientReduction.of(module, Groups(dp=dist.group.WORLD), bucket_bytes=40)
    looks = []
    fault = Bucket.fault
    monkeypatch.setattr(Bucket, "fault", lambda bucket: looks.append(bucket) or fault(bucket))
    for parameter in reversed(module):
        parameter.grad = torch.ones(2)
        reduction.ready([parameter])
        reduction.ready([parameter])  # again, with the whole stage
    assert len(reduction.buckets) == 12
    assert looks == list(reduction.buckets)
    assert all(bucket.started for bucket in reduction.buckets)
    reduction.finish(None, Waiting(20.0))
    assert all(parameter.grad.tolist() == [1.0, 1.0] for parameter in module)


@pytest.mark.ranks(2)
def test_buckets_of_a_group_start_in_one_order_whichever_fills_up_first(ranks):
    module = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
    fill(module, 1.0)
    reduction = GradientReduction.of(module, Groups(dp=dist.group.WORLD), bucket_bytes=1)
    filled = reduction.buckets if ranks.rank else reduction.buckets[::-1]
    for count, bucket in enumerate(filled, start=1):
        reduction.ready(bucket.parameters)
        started = [each.started for each in reduction.buckets]
        assert sum(started) == (count if ranks.rank else 3 * (count == 3))
    reduction.finish(None, Waiting(20.0))
    assert [parameter.grad.tolist() for parameter in module] == [[1.0 + number] * 2 for number in range(3)]


@pytest.mark.ranks(4)
def test_the_norm_counts_replicas_once_and_is_the_same_everywhere(ranks):
    """Ranks 0-1: two lanes of one module. Ranks 2-3: two tp ranks of another, one weight sharded, one not."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(1)
    first, replicated, shards = (torch.randn(5, dtype=torch.float64) for _ in range(3))
    shards = torch.stack((shards, shards * 2))
    module = nn.ParameterDict({"w": nn.Parameter(torch.zeros(5, dtype=torch.float64))})
    if ranks.rank < 2:
        module["w"].grad = first.clone()
        collection = Groups(dp=groups[0])
    else:
        module["s"] = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        module["s"].tensor_model_parallel = True
        module["w"].grad = replicated.clone()
        module["s"].grad = shards[ranks.rank - 2].clone()
        collection = Groups(tp=groups[1])
    expected = torch.cat((first, replicated, shards.flatten())).norm()
    norm = clip_grad_norm_(module, collection, max_norm=0.5)
    assert torch.allclose(norm, expected, rtol=1e-14)
    before = first if ranks.rank < 2 else replicated
    assert torch.allclose(module["w"].grad, before * (0.5 / (expected + 1e-6)), rtol=1e-14)


@pytest.mark.ranks(2)
def test_a_tied_copy_is_not_counted_but_clipped(ranks):
    module = two_layers()
    fill(module, 1.0)
    if ranks.rank == 1:
        for parameter in module.parameters():
            parameter.tied_replica = True
    expected = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
    assert torch.allclose(clip_grad_norm_(module, Groups(), 1.0), expected)
    assert torch.cat([p.grad.flatten() for p in module.parameters()]).norm() < 1.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms_below_the_bound_leave_gradients_alone(ranks, norm_type):
    module = two_layers()
    fill(module, 0.25 * (1 + ranks.rank))
    kept = [p.grad.clone() for p in module.parameters()]
    both = torch.cat([g.flatten() for g in kept])
    gathered = [torch.empty_like(both) for _ in range(2)]
    dist.all_gather(gathered, both)
    norm = clip_grad_norm_(module, Groups(), 1e6, norm_type=norm_type)
    assert torch.allclose(norm, torch.linalg.vector_norm(torch.cat(gathered), norm_type))
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), kept, strict=True))


@pytest.mark.parametrize("value", [2.0, float("nan"), float("inf")])
def test_an_infinite_bound_measures_and_writes_nothing(value):
    module = two_layers()
    fill(module, value)
    kept = [(p.grad, p.grad._version, p.grad.clone()) for p in module.parameters()]
    norm = clip_grad_norm_(module, Groups(), math.inf)
    assert torch.isfinite(norm) == math.isfinite(value)
    for parameter, (gradient, writes, copy) in zip(module.parameters(), kept, strict=True):
        assert parameter.grad is gradient
        assert gradient._version == writes
        assert torch.equal(gradient.nan_to_num(), copy.nan_to_num())


def test_what_cannot_be_reduced_is_named():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(GradientError, match=r"shape \(4, 2\) in module 'e' has a sparse gradient"):
        reduce_gradients({"e": embedding}, {"e": Groups()}, loss_lanes=1)
    with pytest.raises(GradientError, match=r"no process groups for module 'x'; there are collections for \['e'\]"):
        reduce_gradients({"x": two_layers()}, {"e": Groups()})
    for value in (0, -1.0, math.nan, "one"):
        with pytest.raises(GradientError, match="norm_type is .*; it must be a number above 0"):
            clip_grad_norm_(two_layers(), Groups(), 1.0, norm_type=value)
    for name in ("loss_lanes", "bucket_bytes"):
        with pytest.raises(GradientError, match=f"{name} is 0; it must be an integer of at least 1"):
            reduce_gradients(two_layers(), Groups(), **{name: 0})
    with pytest.raises(GradientError, match="num_tokens is -1; it must be a finite number of at least 0"):
        reduce_gradients(two_layers(), Groups(), num_tokens=-1)
    with pytest.raises(GradientError, match="max_norm is 0; it must be a number above 0, or infinity"):
        clip_grad_norm_(two_layers(), Groups(), 0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_one_norm_over_several_modules_on_overlapping_ranks(ranks, norm_type):
    """An encoder on ranks 0-1 (two lanes), a language model on 0-3 (tp 2 x dp 2), a module that two names share."""
    encoder_dp = dist.new_group([0, 1])
    tps, dps = [dist.new_group(r) for r in ([0, 1], [2, 3])], [dist.new_group(r) for r in ([0, 2], [1, 3])]
    collections = {"language": Groups(tp=tps[ranks.rank // 2], dp=dps[ranks.rank % 2])}
    parts = {name: torch.randn(7, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate("ews")}

    def holding(**gradients):
        module = nn.ParameterDict({name: nn.Parameter(torch.zeros(7)) for name in gradients})
        for name, gradient in gradients.items():
            module[name].grad = gradient.clone()
        return module

    shard = parts["s"] * (1 + ranks.rank % 2)
    modules = {"language": holding(w=parts["w"], s=shard)}
    modules["language"]["s"].tensor_model_parallel = True
    if ranks.rank < 2:
        collections |= {"encoder": Groups(dp=encoder_dp), "again": Groups()}
        modules |= {"encoder": holding(e=parts["e"])}
        modules["again"] = modules["encoder"]
    everything = torch.cat([parts["e"], parts["w"], parts["s"], 2 * parts["s"]]).double()
    expected = torch.linalg.vector_norm(everything, norm_type)
    norm = clip_grad_norm_(modules, collections, 1.0, norm_type=norm_type)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_same_bits(norm)
    assert torch.allclose(modules["language"]["s"].grad, shard / expected.float(), rtol=1e-5)
    again = clip_grad_norm_(modules, collections, 2.0, norm_type=norm_type)
    assert again.item() == pytest.approx(1.0, rel=1e-5)  # clipped once each, also where two names share a module


@pytest.mark.ranks(3)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_a_norm_that_is_not_finite_is_so_on_every_rank(ranks, norm_type):
    """A backend's maximum may drop a NaN, depending on the order in which it compares."""
    for value in (float("nan"), float("inf"), float("-inf")):
        for where in (0, 2):
            module = two_layers()
            fill(module, 1.0)
            if ranks.rank == where:
                module[0].weight.grad[1, 1] = value
            norm = clip_grad_norm_(module, Groups(), 1.0, norm_type=norm_type)
            assert not torch.isfinite(norm)
            assert torch.isnan(norm) == math.isnan(value)
            assert_same_bits(norm)


@pytest.mark.ranks(3)
def test_the_same_norm_to_the_bit_however_uneven_the_parts(ranks):
    torch.manual_seed(ranks.rank)
    module = nn.ParameterDict({str(i): nn.Parameter(torch.zeros(3 + i)) for i in range(2 * ranks.rank)})
    for parameter in module.values():
        parameter.grad = torch.randn_like(parameter) * 10.0 ** (6 * ranks.rank - 6)
    kept = [parameter.grad.clone() for parameter in module.values()]
    norm = clip_grad_norm_(module, Groups(), 1e-3)
    assert_same_bits(norm)
    scale = (1e-3 / (norm + 1e-6)).float()
    assert all(torch.equal(p.grad, g * scale) for p, g in zip(module.values(), kept, strict=True))


@pytest.mark.ranks(2)
def test_what_cannot_be_reduced_is_refused_before_tokens_are_counted(ranks):
    """Counting is a collective: rank 0, which fails alone, must not wait for rank 1 in it."""
    module = nn.Embedding(4, 2, sparse=True)
    module(torch.tensor([1])).sum().backward()
    if ranks.rank == 0:
        with pytest.raises(GradientError, match="sparse gradient"):
            reduce_gradients(module, Groups(), num_tokens=3)
