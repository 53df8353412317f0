"""Losses: any stage may have one, and what cannot be one is refused by stage and microbatch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipegrid.plans.generators import gpipe, one_f_one_b
from pipegrid.plans.generators.registry import SCHEDULES
from pipegrid.plans.passes.lowering import lower
from pipegrid.schedules.runtime import Forwarded

from ..kit.models import WIDTH, microbatch
from ..kit.stages import differentiate

MICROBATCHES = 5


class Expert(nn.Module):
    """A layer with an auxiliary loss of its own, as a router that balances its experts has."""

    def __init__(self, stage, plan, *, auxiliary):
        super().__init__()
        torch.manual_seed(stage)
        self.layer, self.router = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 2).double()
        self.out = [edge for edge in plan.graph.stage_edges if edge.source == stage]
        self.auxiliary = auxiliary
        self.losses = {}

    def forward(self, number, inputs):
        x = sum(inputs.values()) if inputs else microbatch(number)
        shares = torch.softmax(self.router(x), dim=-1)
        y = torch.tanh(self.layer(x)) * shares[:, :1]
        losses = [(shares.mean(0) ** 2).sum() + (y**3).mean()] if self.auxiliary else []
        losses += [] if self.out else [(y**2).mean()]
        loss = torch.stack(losses).sum() if losses else None
        if loss is not None:
            self.losses[number] = loss.item()
        return Forwarded(dict.fromkeys(self.out, y), loss)


def experts(plan, auxiliary):
    return [Expert(stage, plan, auxiliary=stage in auxiliary) for stage in range(plan.num_stages)]


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
    stages = experts(plan, chosen)
    network.run(plan, stages, deallocate_outputs=deallocate)
    for ours, theirs in zip(stages, differentiate(plan, experts(plan, chosen)), strict=True):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-14)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            if other.grad is None:
                assert one.grad is None
            else:
                assert (one.grad - other.grad).norm() <= 1e-13 * other.grad.norm()
