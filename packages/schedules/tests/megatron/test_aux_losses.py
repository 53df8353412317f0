"""Losses that layers attach by an autograd function have the gradient of one process, or are an error."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autograd_kit.gradients import assert_same_gradients, difference, gradients_of
from pipegrid.gradients.loss_scale import LossScale
from pipegrid.schedules import LossScaler, WithLoss, forward_backward_no_pipelining
from pipegrid.schedules.megatron import attached_losses
from pipegrid.schedules.megatron.config import PipelineConfig
from pipegrid.schedules.megatron.step_functions import forward_backward_pipelining_without_interleaving
from pipegrid.schedules.runtime import PipelineError
from pipegrid.transport.errors import P2PUsageError

from ..kit.models import WIDTH, Model, Part, call, forward_step, microbatch


def attaching(scale_name="main_loss_backward_scale"):
    """A class of the kind that Megatron has, fresh, so that no test sets the scale of another."""

    class Attach(torch.autograd.Function):
        @staticmethod
        def forward(ctx, output, loss):
            ctx.save_for_backward(loss)
            return output.view_as(output)

        @staticmethod
        def backward(ctx, grad):
            (loss,) = ctx.saved_tensors
            return grad, torch.ones_like(loss) * getattr(Attach, scale_name, 1.0)

        @classmethod
        def set_loss_scale(cls, scale):
            setattr(cls, scale_name, scale)

    return Attach


class Ones(torch.autograd.Function):
    """An attached loss without a scale."""

    @staticmethod
    def forward(ctx, output, loss):
        ctx.shape = loss.shape
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(ctx.shape)


class Shift(torch.autograd.Function):
    """A bias of one element for all: its gradient is a constant tensor, and no attached loss."""

    @staticmethod
    def forward(ctx, output, bias):
        return output + bias

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum().reshape(1)


class Layer(Model):
    """A layer of which every output carries a loss of its own."""

    def __init__(self, seed, attach, config=None, weight=0.3):
        super().__init__(config)
        torch.manual_seed(seed)
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH).double(), nn.Parameter(torch.zeros(1).double())
        self.attach, self.weight = attach, weight

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        loss = self.weight * (self.linear.weight.square().mean() + x.square().mean())
        return Shift.apply(self.attach(x, loss), self.bias)


class Added:
    """What one process does: the losses of all layers are added to the main one."""

    def __init__(self):
        self.losses = []

    def __call__(self, output, loss):
        self.losses.append(loss)
        return output


def of_one_process(seeds, count, scale=1.0, weight=0.3):
    added = Added()
    layers = [Layer(seed, added, weight=weight) for seed in seeds]
    for index in range(count):
        added.losses.clear()
        x = microbatch(index)
        for layer in layers:
            x = layer(x)
        ((x.square().mean() + sum(added.losses)) * scale / count).backward()
    return layers


def leave_sums(models, num_tokens, pg_collection):
    """The reference leaves sums as well."""


def stepped(layer, count, *, step=forward_backward_no_pipelining):
    call(step, model=layer, count=count, data_iterator=iter(range(count)))
    return layer


@given(count=st.integers(1, 5), scale=st.sampled_from([None, 1.0, 8.0, 1024.0]), weight=st.floats(0.01, 3.0))
def test_an_attached_loss_is_scaled_like_the_main_one(count, scale, weight):
    attach = attaching()
    scaler = None if scale is None else LossScaler(LossScale(scale=scale))
    config = PipelineConfig(aux_loss_scalers=[attach], grad_scale_func=scaler)
    layer = stepped(Layer(0, attach.apply, config, weight), count)
    assert_same_gradients(layer, of_one_process([0], count, scale or 1.0, weight)[0], rtol=1e-10)
    assert attached_losses(layer) == ["Attach"]


@pytest.mark.parametrize("weighted", [False, True])
def test_on_every_stage_of_a_pipeline(network, weighted):
    """With ``weighted_microbatches`` nothing has to be set."""
    attach = attaching()
    options = (
        {"calculate_per_token_loss": True, "weighted_microbatches": True, "finalize_model_grads_func": leave_sums}
        if weighted
        else {"aux_loss_scalers": [attach]}
    )
    parts = [Layer(seed, Ones.apply if weighted else attach.apply, PipelineConfig(**options)) for seed in range(3)]

    def loss(output):
        return (output.square().mean(), 1, {}) if weighted else (output.square().mean(), {})

    step = partial(call, forward_backward_pipelining_without_interleaving, count=4)
    network.calls(step, parts, forward_step_func=partial(forward_step, loss=loss))
    expected = of_one_process(range(3), 4, 4.0 if weighted else 1.0)
    assert difference(gradients_of(parts), gradients_of(expected)) < 1e-10


def test_a_stages_own_mean_loss_is_not_divided_by_tokens(network):
    config = PipelineConfig(calculate_per_token_loss=True, finalize_model_grads_func=leave_sums)
    parts = [Part(seed, config) for seed in range(2)]

    def with_loss(iterator, model):
        output, loss = forward_step(iterator, model, loss=lambda output: (output.square().sum(), 1, {}))
        return (WithLoss(output, output.square().mean()) if model is parts[0] else output), loss

    step = partial(call, forward_backward_pipelining_without_interleaving, count=2)
    with pytest.raises(PipelineError, match="divided by the tokens of the job, and so would be this mean"):
        network.calls(step, parts, forward_step_func=with_loss)


@pytest.mark.parametrize(("attach", "count", "name"), [(attaching().apply, 2, "Attach"), (Ones.apply, 3, "Ones")])
def test_a_scale_that_nothing_sets_is_an_error_in_the_first_step(attach, count, name):
    """One with a scale on its class at once; a constant one at the second microbatch."""
    config = PipelineConfig(grad_scale_func=LossScaler(LossScale(scale=8.0)))
    layer = Layer(0, attach, config)
    with pytest.raises(
        PipelineError, match=f"function {name} of stage 0 attaches a loss .* gradient 1, .* by {8 / count:g}"
    ):
        stepped(layer, count)


class Unset(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(ctx, output, loss):
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_tensor(Unset.scale)


def test_a_scale_that_is_set_by_hand_is_right_and_none_looks_for_nothing():
    def set_by_hand(scale):
        Unset.scale = scale.item()

    for config in (PipelineConfig(aux_loss_scalers=[set_by_hand]), PipelineConfig(aux_loss_scalers=None)):
        layer = stepped(Layer(0, Unset.apply, config), 4)
        assert_same_gradients(layer, of_one_process([0], 4)[0])  # set for the second as well
    Unset.scale = 1.0
    with pytest.raises(PipelineError, match="Unset"):
        stepped(Layer(0, Unset.apply, PipelineConfig()), 4)


def test_classes_of_megatron_are_known_by_name(monkeypatch):
    """As in Megatron, a scale for multi-token prediction may have a function of its own."""
    names = {
        "megatron.core.transformer.moe.moe_utils": "MoEAuxLossAutoScaler",
        "megatron.core.transformer.multi_token_prediction": "MTPLossAutoScaler",
    }
    found = {}
    for module, name in names.items():
        made = ModuleType(module)
        found[name] = attaching()
        setattr(made, name, found[name])
        monkeypatch.setitem(sys.modules, module, made)
    config = SimpleNamespace(mtp_grad_scale_func=lambda: 3.0, grad_scale_func=lambda loss: loss * 2)
    layers = [Layer(0, each.apply, config) for each in found.values()]
    for layer in layers:
        stepped(layer, 4)
    assert [float(each.main_loss_backward_scale) for each in found.values()] == [2 / 4, 3 / 4]
    assert_same_gradients(layers[0], of_one_process([0], 4, scale=2.0)[0])


def test_what_sets_no_scale_is_a_typed_error():
    with pytest.raises(P2PUsageError, match="aux_loss_scalers.* a class with set_loss_scale"):
        PipelineConfig(aux_loss_scalers=[Ones])
    with pytest.raises(P2PUsageError, match="aux_loss_scalers"):
        PipelineConfig(aux_loss_scalers=[1.0])
