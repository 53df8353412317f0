"""Gradients that accumulate in float32 beside half-precision parameters, through reduction and clipping."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.gradients.main_grad import accumulated, add_gradient, fresh_gradients
from pipegrid.gradients.reduction.tied import tie_parameters
from pipegrid.schedules import (
    GradientError,
    PipelineConfig,
    accumulate_in_main_grad,
    clip_grad_norm_,
    forward_backward_pipelining_without_interleaving,
    reduce_gradients,
    zero_main_grads,
)
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.transport import P2PCommunicator

from ..kit.models import Model, call

MICROBATCHES = 24


def model_of(dtype):
    torch.manual_seed(0)
    # The same bfloat16 values in every type, so that only the sums differ.
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(torch.bfloat16).to(dtype)


def microbatch(index):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(index)).to(torch.bfloat16)


def backward(model, index):
    dtype = next(model.parameters()).dtype
    (model(microbatch(index).to(dtype)).square().sum() / MICROBATCHES).backward()


def test_the_sum_is_that_of_float32_and_closer_than_bfloat16s_own():
    model, plain, exact = model_of(torch.bfloat16), model_of(torch.bfloat16), model_of(torch.float64)
    accumulate_in_main_grad(model)
    sums = [torch.zeros(p.shape) for p in model.parameters()]
    for index in range(MICROBATCHES):
        for each in (model, plain, exact):
            backward(each, index)
        single = model_of(torch.bfloat16)
        backward(single, index)
        for total, parameter in zip(sums, single.parameters(), strict=True):
            total += parameter.grad.float()
    rounded = widened = 0.0
    for ours, total, narrow, reference in zip(
        model.parameters(), sums, plain.parameters(), exact.parameters(), strict=True
    ):
        assert ours.grad is None
        assert ours.main_grad.dtype == torch.float32
        assert torch.equal(ours.main_grad, total)
        rounded += (narrow.grad.double() - reference.grad).norm().item() ** 2
        widened += (ours.main_grad.double() - reference.grad).norm().item() ** 2
    assert widened < rounded / 4


def test_gradients_go_back_to_grad_when_the_hooks_are_removed():
    model = model_of(torch.bfloat16)
    for handle in accumulate_in_main_grad(model):
        handle.remove()
    backward(model, 0)
    assert all(p.grad is not None and p.main_grad is None for p in model.parameters())


def test_zeroing_forgets_our_own_sums_and_clears_those_of_others():
    model = model_of(torch.bfloat16)
    accumulate_in_main_grad(model[0])
    buffer = torch.ones(3, 8)
    model[2].weight.main_grad = buffer
    backward(model, 0)
    model[2].weight.main_grad += 1
    zero_main_grads(model)
    assert model[0].weight.main_grad is None
    assert model[2].weight.main_grad is buffer
    assert not buffer.any()


def test_what_cannot_accumulate_is_named():
    model = model_of(torch.float32)
    with pytest.raises(GradientError, match=r"shape \(8, 6\) is torch.float32, which torch.bfloat16 cannot hold"):
        accumulate_in_main_grad(model, dtype=torch.bfloat16)
    with pytest.raises(GradientError, match="is torch.bfloat16, which torch.float16 cannot hold"):
        accumulate_in_main_grad(model_of(torch.bfloat16), dtype=torch.float16)
    accumulate_in_main_grad(model)
    with pytest.raises(GradientError, match="keeps a main_grad already"):
        accumulate_in_main_grad([model])


def test_a_gradient_made_elsewhere_is_added_to_the_same_sum():
    model = model_of(torch.bfloat16)
    accumulate_in_main_grad(model)
    weight = model[2].weight
    backward(model, 0)
    once = weight.main_grad.clone()
    add_gradient(weight, torch.full_like(weight, 2.0))
    assert torch.equal(weight.main_grad, once + 2.0)
    plain = nn.Parameter(torch.zeros(2))
    for _ in range(2):
        add_gradient(plain, torch.ones(2))
    assert torch.equal(plain.grad, torch.full((2,), 2.0))


@pytest.mark.ranks(2)
def test_reduction_and_clipping_read_main_grad_in_its_own_type(ranks):
    """In bfloat16, 256 + 1 is 256. One lane has no gradient for the last bias, none has one for the first."""
    model = model_of(torch.bfloat16)
    accumulate_in_main_grad(model)
    model[0].weight.main_grad = torch.full((8, 6), [256.0, 1.0][ranks.rank])
    if ranks.rank == 1:
        model[2].bias.main_grad = torch.full((3,), 3.0)
    reduce_gradients(model, ProcessGroupCollection(dp=dist.group.WORLD), loss_lanes=1)
    assert torch.equal(model[0].weight.main_grad, torch.full((8, 6), 257.0))
    assert torch.equal(model[2].bias.main_grad, torch.full((3,), 3.0))
    assert model[0].bias.main_grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    norm = clip_grad_norm_(model, ProcessGroupCollection(dp=dist.group.WORLD), 1.0)
    expected = (48 * 257.0**2 + 3 * 3.0**2) ** 0.5
    assert norm.item() == pytest.approx(expected, rel=1e-12)
    assert model[2].bias.main_grad.tolist() == pytest.approx([3.0 / expected] * 3, rel=1e-6)


@pytest.mark.ranks(2)
def test_a_tied_parameter_sums_its_copies_main_grads(ranks):
    layer = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    nn.init.ones_(layer.weight)
    accumulate_in_main_grad(layer)
    tied = tie_parameters("word", {ranks.rank: layer.weight}, stages=[0, 1], grids=HyperCommGrid([2], ["pp"]))
    layer.weight.main_grad = torch.full((2, 2), [256.0, 1.0][ranks.rank])
    tied.reduce()
    assert torch.equal(layer.weight.main_grad, torch.full((2, 2), 257.0))
    assert layer.weight.grad is None


@pytest.mark.ranks(2)
def test_a_pipelined_bfloat16_step_leaves_the_float32_sum_of_its_microbatches(ranks):
    config = PipelineConfig(pipeline_dtype=torch.bfloat16, strict=ranks.strict_sends)
    layers = model_of(torch.bfloat16)
    part = Model(config)
    part.layer = (layers[0], layers[2])[ranks.rank]
    single = copy.deepcopy(layers)
    accumulate_in_main_grad(part)
    communicator = P2PCommunicator(dist.group.WORLD, config)

    def step(iterator, model):
        x = microbatch(next(iterator)) if ranks.rank == 0 else torch.tanh(model.received[0])
        return model.layer(x), lambda output: (output.square().sum(), None)

    pipelining = forward_backward_pipelining_without_interleaving
    call(pipelining, model=part, count=MICROBATCHES, forward_step_func=step, p2p_communicator=communicator)
    communicator.close()
    accumulate_in_main_grad(single)
    for index in range(MICROBATCHES):
        (single(microbatch(index)).square().sum() * (1 / MICROBATCHES)).backward()
    expected = (single[0], single[2])[ranks.rank]
    for ours, theirs in zip(part.layer.parameters(), expected.parameters(), strict=True):
        assert torch.equal(accumulated(ours), theirs.main_grad)


def moved(parameter):
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


@pytest.mark.parametrize("kind", ["grad", "main_grad", "another library's buffer"])
@pytest.mark.parametrize("fails", [False, True], ids=["step", "failed step"])
def test_gradients_of_earlier_steps_are_aside_during_a_step(kind, fails):
    """The step sees only its own; afterwards the tensor that held the first holds the sum, or the first."""
    model = nn.Linear(2, 2, bias=False)
    if kind == "main_grad":
        accumulate_in_main_grad(model)
    elif kind != "grad":
        model.weight.main_grad = torch.zeros(2, 2)
        model.weight.register_post_accumulate_grad_hook(moved)
    x = torch.ones(1, 2)
    model(x).sum().backward()
    held, before = accumulated(model.weight), accumulated(model.weight).clone()
    with contextlib.suppress(ZeroDivisionError), fresh_gradients(model):
        model(2 * x).sum().backward()
        assert torch.equal(accumulated(model.weight), 2 * before)
        if fails:
            raise ZeroDivisionError
    assert accumulated(model.weight) is held
    assert torch.equal(held, before if fails else 3 * before)


def test_a_parameter_that_a_step_does_not_use_keeps_what_it_had():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    kept = [p.grad.clone() for p in model.parameters()]
    with fresh_gradients(model):
        assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), kept, strict=True))
