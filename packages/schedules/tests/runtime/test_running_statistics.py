"""Running statistics where a rank computes microbatches of other replicas."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipegrid.schedules.runtime.stages.stage import for_another_replica


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.rows += len(x)
        return x


def test_statistics_are_as_before_and_other_buffers_are_not():
    model = nn.Sequential(Rows(), nn.BatchNorm1d(3))
    before = {name: (buffer, buffer.clone()) for name, buffer in model[1].named_buffers()}
    for_another_replica(SimpleNamespace(model=model), lambda: model(torch.randn(5, 3)))
    for name, buffer in model[1].named_buffers():
        held, value = before[name]
        assert buffer is held
        assert torch.equal(buffer, value)
    assert model[0].rows == 5


def test_a_backward_finds_the_statistics_that_its_forward_has_read():
    """Of a batch norm that normalizes by them; the next forward at home moves them on."""
    model, x, made = nn.BatchNorm1d(3).eval(), torch.randn(5, 3), []
    for_another_replica(SimpleNamespace(model=model), lambda: made.append(model(x)))
    with torch.no_grad():
        model.running_var.fill_(4.0)
    made[0].sum().backward()
    torch.testing.assert_close(model.weight.grad, x.sum(0) / (1 + model.eps) ** 0.5)


def test_statistics_are_as_before_after_an_error():
    model = nn.BatchNorm1d(3)
    held = model.running_mean

    def fails():
        model(torch.randn(5, 3))
        raise KeyError

    with pytest.raises(KeyError):
        for_another_replica(SimpleNamespace(model=model), fails)
    assert model.running_mean is held
    assert not held.any()
