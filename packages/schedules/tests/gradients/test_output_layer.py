"""Deferred weight gradients of the output layer: the same sums, later; over tp and sequence parallelism as well."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from autograd_kit.gradients import assert_same_gradients
from pipegrid.schedules import (
    GradientError,
    PipelineConfig,
    accumulate_in_main_grad,
    clear_embedding_activation_buffer,
    finish_embedding_wgrad_compute,
    forward_backward_pipelining_without_interleaving,
    output_linear,
    tie_parameters,
)
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.transport import P2PCommunicator

from ..kit.hooks import Hook
from ..kit.models import Model, call, forward_step, in_one_process, mean_loss

WIDTH, VOCABULARY, MICROBATCHES = 4, 6, 5


class Head(Model):
    def __init__(self, config=None, dtype=torch.float64, *, bias=True):
        super().__init__(config)
        torch.manual_seed(1)
        self.before = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.output_layer = nn.Linear(WIDTH, VOCABULARY, dtype=dtype, bias=bias)
        self.embedding_activation_buffer, self.grad_output_buffer = [], []
        self.tp_group = None

    def forward(self, x):
        hidden = torch.tanh(self.before(x))
        layer = self.output_layer
        return output_linear(hidden, layer.weight, layer.bias, module=self, config=self.config, tp_group=self.tp_group)


def microbatch(index, rows=3):
    return torch.randn(rows, 2, WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


def run(model, *args, **arguments):
    dtype = next(model.parameters()).dtype
    step = partial(forward_step, data=lambda index: microbatch(index).to(dtype))
    return call(*args, model=model, count=MICROBATCHES, **{"forward_step_func": step, **arguments})


def reference():
    """The undeferred gradients, by torch's own linear."""
    head = Head()
    plain = nn.Sequential(head.before, nn.Tanh(), head.output_layer)
    in_one_process([plain], map(microbatch, range(MICROBATCHES)), MICROBATCHES)
    return head


def deferring(limit=0, **options):
    return PipelineConfig(defer_embedding_wgrad_compute=True, wgrad_deferral_limit=limit, **options)


@pytest.mark.parametrize("config", [PipelineConfig(), deferring(), deferring(1), deferring(3), deferring(99)], ids=str)
def test_a_step_has_the_gradients_of_a_plain_linear(config):
    head, expected = Head(config), reference()
    run(head)
    assert_same_gradients(head, expected, rtol=1e-13, atol=1e-16)
    assert head.embedding_activation_buffer == head.grad_output_buffer == []


@pytest.mark.parametrize("rows", [(6,), (3, 2)])
def test_an_output_layer_has_any_leading_axes(rows):
    heads = [Head(PipelineConfig()) for _ in range(2)]
    linears = partial(output_linear, module=heads[0], config=heads[0].config), nn.functional.linear
    for head, linear in zip(heads, linears, strict=True):
        layer = head.output_layer
        linear(microbatch(0).view(*rows, WIDTH), layer.weight, layer.bias).square().sum().backward()
    assert_same_gradients(heads[0].output_layer, heads[1].output_layer, rtol=1e-13, atol=1e-16)


def test_with_everything_deferred_the_bits_are_those_of_the_undeferred_sum():
    deferred, immediate = Head(deferring()), Head(PipelineConfig())
    run(deferred)
    run(immediate)
    assert torch.equal(deferred.output_layer.weight.grad, immediate.output_layer.weight.grad)


@pytest.mark.parametrize(("limit", "waiting"), [(0, 4), (3, 3), (9, 4)])
def test_no_more_than_the_limit_wait(limit, waiting):
    head = Head(deferring(limit))
    for index in range(4):
        head(microbatch(index)).sum().backward()
    assert len(head.embedding_activation_buffer) == len(head.grad_output_buffer) == waiting
    assert (head.output_layer.weight.grad is None) == (waiting == 4)


