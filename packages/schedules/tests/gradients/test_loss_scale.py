"""The loss scale: how it moves, that scaling changes no gradient, and that all ranks step or none does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipegrid.gradients.loss_scale import from_state, to_state, updated
from pipegrid.schedules import (
    GradientError,
    LossScale,
    LossScaler,
    PipelineConfig,
    accumulate_in_main_grad,
    forward_backward_pipelining_without_interleaving,
    scale_loss,
    unscale_gradients_,
)
from pipegrid.transport import P2PCommunicator

from ..kit.models import Part, call


def moved(state, outcomes):
    """The scales after each step; ``o`` is an overflow."""
    scales = []
    for outcome in outcomes:
        state = updated(state, overflow=outcome == "o")
        scales.append(state.scale)
    return scales


@pytest.mark.parametrize(
    ("settings", "outcomes", "scales"),
    [
        ({}, "o.o", [4, 4, 2]),
        ({"growth_interval": 2}, "..o.. .", [8, 16, 8, 8, 16, 16, 32]),
        ({"growth_interval": 2}, ".o..", [8, 4, 4, 8]),
        ({"hysteresis": 2}, "oo.oo", [8, 4, 4, 4, 2]),
        ({"hysteresis": 2, "growth_interval": 1}, "o.o", [8, 16, 16]),
        ({"min_scale": 4}, "ooo", [4, 4, 4]),
        ({"max_scale": 10, "growth_interval": 1}, "..", [10, 10]),
        ({"backoff_factor": 1, "growth_factor": 1, "growth_interval": 1}, "o.o.", [8, 8, 8, 8]),
    ],
)
def test_the_scale_falls_at_overflows_and_grows_after_clean_steps(settings, outcomes, scales):
    assert moved(LossScale(scale=8, **settings), outcomes) == scales


@given(st.text("o.", max_size=40), st.integers(1, 4), st.integers(1, 3), st.integers(0, 40))
def test_a_checkpoint_goes_on_as_if_nothing_had_happened(outcomes, interval, hysteresis, cut):
    settings = LossScale(scale=64, growth_interval=interval, hysteresis=hysteresis)
    state = settings
    for outcome in outcomes[:cut]:
        state = updated(state, overflow=outcome == "o")
    resumed = from_state(settings, to_state(state))
    assert resumed == state
    assert moved(resumed, outcomes[cut:]) == moved(settings, outcomes)[cut:]


def fixed(scale):
    least, most = min(1.0, scale), max(2.0**24, scale)
    return LossScale(scale=scale, growth_factor=1.0, backoff_factor=1.0, min_scale=least, max_scale=most)


def test_a_fixed_scale_stays():
    assert moved(fixed(0.5), "o.o." * 1000)[-1] == 0.5


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scale": 0.5}, r"scale is 0\.5; it must be in 1\.0 to"),
        ({"scale": float("inf")}, "scale is inf; it must be a finite number above 0"),
        ({"growth_factor": 0.5}, r"growth_factor is 0\.5; it must be a finite number of at least 1"),
        ({"backoff_factor": 0}, "backoff_factor is 0; it must be a finite number above 0"),
        ({"backoff_factor": 2.0}, r"backoff_factor is 2\.0; it must be at most 1"),
        ({"hysteresis": 0}, "hysteresis is 0; it must be an integer of at least 1"),
    ],
)
def test_what_no_scale_can_be(settings, text):
    with pytest.raises(GradientError, match=text):
        LossScale(**settings)


def test_a_checkpoint_without_a_value_is_an_error():
    with pytest.raises(GradientError, match=r"has no 'clean_steps'; it has \['scale'\]"):
        from_state(LossScale(), {"scale": 2.0})


def test_a_half_precision_loss_is_scaled_in_float32():
    scaled = scale_loss(LossScale(), torch.tensor(100.0, dtype=torch.float16))
    assert (scaled.dtype, scaled.item()) == (torch.float32, 100.0 * 2**16)


@pytest.mark.ranks(2)
def test_scaled_and_unscaled_gradients_are_those_without_a_scale(ranks):
    """A power of two is exact in float64, through a pipeline as well; the reported loss is not scaled."""
    found = []
    for scaler in (None, LossScaler(LossScale(scale=2.0**12))):
        config = PipelineConfig(pipeline_dtype=torch.float64, grad_scale_func=scaler, strict=ranks.strict_sends)
        model = Part(ranks.rank, config)
        communicator = P2PCommunicator(dist.group.WORLD, config)
        pipelining = forward_backward_pipelining_without_interleaving
        infos = call(pipelining, model=model, count=3, p2p_communicator=communicator)
        communicator.close()
        if scaler is not None:
            assert scaler.unscale(model)
        found.append((model.layers[0].weight.grad, infos))
    (expected, infos), (gradient, scaled_infos) = found
    assert torch.equal(gradient, expected)
    assert infos == scaled_infos


def test_a_scale_saves_what_float16_would_flush_to_zero():
    gradients = []
    for scale in (1.0, 2.0**16):
        scaler = LossScaler(fixed(scale))
        model = nn.Linear(4, 1, bias=False).half()
        accumulate_in_main_grad(model)
        scaler((model(torch.full((1, 4), 2.0**-14).half()).float() * 2.0**-12).sum()).backward()
        assert scaler.unscale(model)
        gradients.append(model.weight.main_grad)
    assert torch.equal(gradients[0], torch.zeros(1, 4))
    assert torch.equal(gradients[1], torch.full((1, 4), 2.0**-26))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_an_overflow_on_one_rank_stops_all_ranks(ranks, value):
    """Rank 2 has no parameters at all, and skips the step as well."""
    module = nn.Linear(2, 2) if ranks.rank < 2 else nn.Identity()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = torch.optim.SGD([*module.parameters()] or [torch.zeros(1)], lr=1.0)
    scaler = LossScaler(LossScale(scale=8, growth_interval=1))
    stepped = []
    for overflows in (True, False):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 8.0 if scaler.state.scale == 8 else 4.0)
        if overflows and ranks.rank == 1:
            module.weight.grad[0, 1] = value
        stepped.append(scaler.unscale(module))
        if stepped[-1]:
            optimizer.step()
    assert stepped == [False, True]
    assert (scaler.state.scale, scaler.skipped) == (8, 1)
    for parameter, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, old - 1.0)
    restored = LossScaler(LossScale(scale=2))
    restored.load_state_dict(scaler.state_dict())
    assert (restored.state.scale, restored.skipped) == (8, 1)


@pytest.mark.ranks(2)
def test_only_the_ranks_of_the_job_decide(ranks):
    alone = [dist.new_group([rank]) for rank in range(2)][ranks.rank]
    module = nn.Linear(2, 2)
    module.weight.grad = torch.full_like(module.weight, [1.0, float("inf")][ranks.rank])
    assert unscale_gradients_(module, 2.0, job_group=alone) == (ranks.rank == 1)
