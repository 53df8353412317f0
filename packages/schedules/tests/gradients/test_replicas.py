"""Replicas before the first step: their parameters, by checksum, and the groups that sum their gradients."""

from __future__ import annotations

import copy
import itertools
import struct
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pipegrid.gradients import (
    GradientError,
    ReplicaError,
    clip_grad_norm_,
    reduce_gradients,
    require_equal_replicas,
)
from pipegrid.gradients.reduction.replicas import require_equal_parameters
from pipegrid.schedules import PipelineConfig, PipelineError
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.transport.collectives.checksum import checksums

from ..kit.models import call

CPU = torch.device("cpu")


def by_definition(tensor):
    """The formula of `checksums`, on integers of any size."""
    content = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    content += bytes(-len(content) % 8)
    words = struct.unpack(f"<{len(content) // 8}q", content)
    numbers = torch.Generator().manual_seed(0x9E3779B9)
    factors = (torch.randint(-(2**62), 2**62, (4096,), generator=numbers) * 2 + 1).tolist()
    total = 0
    for row, start in enumerate(range(0, len(words), 4096)):
        part = sum(a * (w ^ (w >> 32)) for a, w in zip(factors, words[start : start + 4096], strict=False))
        total += (2 * row + 1) * 0x9E3779B97F4A7C15 * part
    return total % 2**64


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int8, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 4096, 70_001])
def test_a_checksum_is_that_of_its_definition(dtype, count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).mul(40).to(dtype)
    found = checksums([values, values[1:], values.reshape(1, -1).expand(3, -1)[1]], CPU)  # the second is not aligned
    expected = [by_definition(values), by_definition(values[1:]) if count > 1 else 0, by_definition(values)]
    assert [each % 2**64 for each in found.tolist()] == expected


def test_changes_that_a_sum_does_not_see_change_a_checksum():
    base = torch.arange(1.0, 20_001.0)
    swapped, moved, negated, zeros = base.clone(), base.roll(4096 * 2), base.clone(), torch.zeros_like(base)
    swapped[[0, 9999]] = swapped[[9999, 0]]
    negated[1:4:2] *= -1  # the top bits of two words
    found = checksums([base, swapped, moved, negated, zeros, -zeros, base.double().negative()], CPU).tolist()
    assert len(set(found)) == len(found)
    pairs = itertools.combinations([torch.full((n,), value) for n in (2, 4096, 8192) for value in (0.0, 1.0, 2.0)], 2)
    assert all(len(set(checksums(pair, CPU).tolist())) == 2 for pair in pairs if len(pair[0]) == len(pair[1]))


def test_a_tensor_inside_of_another_is_read_there_and_one_without_values_is_not():
    class Wrapped(torch.Tensor):
        """As the fp8 weights of other libraries: two tensors that look like one."""

        @staticmethod
        def __new__(cls, inner, scale):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

        def __init__(self, inner, scale):
            self.inner, self.scale = inner, scale

        def __tensor_flatten__(self):
            return ["inner", "scale"], None

        @classmethod
        def __torch_dispatch__(cls, function, *_):
            raise AssertionError(f"{function} on the outer tensor")

    inner, scale = torch.arange(4, dtype=torch.int8), torch.ones(1)
    first, second, third, absent = checksums(
        [Wrapped(inner, scale), Wrapped(inner, scale), Wrapped(inner, 2 * scale), torch.empty(3, device="meta")], CPU
    ).tolist()
    assert first == second != third
    assert absent == 0


class Model(nn.Sequential):
    def __init__(self, config, seed):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(3, 4), nn.Linear(4, 2))
        self.config, self.calls = config, 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def step(model, collection, *, per_token=False):
    def forward(iterator, model):
        y = model(torch.ones(5, 3)).square()
        return y, lambda y: (y.sum(), torch.tensor(y.numel()), None) if per_token else (y.mean(), None)

    return call(model=model, count=2, forward_step_func=forward, pg_collection=collection)


@pytest.mark.ranks(2)
def test_replicas_made_with_other_seeds_are_an_error_of_every_rank_before_the_first_forward(ranks):
    grid = HyperCommGrid([2], ["dp"])
    grid.create_pgs(["dp"])
    model = Model(PipelineConfig(), seed=ranks.rank)
    model[0].weight.requires_grad_(False).fill_(1.0)  # frozen parameters are compared as well
    with pytest.raises(PipelineError, match="ReplicaError") as caught:
        step(model, ProcessGroupCollection.from_grid(grid))
    assert isinstance(caught.value.__cause__, ReplicaError)
    text = str(caught.value.__cause__)
    assert "module 'model' start with different parameters, 3 of 4; the first is 0.bias" in text
    assert all(f"rank {rank}: " in text for rank in range(2))
    assert len(text.splitlines()) <= 10
    assert model.calls == 0
    frozen = Model(PipelineConfig(), seed=0)
    frozen[1].weight.requires_grad_(False).add_(ranks.rank)
    with pytest.raises(PipelineError, match=r"1 of 4; the first is 1\.weight"):
        step(frozen, ProcessGroupCollection.from_grid(grid))


@pytest.mark.ranks(2)
def test_equal_replicas_train_and_later_steps_compare_nothing(ranks):
    grid = HyperCommGrid([2], ["dp"])
    grid.create_pgs(["dp"])
    groups = ProcessGroupCollection.from_grid(grid)
    model = Model(PipelineConfig(), seed=0)
    model.register_buffer("lane", torch.tensor(ranks.rank))  # buffers differ by design
    step(model, groups)
    with torch.no_grad():
        model[0].weight.add_(ranks.rank)
    step(model, groups)
    assert model.calls == 4
    apart = Model(PipelineConfig(check_replicas=None), seed=ranks.rank)
    step(apart, groups)
    assert apart.calls == 2


