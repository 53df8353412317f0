"""Gradients that are added in the order of units, in whatever order ranks compute them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipegrid.gradients import accumulate_in_main_grad
from pipegrid.gradients.reduction import GradientReduction
from pipegrid.monitor.collectives import Waiting
from pipegrid.plans.plan import Action, ActionKind
from pipegrid.schedules import (
    GradientError,
    PipelineConfig,
    Routes,
    clip_grad_norm_,
    forward_backward_no_pipelining,
)
from pipegrid.schedules.megatron.units.by_unit import UnitGradients
from pipegrid.topology import ProcessGroupCollection
from pipegrid.transport import P2PUsageError

ALONE = ProcessGroupCollection(dp=None)
UNITS = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def batch(number):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


@given(
    order=st.permutations(range(len(UNITS))), halves=st.lists(st.booleans(), min_size=5, max_size=5), main=st.booleans()
)
def test_the_bits_are_those_of_the_units_in_order(order, halves, main):
    """The rival adds up one backward after the other, of units in order."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    wanted = torch.zeros(4, 4)
    for number in range(len(UNITS)):
        (own,) = torch.autograd.grad(model(batch(number)).square().sum(), model.weight)
        wanted = wanted + own
    if main:
        accumulate_in_main_grad(model)
    units = UnitGradients({0: model}, UNITS, lambda stage, number: UNITS[number])
    for number in order:
        kinds = [ActionKind.I, ActionKind.W] if halves[number] else [ActionKind.B]
        for kind in kinds:
            action = Action(kind, 0, number)
            units.before(action)
            if kind is not ActionKind.I:
                model(batch(number)).square().sum().backward()
            units.after(action)
    assert model.weight.grad is None
    reduction = GradientReduction.of(model, ALONE)
    units.reduce(reduction, Waiting())
    reduction.finish(None, Waiting())
    found = model.weight.main_grad if main else model.weight.grad
    assert torch.equal(found, wanted)


class Model(nn.Linear):
    def __init__(self, **options):
        super().__init__(4, 4)
        self.config = PipelineConfig(grad_add="by_unit", **options)

    def set_input_tensor(self, received):
        pass


def step(model, **options):
    return forward_backward_no_pipelining(
        forward_step_func=lambda iterator, model: (model(next(iterator)), lambda y: (y.square().mean(), None)),
        data_iterator=iter(map(batch, range(2))),
        model=model,
        num_microbatches=2,
        seq_length=1,
        micro_batch_size=1,
        **options,
    )


def test_units_have_numbers_by_routes():
    with pytest.raises(GradientError, match="'by_unit', and without routes= units have no numbers"):
        step(Model())


def test_the_step_function_reduces():
    with pytest.raises(GradientError, match="'by_unit', which adds where the step function reduces"):
        step(Model(finalize_model_grads_func=lambda *_, **__: None), routes=Routes([2]))


@pytest.mark.parametrize("add", ["sorted", True])
def test_an_unknown_order_is_named(add):
    with pytest.raises(P2PUsageError, match=r"PipelineConfig\.grad_add is .*; it must be 'as_computed' or 'by_unit'"):
        PipelineConfig(grad_add=add)
    with pytest.raises(GradientError, match="add is .*; it must be 'as_computed' or 'by_unit'"):
        clip_grad_norm_(nn.Linear(1, 1), ALONE, 1.0, add=add)


@pytest.mark.thorough
@pytest.mark.ranks(4)
def test_a_norm_does_not_depend_on_the_order_of_ranks(ranks):
    """Parts that are lost in a sum that begins with the largest."""
    parts = [1.0, 2.0**-53, 2.0**-53, 2.0**-53]
    found = []
    for own in (parts, parts[::-1]):
        model = nn.Linear(1, 1, bias=False).double()
        model.weight.grad = torch.full((1, 1), own[ranks.rank], dtype=torch.float64)
        found.append(clip_grad_norm_(model, ALONE, 9.0, norm_type=1.0, add="by_unit"))
    assert torch.equal(*found)
    assert found[0] > 1.0
