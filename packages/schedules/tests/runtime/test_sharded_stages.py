"""Stages sharded by ``fully_shard``, gathered and reduced where the plan says: the gradients of one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from autograd_kit.blocks import Residual
from autograd_kit.gradients import assert_same_gradients
from autograd_kit.operators import CountOps
from pipegrid.core.graph import ModuleGraph
from pipegrid.gradients import fresh_gradients, reduce_gradients
from pipegrid.schedules import (
    ActionKind,
    PipelineRuntime,
    Recorder,
    StepArgumentError,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    verify,
    zero_bubble_v,
)
from plan_kit.groups import Groups

from ..kit.hooks import Hook
from ..kit.models import WIDTH
from ..kit.stages import Function, stages_of

MICROBATCHES = 4


class Layer(Residual):
    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False) if self.checkpointed else super().forward(x)


def models(count, *, checkpointed=False):
    torch.manual_seed(0)
    return [nn.Sequential(*[Layer(checkpointed=checkpointed) for _ in range(2)]).double() for _ in range(count)]


def sample(microbatch, lane):
    generator = torch.Generator().manual_seed(10 * lane + microbatch)
    return torch.randn(2, WIDTH, dtype=torch.float64, generator=generator)


def weigh(lane, microbatch, output):
    """A sum over rows, of which lanes and microbatches count different numbers."""
    rows = 1 + (lane + microbatch) % 2
    return output[:rows].square().sum(), rows * (1 + lane)


def of_one_process(count):
    """The whole model with the summed gradients of both lanes, and what their losses count."""
    whole, tokens = nn.Sequential(*models(count)), 0
    for lane, microbatch in itertools.product(range(2), range(MICROBATCHES)):
        loss, own = weigh(lane, microbatch, whole(sample(microbatch, lane)))
        loss.backward()
        tokens += own
    return whole, tokens


PLANS = {
    "1f1b": (one_f_one_b(1, MICROBATCHES), 1),
    "interleaved": (interleaved_1f1b(1, MICROBATCHES, num_chunks=3), 3),
    "zero bubble v": (zero_bubble_v(1, MICROBATCHES), 2),
}


def stages_on(ranks, held, counted=None):
    """The stages of one position, with the data of this rank's lane; ``counted``: what their losses count is added."""

    def loss(output, microbatch):
        scalar, rows = weigh(ranks.rank, microbatch, output)
        if counted is not None:
            counted.append(rows)
        return scalar

    graph, data = ModuleGraph({"model": len(held)}), lambda microbatch: sample(microbatch, ranks.rank).to(ranks.device)
    return dict(enumerate(stages_of(graph, held, data=data, loss=loss)))


def sharded(ranks, count, *, checkpointed=False, **options):
    """The models of ``count`` stages, of which each layer and each stage is sharded."""
    mesh = init_device_mesh(ranks.device.type, (2,))
    held = [model.to(ranks.device) for model in models(count, checkpointed=checkpointed)]
    for model in held:
        for layer in model:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    return held


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "reduce", "checkpointed"),
    [
        ("1f1b", "step", False),
        ("interleaved", "microbatch", False),
        ("zero bubble v", "step", False),
        ("zero bubble v", "step", True),
        ("zero bubble v", "microbatch", False),
        pytest.param("interleaved", "step", True, marks=pytest.mark.nightly),
        pytest.param("1f1b", "microbatch", True, marks=pytest.mark.nightly),
    ],
)
def test_a_sharded_stage_has_the_gradients_of_one_process(ranks, name, reduce, checkpointed):
    """Per-token losses of unequal lanes, two steps and an evaluation between them."""
    computes, count = PLANS[name]
    held, tokens = sharded(ranks, count, checkpointed=checkpointed), []
    plan = lower(computes, shard=reduce, prefetch=0)
    runtime = PipelineRuntime(verify(plan, window=1), stages_on(ranks, held, tokens), None)
    every = nn.ModuleList(held)
    for step in range(3):
        with fresh_gradients(every), CountOps() as ops:
            if step == 1:
                runtime.eval()
                assert ops.count("reduce_scatter") == 0
                visits = sum(
                    a.kind is ActionKind.UNSHARD
                    for a in lower(forward_of(computes), shard="step", prefetch=0).actions(0)
                )
                assert ops.count("allgather") == 2 * visits, "those of an evaluation: two layers for each visit"
            else:
                runtime.step()
                actions = list(plan.actions(0))
                assert ops.count("allgather") == 2 * sum(action.kind is ActionKind.UNSHARD for action in actions)
                assert ops.count("reduce_scatter") == 2 * sum(
                    action.kind is ActionKind.REDUCE_GRAD for action in actions
                )
                reduce_gradients(every, Groups(dp=dist.group.WORLD), num_tokens=sum(tokens))
        tokens.clear()
    whole, rows = of_one_process(count)
    for mine, (where, other) in zip(every.parameters(), whole.named_parameters(), strict=True):
        found = mine.grad.full_tensor().cpu() / 2
        torch.testing.assert_close(found, other.grad / rows, rtol=1e-10, atol=1e-13, msg=where)