@pytest.mark.ranks(2)
def test_of_a_module_with_several_stages_here_the_parameters_of_each_are_compared(ranks):
    stages = [nn.Linear(1, 1), nn.Linear(1, 1)]  # of one module, with parameters of the same names
    for stage in stages:
        for parameter in stage.parameters():
            parameter.data.fill_(1.0)
    groups = SimpleNamespace(dp=dist.group.WORLD)
    require_equal_parameters({"net": stages}, groups)
    stages[0].weight.data.add_(ranks.rank)
    with pytest.raises(ReplicaError, match=r"1 of 4; the first is 0\.weight"):
        require_equal_parameters({"net": stages}, groups)
    with pytest.raises(ReplicaError, match=r"the parameter of net\.0\.weight by 1"):
        require_equal_replicas({"net": stages}, groups)


@pytest.mark.ranks(4)
def test_of_tensor_parallel_ranks_those_parameters_are_compared_that_are_known_to_be_whole(ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    lane, place = ranks.rank // 2, ranks.rank % 2
    groups = SimpleNamespace(dp=mesh.get_group("dp"), tp=mesh.get_group("tp"))
    whole = torch.arange(12.0).reshape(4, 3)
    model = nn.ParameterDict(
        {
            "rows": distribute_tensor(whole.clone(), mesh["tp"], [Shard(0)]),
            "norm": distribute_tensor(torch.ones(3), mesh["tp"], [Replicate()]),
            "own": nn.Parameter(torch.full((2,), float(place))),  # a shard that no mark tells from a replica
            "gain": nn.Parameter(torch.ones(2)),
        }
    )
    model["gain"].sequence_parallel = True

    def found(change=None):
        changed = copy.deepcopy(model)
        changed["gain"].sequence_parallel = True
        with torch.no_grad():
            if change is not None:
                change(changed)
        try:
            require_equal_parameters({"net": [changed]}, groups)
        except ReplicaError as error:
            return str(error)
        return None

    assert found() is None
    shard = found(lambda m: m["rows"].to_local()[0, 0].add_(lane if place == 1 else 0))
    assert (shard is None) == (place == 0)  # by the replicas of that shard alone
    if shard is not None:
        assert "the first is rows" in shard
        assert all(f"rank {rank}: " in shard for rank in (1, 3))
    for name in ("norm", "gain"):
        local = (lambda m, name=name: m[name].to_local()) if name == "norm" else (lambda m, name=name: m[name])
        text = found(lambda m, local=local: local(m)[0].add_(place))
        assert f"the first is {name}" in text
        assert all(f"rank {2 * lane + other}: " in text for other in range(2))
    assert "the first is own" in found(lambda m: m["own"][0].add_(lane))


@pytest.mark.ranks(4)
def test_a_group_that_the_sizes_of_the_grid_demand_is_named(ranks):
    """Gradients would stay unsummed, or the norm count replicas twice, and nothing would say so."""
    grid = HyperCommGrid([2, 2], ["dp", "tp"])
    grid.create_pgs(["tp"])
    groups = ProcessGroupCollection.from_grid(grid)
    model = Model(PipelineConfig(), seed=0)
    lacks = (
        r"module '\w*' has a grid of dp 2 x tp 2, and its process groups lack \['dp'\].*grid\.create_pgs\(\['dp'\]\)"
    )
    for use in (
        lambda: step(model, groups),
        lambda: reduce_gradients(model, groups),
        lambda: clip_grad_norm_(model, groups, 1.0),
    ):
        with pytest.raises(GradientError, match=lacks):
            use()
    assert model.calls == 0
    step(model, SimpleNamespace(dp=None, tp=groups.tp))  # made by hand: the sizes are not known
    model.config = PipelineConfig(finalize_model_grads_func=lambda models, tokens, pg_collection: None)
    step(model, groups)  # the finalizer has groups of its own
    assert model.calls == 4


@pytest.mark.ranks(4)
def test_the_tp_group_is_demanded_where_something_is_counted_once_for_all_tp_ranks(ranks):
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    grid.create_pgs(["dp"])
    groups = ProcessGroupCollection.from_grid(grid)
    model = Model(PipelineConfig(), seed=0)
    step(model, groups)  # each tp rank's own gradients need no other
    with pytest.raises(GradientError, match=r"lack \['tp'\]"):
        clip_grad_norm_(model, groups, 1.0)
    tokens = Model(PipelineConfig(calculate_per_token_loss=True), seed=0)
    with pytest.raises(GradientError, match=r"lack \['tp'\]"):
        step(tokens, groups, per_token=True)
    for parameter in model.parameters():
        parameter.tensor_model_parallel = True
    clip_grad_norm_(model, groups, 1.0)


@pytest.mark.ranks(4)
def test_the_groups_of_context_parallelism_are_demanded_together(ranks):
    grid = HyperCommGrid([2, 2], ["cp", "dp"])
    grid.create_pgs(["dp"])
    groups = ProcessGroupCollection.from_grid(grid)
    with pytest.raises(GradientError, match=r"create_pgs\(\[\['dp', 'cp'\], 'cp'\]\)"):
        step(Model(PipelineConfig(), seed=0), groups)
    grid.create_pgs([["dp", "cp"], "cp"])
    step(Model(PipelineConfig(), seed=0), ProcessGroupCollection.from_grid(grid))
    assert dist.get_world_size() == 4