def test_backwards_in_another_order_than_the_forwards_still_match():
    head, expected = Head(deferring()), Head(PipelineConfig())
    outputs = [head(microbatch(index)) for index in range(3)]
    for index in (2, 0, 1):
        outputs[index].square().sum().backward()
        expected(microbatch(index)).square().sum().backward()
    finish_embedding_wgrad_compute(head.config, head, True, None)
    assert torch.equal(head.output_layer.weight.grad, expected.output_layer.weight.grad)


def test_under_checkpointing_each_microbatch_waits_once():
    head, expected = Head(deferring()), reference()
    for index in range(MICROBATCHES):
        output = checkpoint(head, microbatch(index), use_reentrant=False)
        (output.square().mean() / MICROBATCHES).backward()
    assert len(head.grad_output_buffer) == MICROBATCHES
    finish_embedding_wgrad_compute(head.config, head, True, None)
    assert torch.allclose(head.output_layer.weight.grad, expected.output_layer.weight.grad, rtol=1e-13)


def test_deferred_gradients_reach_main_grad():
    head, expected = Head(deferring(2), torch.bfloat16), Head(PipelineConfig(), torch.bfloat16)
    for each in (head, expected):
        accumulate_in_main_grad(each)
        run(each)
    assert head.output_layer.weight.grad is None
    assert torch.allclose(head.output_layer.weight.main_grad, expected.output_layer.weight.main_grad, rtol=1e-6)


def test_under_autocast_it_computes_as_a_linear_does():
    head = Head(deferring(), torch.float32)
    x = microbatch(0).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = head(x)
        theirs = head.output_layer(torch.tanh(head.before(x)))
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)
    theirs.sum().backward()
    expected = head.output_layer.weight.grad
    head.output_layer.weight.grad = None
    ours.sum().backward()
    finish_embedding_wgrad_compute(head.config, head, True, None)
    assert head.output_layer.weight.grad.dtype == torch.float32
    assert torch.allclose(head.output_layer.weight.grad, expected, rtol=1e-2, atol=1e-3)


def test_a_frozen_weight_defers_nothing():
    head = Head(deferring())
    head.output_layer.weight.requires_grad_(False)
    run(head)
    assert head.output_layer.weight.grad is None
    assert head.before.weight.grad is not None


def test_what_an_aborted_step_left_is_forgotten():
    head = Head(deferring())
    head(microbatch(0)).sum().backward()
    wrapped = nn.Module()
    wrapped.module = head
    assert clear_embedding_activation_buffer(head.config, [nn.Linear(1, 1), wrapped], True) is head
    assert head.embedding_activation_buffer == head.grad_output_buffer == []
    assert clear_embedding_activation_buffer(head.config, head, False) is None
    assert clear_embedding_activation_buffer(PipelineConfig(), head, True) is None
    finish_embedding_wgrad_compute(head.config, None, False, None)
    finish_embedding_wgrad_compute(head.config, head, True, None)
    assert head.output_layer.weight.grad is None