@pytest.mark.ranks(2)
def test_every_gather_and_reduction_of_a_stage_is_recorded(ranks):
    """All of them by their place in the plan, in a step, in an evaluation, and in the last of several."""
    computes, count = PLANS["interleaved"]
    plan = lower(computes, shard="microbatch", prefetch=0)
    recorder = Recorder()
    runtime = PipelineRuntime(verify(plan, window=1), stages_on(ranks, sharded(ranks, count)), None, hooks=[recorder])
    actions = list(plan.actions(0))
    assert len(set(actions)) < len(actions)
    for steps in (1, 2):
        recorder.start()
        for _ in range(steps):
            zero = recorder.now
            runtime.step()
        track = recorder.track(plan, rank=0, position=0)
        assert [entry.index for entry in track.actions] == list(range(len(actions)))
        starts = [entry.start for entry in track.actions]
        assert starts == sorted(starts)
        assert starts[0] >= zero
    recorder.start()
    runtime.eval()
    entries = recorder.track(plan, rank=0, position=0).actions
    recorded = [actions[entry.index] for entry in entries]
    assert [a for a in recorded if a.kind.is_compute] == [a for a in actions if a.kind is ActionKind.F]
    assert [entry.start for entry in entries] == sorted(entry.start for entry in entries)
    gathers = lower(forward_of(computes), shard="step", prefetch=0).actions(0)
    assert sum(a.kind is ActionKind.UNSHARD for a in recorded) == sum(a.kind is ActionKind.UNSHARD for a in gathers)


def forward_of(computes):
    """The forwards of a plan."""
    return evolve(
        computes,
        positions=[[step for step in steps if step.kind is ActionKind.F] for steps in computes.positions],
        forward_only=range(computes.num_stages),
    )


@pytest.mark.ranks(2)
def test_a_split_backward_of_a_stage_that_the_plan_reduces_computes_weights_at_w(ranks):
    held = sharded(ranks, 2)
    stages, seen = stages_on(ranks, held), []

    def after(action):
        if action.kind in (ActionKind.I, ActionKind.W):
            weight = next(parameter for name, parameter in held[action.stage].named_parameters() if "weight" in name)
            seen.append((action.kind, action.stage, weight.grad is not None))

    plan = lower(zero_bubble_v(1, 1), shard="step")
    PipelineRuntime(plan, stages, None, hooks=[Hook(after=after)]).step()
    assert (ActionKind.I, 1, False) in seen, "no weight gradient at I"
    assert all(has for kind, _, has in seen if kind is ActionKind.W)


@pytest.mark.ranks(2)
def test_a_gradient_that_one_replica_lacks_is_reduced_on_all(ranks):
    """Without it the lane that has a gradient would wait for ever."""
    held = sharded(ranks, 1)
    if not hasattr(held[0], "set_reduce_scatter_unused_params"):
        pytest.skip("this torch has no set_reduce_scatter_unused_params")
    whole = models(1)[0]

    def choose(microbatch):
        x = sample(microbatch, ranks.rank).to(ranks.device)
        loss = held[0][ranks.rank](x).square().sum()
        return held[0](x).sum() * 0 + loss if ranks.rank == 0 else loss

    stages = {0: Function(ModuleGraph({"model": 1}), 0, choose, held[0])}
    held[0](sample(0, 0).to(ranks.device))  # the root's first forward
    PipelineRuntime(lower(one_f_one_b(1, 1), shard="step"), stages, None).step()
    (whole[0](sample(0, 0)).square().sum() / 2).backward()
    (whole[1](sample(0, 1)).square().sum() / 2).backward()
    assert_same_gradients(held[0], whole, rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(2)
def test_low_precision_gradients_are_accumulated_in_the_dtype_of_the_reduction(ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    held = sharded(ranks, 2, mp_policy=policy)
    PipelineRuntime(lower(zero_bubble_v(1, MICROBATCHES), shard="step"), stages_on(ranks, held), None).step()
    whole, _ = of_one_process(2)
    for mine, other in zip(nn.ModuleList(held).parameters(), whole.parameters(), strict=True):
        assert mine.grad.dtype == torch.float64
        mean = other.grad / 2
        difference = (mine.grad.full_tensor().cpu() - mean).norm() / mean.norm().clamp(min=1e-2)
        assert difference < 0.03


@pytest.mark.ranks(2)
def test_after_a_step_fsdp2_rules_again(ranks):
    held = sharded(ranks, 1)
    runtime = PipelineRuntime(lower(one_f_one_b(1, 2), shard="step"), stages_on(ranks, held), None)
    runtime.step()
    before = [parameter.grad.full_tensor().clone() for parameter in held[0].parameters()]
    assert all(hasattr(parameter, "device_mesh") for parameter in held[0].parameters()), "freed"
    held[0](sample(0, ranks.rank).to(ranks.device)).square().sum().backward()
    assert all(hasattr(parameter, "device_mesh") for parameter in held[0].parameters()), "freed by FSDP2"
    after = [parameter.grad.full_tensor() for parameter in held[0].parameters()]
    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True)), "reduced by FSDP2"
    assert isinstance(held[0], FSDPModule)


@pytest.mark.ranks(1)
def test_a_plan_that_gathers_what_is_not_sharded_is_an_error(ranks):
    held = models(1)
    runtime = PipelineRuntime(lower(one_f_one_b(1, 1), shard="step"), stages_on(ranks, held), None)
    with pytest.raises(StepArgumentError, match=r"gathers the parameters of stage 0 \(0UNSHARD\), and nothing in the"):
        runtime.step()
