"""Forwards under autocast run in the dtype that was asked for, or the step is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipegrid.core.errors import StepArgumentError
from pipegrid.schedules.megatron.config import PipelineConfig

from ..kit.models import call


def step(**options):
    """The dtype in which the model computes."""
    seen = []

    def forward(iterator, model):
        seen.append(model(torch.ones(2, 4)).dtype)
        return model(torch.ones(2, 4)), lambda output: (output.float().mean(), {})

    model = nn.Linear(4, 4)
    model.config = options.pop("config", None) or PipelineConfig(**options)
    call(model=model, count=1, forward_step_func=forward)
    return seen[0]


def test_the_dtype_is_that_of_autocast_or_of_the_pipeline_or_of_torch():
    assert step(pipeline_dtype=torch.bfloat16) == torch.float32
    assert step(enable_autocast=True, pipeline_dtype=torch.bfloat16) == torch.bfloat16
    assert step(enable_autocast=True, pipeline_dtype=torch.float32, autocast_dtype=torch.bfloat16) == torch.bfloat16
    assert step(enable_autocast=True) == torch.get_autocast_dtype("cpu")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pipeline_dtype": torch.float64}, "enable_autocast is set and pipeline_dtype is torch.float64; autocast"),
        ({"pipeline_dtype": torch.float32}, "pipeline_dtype is torch.float32; .* in torch.float16"),
        ({"pipeline_dtype": torch.bfloat16, "autocast_dtype": torch.float32}, "autocast_dtype is torch.float32; autoc"),
    ],
)
def test_a_dtype_that_torch_would_leave_out_with_a_warning_is_refused(options, text):
    with pytest.raises(StepArgumentError, match=text):
        step(enable_autocast=True, **options)
    with pytest.raises(StepArgumentError, match=text):
        step(config=SimpleNamespace(enable_autocast=True, **options))