def test_what_deferral_needs_is_named():
    config = deferring()
    with pytest.raises(GradientError, match="Linear has no lists embedding_activation_buffer and grad_"):
        clear_embedding_activation_buffer(config, nn.Linear(1, 1), True)
    head = Head(config)
    head.grad_output_buffer.append(torch.ones(1))
    with pytest.raises(GradientError, match="Head has 0 inputs of its output layer in emb.* and 1 gradients in grad_"):
        finish_embedding_wgrad_compute(config, head, True, None)
    bare = nn.Module()
    bare.embedding_activation_buffer, bare.grad_output_buffer = [torch.ones(1, 1)], [torch.ones(1, 1)]
    with pytest.raises(GradientError, match="Module has no Parameter as output_layer.weight, nor a shared one"):
        finish_embedding_wgrad_compute(config, bare, True, None)
    del bare.grad_output_buffer
    with pytest.raises(GradientError, match="Module has no lists .* grad_output_buffer"):
        clear_embedding_activation_buffer(config, bare, True)
    with pytest.raises(GradientError, match="Module has no lists .* grad_output_buffer"):
        output_linear(torch.ones(1, 1), torch.ones(1, 1), module=bare, config=config)
    with pytest.raises(ValueError, match="wgrad_deferral_limit is -1; it must be an integer of at least 0"):
        deferring(-1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
@pytest.mark.parametrize("limit", [0, 2])
def test_over_tensor_parallel_ranks_the_shards_gradients_are_those_of_the_whole(ranks, sequence_parallel, limit):
    """Half of the vocabulary each; under sequence parallelism also half of the sequence each, before the gather."""
    half = VOCABULARY // 2
    weight = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(9)).double().requires_grad_()
    xs = [microbatch(index, rows=4).requires_grad_() for index in range(3)]
    for x in xs:
        (x @ weight.t()).square().sum().backward()
    module = nn.Module()
    module.embedding_activation_buffer, module.grad_output_buffer = [], []
    module.output_layer = nn.Linear(WIDTH, half, bias=False).double()
    rows = slice(ranks.rank * half, (ranks.rank + 1) * half)
    shard = slice(ranks.rank * 2, ranks.rank * 2 + 2) if sequence_parallel else slice(None)
    with torch.no_grad():
        module.output_layer.weight.copy_(weight[rows])
    config = deferring(limit, sequence_parallel=sequence_parallel)
    group = dist.group.WORLD
    for x in xs:
        own = x.detach()[shard].clone().requires_grad_()
        output = output_linear(own, module.output_layer.weight, module=module, config=config, tp_group=group)
        assert torch.allclose(output, (x @ weight[rows].t()).detach(), rtol=1e-13)
        output.square().sum().backward()
        assert torch.allclose(own.grad, x.grad[shard], rtol=1e-13)
    assert [len(x) for x in module.embedding_activation_buffer] == [2 if sequence_parallel else 4] * (limit or 3)
    finish_embedding_wgrad_compute(config, module, True, group)
    assert torch.allclose(module.output_layer.weight.grad, weight.grad[rows], rtol=1e-13)


def words_of(index):
    return torch.randint(VOCABULARY, (3, 2), generator=torch.Generator().manual_seed(index))


@pytest.mark.ranks(2)
def test_a_tied_output_layer_is_finished_before_its_reduce_and_after_the_last_send(ranks):
    actions = []

    def before(action):
        waiting = len(model.grad_output_buffer) if ranks.rank == 1 else 0
        actions.append((str(action), waiting))

    box = HyperCommGrid([2], ["pp"])
    model = Head() if ranks.rank == 1 else Model()  # the first stage: an embedding whose table is the output layer's
    copy = model.output_layer.weight if ranks.rank == 1 else nn.Parameter(Head().output_layer.weight.detach().clone())
    if ranks.rank == 0:
        model.word = copy
    tied = tie_parameters("word", {ranks.rank: copy}, stages=[0, 1], grids=box)
    config = deferring(
        pipeline_dtype=torch.float64, tied_parameters=[tied], hooks=(Hook(before),), strict=ranks.strict_sends
    )
    model.config = config
    communicator = P2PCommunicator(dist.group.WORLD, config)

    def tied_step(iterator, model):
        if ranks.rank == 0:
            return model.word[words_of(next(iterator))], None
        return model(model.received[0]), mean_loss

    run(
        model,
        forward_backward_pipelining_without_interleaving,
        forward_step_func=tied_step,
        p2p_communicator=communicator,
        pg_collection=ProcessGroupCollection(),
    )
    communicator.close()
    head = Head()
    for index in range(MICROBATCHES):
        hidden = torch.tanh(head.before(head.output_layer.weight[words_of(index)]))
        (head.output_layer(hidden).square().mean() / MICROBATCHES).backward()
    assert torch.allclose(copy.grad, head.output_layer.weight.grad, rtol=1e-13, atol=1e-16)
    if ranks.rank == 1:
        assert actions[-2:] == [(f"1SEND_B{MICROBATCHES - 1}>0", MICROBATCHES), ("1REDUCE@word", MICROBATCHES)]
