"""A division follows from a graph's pattern alone: equal patterns share one, and any change of it is seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from autograd_kit.custom_functions import Scale
from pipegrid.autograd.partition import divide, outline_of
from pipegrid.autograd.split_backward import backward_inputs, backward_weights

WIDTH = 5


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.other, self.rows = (nn.Parameter(torch.randn(WIDTH).double()) for _ in range(3))


# One stage that computes something else for every microbatch; neighbours in the list differ by as little as can be.
PATTERNS = {
    "product": lambda w, x, y: [x * w.one],
    "turned round": lambda w, x, y: [w.one * x],
    "with the other input": lambda w, x, y: [y * w.one],
    "of a custom function": lambda w, x, y: [Scale.apply(x, w.one)],
    "of both inputs": lambda w, x, y: [x * y],
    "by two weights": lambda w, x, y: [x * w.one * w.other],
    "by one weight twice": lambda w, x, y: [x * w.one * w.one],
    "deeper": lambda w, x, y: [(x * w.one).exp() * w.other],
    "side by side": lambda w, x, y: [(x * w.one).exp() * (y * w.other)],
    "from a shared weight": lambda w, x, y: [(x * w.one).exp() * (y * w.one)],
    "one of two outputs": lambda w, x, y: [(x * w.rows).unbind()[0], y * w.one],
    "the other of two outputs": lambda w, x, y: [(x * w.rows).unbind()[1], y * w.one],
    "both outputs": lambda w, x, y: [sum((x * w.rows).unbind()[:2]), y * w.one],
    "an input itself": lambda w, x, y: [x, y * w.one],
    "the weights alone": lambda w, x, y: [w.one * w.other],
}


def recorded(pattern, weights):
    torch.manual_seed(4)
    inputs = [torch.randn(WIDTH).double().requires_grad_() for _ in range(2)]
    outputs = PATTERNS[pattern](weights, *inputs)
    return [get_gradient_edge(output) for output in outputs], [torch.randn_like(out) for out in outputs], inputs


def outline(pattern, weights):
    roots, _, inputs = recorded(pattern, weights)
    return outline_of(roots, inputs)[1]


def test_two_microbatches_of_one_pattern_share_a_division():
    weights = Weights()
    for pattern in PATTERNS:
        assert divide(outline(pattern, weights)) is divide(outline(pattern, weights))


def test_any_difference_of_patterns_shows_in_the_outline_but_which_of_the_inputs_was_read():
    weights = Weights()
    assert outline("product", weights) == outline("with the other input", weights)
    others = set(PATTERNS) - {"with the other input"}
    assert len({outline(pattern, weights) for pattern in others}) == len(others)


@pytest.mark.parametrize("order", [list(PATTERNS), list(PATTERNS)[::-1]])
def test_a_graph_that_changes_with_every_microbatch_has_the_gradients_of_a_whole_backward(order):
    split, whole = Weights(), Weights()
    halves = []
    for pattern in order * 2:
        roots, gradients, inputs = recorded(pattern, split)
        found, half = backward_inputs(roots, gradients, inputs)
        halves.append(half)
        roots, gradients, expected = recorded(pattern, whole)
        torch.autograd.backward(roots, gradients)
        for gradient, tensor in zip(found, expected, strict=True):
            assert gradient is tensor.grad is None or torch.equal(gradient, tensor.grad)
    for half in halves:
        backward_weights(half)
    for mine, reference in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-12, atol=1e-12)
