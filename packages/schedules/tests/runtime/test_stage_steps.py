"""One forward and one backward of a stage: losses of all three kinds, freed outputs, gradients by structure."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from pipegrid.autograd.engine import shape_of_gradient
from pipegrid.core.errors import StepArgumentError
from pipegrid.schedules.megatron.backward import backward_step, custom_backward, deallocate_output_tensor
from pipegrid.schedules.megatron.config import PipelineConfig
from pipegrid.schedules.megatron.forward import (
    StageOutputError,
    forward_step,
    forward_step_calc_loss,
    set_current_microbatch,
)

from ..kit.models import WIDTH, Part


def asking():
    """A stage that asks for the number of the microbatch."""
    model = Part(0)
    model.current_microbatch = None
    return model


def calc(result, config=None, microbatches=4, **options):
    store: list[object] = []
    output, tokens = forward_step_calc_loss(
        None,
        torch.ones(2),
        lambda _: result,
        config or PipelineConfig(),
        None,
        False,
        microbatches,
        store,
        is_last_stage=True,
        **options,
    )
    return output, int(tokens), store


def test_a_mean_loss_is_divided_by_the_microbatches_and_multiplied_by_cp():
    loss = torch.tensor(8.0)
    output, tokens, store = calc((loss, "info"), cp_group_size=2)
    assert (output.item(), tokens, store) == (4.0, 0, ["info"])
    assert loss.item() == 8.0


def test_a_loss_with_tokens_is_divided_by_them_unless_it_is_per_token():
    loss = torch.tensor(24.0)
    assert calc((loss, 3, "info"))[:2] == (2.0, 3)
    assert calc((loss, 0, "info"))[:2] == (6.0, 0)
    assert calc((loss, 3, "info"), PipelineConfig(calculate_per_token_loss=True))[:2] == (24.0, 3)
    assert loss.item() == 24.0


@pytest.mark.parametrize(
    ("counted", "dtype", "divided"),
    [
        (3, torch.int64, 2.0),
        (torch.tensor([3], dtype=torch.int32), torch.int64, 2.0),
        (1.6, torch.float64, 3.75),
        (torch.tensor(1.5, dtype=torch.float16), torch.float64, 4.0),
    ],
)
def test_tokens_are_counted_wide_enough_to_be_added_up_and_do_not_widen_the_loss(counted, dtype, divided):
    def both(per_token):
        config, store = PipelineConfig(calculate_per_token_loss=per_token), []
        return forward_step_calc_loss(
            None,
            None,
            lambda _: (torch.tensor(24.0), counted, "info"),
            config,
            None,
            False,
            4,
            store,
            is_last_stage=True,
        )

    loss, tokens = both(per_token=False)
    assert (loss.item(), loss.dtype) == (divided, torch.float32)
    expected = float(counted)
    assert (tokens.dtype, tokens.shape, tokens.item()) == (dtype, (), expected)
    assert both(per_token=True)[0].item() == 24.0


@pytest.mark.parametrize(
    ("result", "config", "text"),
    [
        (
            (torch.ones(()), torch.ones(3), "info"),
            None,
            r"counted a tensor of shape \(3,\) as num_tokens; it must be one",
        ),
        ((torch.ones(()), "3", "info"), None, "counted '3' as num_tokens"),
        (torch.ones(()), None, r"returned a tensor of shape \(\); expected \(loss, num_tokens, info\)"),
        ((torch.ones(()),), None, "returned a tuple of 1"),
        ((torch.ones(3), "info"), None, r"the loss is a tensor of shape \(3,\); a loss is a tensor with one element"),
        ((1.0, "info"), None, "the loss is 1.0"),
        (
            (torch.ones(()), "info"),
            PipelineConfig(calculate_per_token_loss=True),
            "returned a tuple of 2; expected \\(loss, num_tokens, info\\)",
        ),
    ],
)
def test_what_cannot_be_a_loss_is_named(result, config, text):
    with pytest.raises(StageOutputError, match=text):
        calc(result, config)


def test_non_loss_data_is_stored_as_it_is():
    store: list[object] = []
    output, _ = forward_step_calc_loss(
        None,
        torch.ones(2),
        lambda _, non_loss_data: {"kept": non_loss_data},
        PipelineConfig(),
        None,
        True,
        1,
        store,
        is_last_stage=True,
    )
    assert store == [{"kept": True}]
    assert output.shape == (2,)


def test_the_last_stage_must_be_known():
    with pytest.raises(ValueError, match="pass is_last_stage=True"):
        forward_step_calc_loss(None, None, None, PipelineConfig(), None, False, 1, [])


def test_a_stage_receives_its_input_and_hands_on_a_list_for_a_list():
    model = asking()
    received = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)

    def func(iterator, model):
        return model(model.received[0] + next(iterator)), None

    args = (PipelineConfig(), 1)
    output, _ = forward_step(
        func, iter([1.0]), model, 1, received, [], *args, current_microbatch=7, is_last_stage=False
    )
    assert model.received[0] is received
    assert model.current_microbatch == 7
    outputs, _ = forward_step(func, iter([1.0]), model, 1, [received], [], *args, is_last_stage=False)
    assert isinstance(outputs, list)
    assert torch.equal(outputs[0], output)


def mean(output):
    return output.mean(), {}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (torch.ones(2, 3), r"returned a tensor of shape \(2, 3\); it returns \(output, loss_func\)"),
        ((torch.ones(2, 3), torch.ones(1)), r"\(a tensor of shape \(2, 3\), a tensor of shape \(1,\)\)"),
        ((torch.ones(2, 3), mean, {}), "returned a tuple of 3"),
        ({"output": torch.ones(2), "loss": mean}, "returned {.*dict"),
        (None, "returned None; "),
    ],
)
def test_a_forward_step_returns_its_output_and_a_loss_function(result, text):
    with pytest.raises(StepArgumentError, match=text):
        forward_step(lambda *_: result, None, Part(0), 1, None, [], PipelineConfig(), 1)


def test_without_a_loss_function_the_output_is_the_result():
    output, found = torch.ones(2, 3), []
    forward_step(lambda *_: (output, None), None, Part(0), 1, None, found, PipelineConfig(), 1)
    assert found == [output]


@pytest.mark.parametrize("result", [torch.ones(2, 3), (torch.ones(2, 3), torch.ones(1))], ids=["output", "two outputs"])
def test_before_the_last_stage_half_of_an_activation_is_never_taken_for_all_of_it(result):
    with pytest.raises(StepArgumentError, match=r"it returns \(output, loss_func\)"):
        forward_step(lambda *_: result, None, Part(0), 1, None, [], PipelineConfig(), 1, is_last_stage=False)


@pytest.mark.parametrize("loss_func", [mean, nn.Identity(), None])
def test_before_the_last_stage_the_loss_function_is_not_needed(loss_func):
    output = torch.ones(2, 3)
    result, _ = forward_step(
        lambda *_: (output, loss_func), None, Part(0), 1, None, [], PipelineConfig(), 1, is_last_stage=False
    )
    assert result is output


def test_a_stage_without_set_input_tensor_cannot_receive():
    with pytest.raises(ValueError, match="Linear has no set_input_tensor"):
        forward_step(print, None, nn.Linear(1, 1), 1, torch.ones(1), [], PipelineConfig(), 1)


def test_the_current_microbatch_reaches_every_module_that_asks():
    outer = nn.Sequential(asking(), nn.ReLU(), asking())
    set_current_microbatch(outer, 3)
    assert [outer[0].current_microbatch, outer[2].current_microbatch] == [3, 3]
    assert not hasattr(outer[1], "current_microbatch")


@pytest.mark.parametrize("deallocated", [False, True])
def test_a_backward_returns_gradients_in_the_structure_of_the_inputs(deallocated):
    config = PipelineConfig(deallocate_pipeline_outputs=deallocated)
    a = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, dtype=torch.int64)
    unused = torch.ones(1, dtype=torch.float64, requires_grad=True)
    output = a * b
    gradient = torch.randn(2, 3, dtype=torch.float64)
    deallocate_output_tensor(output, deallocated)
    assert output.numel() == (1 if deallocated else 6)
    inputs = {"x": [a, None], "y": (b, mask), "z": unused}
    back = backward_step(inputs, [output], [gradient], None, config)
    assert torch.equal(back["x"][0], gradient * b)
    assert torch.equal(back["y"][0], gradient * a)
    assert back["x"][1] is None
    assert back["y"][1] is None
    assert torch.equal(back["z"], torch.zeros(1, dtype=torch.float64))


def test_a_loss_is_scaled_before_its_backward():
    x = torch.tensor([2.0], requires_grad=True)
    config = PipelineConfig(grad_scale_func=lambda loss: loss * 1024)
    assert backward_step(x, (x * 3).sum(), None, None, config).item() == 3 * 1024


def test_as_many_gradients_as_outputs():
    with pytest.raises(ValueError, match="2 outputs but 1 gradients"):
        backward_step(None, [torch.ones(1), torch.ones(1)], [torch.ones(1)], None, PipelineConfig())


def test_custom_backward_equals_autograd_after_the_output_was_freed():
    layer = nn.Linear(4, 5).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(2, 5, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x), [x, layer.weight], gradient)
    output = layer(x)
    deallocate_output_tensor(output, True)
    custom_backward(output, gradient)
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(layer.weight.grad, expected[1])


@pytest.mark.parametrize(("shape", "freed"), [((), False), ((), True), ((1, 1), False), ((1, 1), True)])
def test_custom_backward_needs_no_gradient_for_an_output_of_one_element(shape, freed):
    x = torch.full(shape, 2.0, requires_grad=True)
    output = x * 3
    deallocate_output_tensor(output, freed)
    custom_backward(output, None)
    assert torch.equal(x.grad, torch.full(shape, 3.0))


@pytest.mark.parametrize("shape", [(2,), (2, 3), (0,)])
def test_custom_backward_needs_the_gradient_of_what_had_more_elements_before_it_was_freed(shape):
    x = torch.ones(shape, requires_grad=True)
    first, output = (x * 3).expand(2, *shape).unbind()
    output = output.clone()
    deallocate_output_tensor(output, True)
    with pytest.raises(StepArgumentError, match=rf"grad_output is None, and .*shape {re.escape(str(shape))} before"):
        custom_backward(output, None)
    assert x.grad is None
    custom_backward(output, torch.ones(shape))
    assert torch.equal(x.grad, torch.full(shape, 3.0))
    assert shape_of_gradient(first) == shape


def test_custom_backward_does_not_sum_up_a_gradient_that_is_too_large():
    x = torch.ones(4, requires_grad=True)
    output = x * 2
    deallocate_output_tensor(output, True)
    with pytest.raises(StepArgumentError, match=r"of shape \(3, 4\), and output had shape \(4,\) before it was freed"):
        custom_backward(output, torch.ones(3, 4))
    assert x.grad is None


def test_deallocation_frees_no_view():
    with pytest.raises(ValueError, match=r"shape \(3,\) is a view"):
        deallocate_output_tensor(torch.ones(2, 3, requires_grad=True)[0], True)
