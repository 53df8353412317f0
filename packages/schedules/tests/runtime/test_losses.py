"""Losses: any stage may have one, and what cannot be one is refused by stage and microbatch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipegrid.schedules.generators import gpipe, one_f_one_b
from pipegrid.schedules.generators.registry import SCHEDULES
from pipegrid.schedules.passes.lowering import lower
from pipegrid.schedules.runtime import Forwarded

WIDTH, MICROBATCHES = 4, 5


class Expert(nn.Module):
    """A layer with an auxiliary loss of its own, as a router that balances its experts has."""

    def __init__(self, stage, plan, *, auxiliary):
        super().__init__()
        torch.manual_seed(stage)
        self.layer, self.router = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 2).double()
        self.out = [edge for edge in plan.graph.stage_edges if edge.source == stage]
        self.auxiliary = auxiliary
        self.losses = {}

    def compute(self, x):
        """The output, and the stage's own loss."""
        shares = torch.softmax(self.router(x), dim=-1)
        y = torch.tanh(self.layer(x)) * shares[:, :1]
        return y, (shares.mean(0) ** 2).sum() + (y**3).mean()

    def forward(self, microbatch, inputs):
        x = sum(inputs.values()) if inputs else data(microbatch)
        y, own = self.compute(x)
        losses = ([own] if self.auxiliary else []) + ([] if self.out else [(y**2).mean()])
        loss = torch.stack(losses).sum() if losses else None
        if loss is not None:
            self.losses[microbatch] = loss.item()
        return Forwarded(dict.fromkeys(self.out, y), loss)


def data(microbatch):
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(microbatch))


def reference(plan, auxiliary):
    """The same on one process: the sum of all losses, in one backward per microbatch."""
    stages = [Expert(stage, plan, auxiliary=stage in auxiliary) for stage in range(plan.num_stages)]
    for microbatch in range(plan.num_microbatches):
        x, total = data(microbatch), 0.0
        for stage in stages:
            x, own = stage.compute(x)
            loss = (own if stage.auxiliary else 0.0) + (0.0 if stage.out else (x**2).mean())
            if stage.auxiliary or not stage.out:
                stage.losses[microbatch] = loss.item()
            total = total + loss
        total.backward()
    return stages


PLANS = {
    "gpipe": lower(gpipe(3, MICROBATCHES)),
    "1f1b": lower(one_f_one_b(4, MICROBATCHES)),
    **{name: lower(SCHEDULES[name].plan(2, MICROBATCHES)) for name in ("interleaved_1f1b", "zero_bubble_v")},
    **{name: lower(SCHEDULES[name].plan(3, MICROBATCHES)) for name in ("zero_bubble_h1", "dualpipe_v")},
}


@pytest.mark.parametrize("deallocate", [False, True])
@pytest.mark.parametrize("auxiliary", ["first", "middle", "all"])
@pytest.mark.parametrize("name", PLANS)
def test_a_loss_on_any_stage_is_differentiated_with_the_gradients_of_its_outputs(name, auxiliary, deallocate, network):
    plan = PLANS[name]
    chosen = {"first": {0}, "middle": {1}, "all": set(range(plan.num_stages))}[auxiliary]
    stages = [Expert(stage, plan, auxiliary=stage in chosen) for stage in range(plan.num_stages)]
    network.run(plan, stages, deallocate_outputs=deallocate)
    for ours, theirs in zip(stages, reference(plan, chosen), strict=True):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-14)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            if other.grad is None:
                assert one.grad is None
            else:
                assert (one.grad - other.grad).norm() <= 1e-13 * other.grad.norm()
