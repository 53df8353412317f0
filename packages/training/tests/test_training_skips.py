"""A pipeline whose stages hand on values past others: found in the first step, which is compared with one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipegrid.schedules import PipelineConfig
from pipegrid.stages import Names
from pipegrid.topology import HyperCommGrid
from pipegrid.training import Pipeline
from stages_kit.skipping_models import BLOCKS, UNET, BlockResiduals, UNet


class Tied(nn.Module):
    """The table of the embedding is read again at the end."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(20, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(8))

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return nn.functional.linear(hidden, self.embed.weight)


JOBS = {
    "blocks": (BlockResiduals, "Et|t|t|t|t|t|t|tL", BLOCKS, {"ids": torch.arange(40).reshape(8, 5) % 20}),
    "tied": (
        Tied,
        "Et|t|t|t|t|t|t|tL",
        Names("layers", embedding=("embed",)),
        {"ids": torch.arange(40).reshape(8, 5) % 20},
    ),
    "unet": (UNet, "Et|t|t|t|t|t|t|L", UNET, {"image": torch.linspace(-1, 1, 256).reshape(8, 2, 16).double()}),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("job", "schedule"),
    [("blocks", "interleaved_1f1b"), ("blocks", "zero_bubble_v"), ("unet", "dualpipe_v"), ("tied", "zero_bubble_v")],
)
def test_the_first_step_finds_them_and_is_that_of_one_process(ranks, job, schedule):
    make, layout, names, batch = JOBS[job]

    def made():
        torch.manual_seed(0)
        return make().double()

    grid = HyperCommGrid([4], ["pp"])
    config = PipelineConfig(variable_seq_lengths=True, check=True)
    loss = lambda output, _: output.square().mean()
    with Pipeline(
        made, layout, grid, schedule=schedule, names=names, config=config, loss=loss, num_microbatches=4
    ) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(pipeline.step(batch).item())  # the first one is compared, and the first update
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0] > losses[1] > losses[2]
        assert pipeline.evaluate(batch).item() < losses[2]
        assert "past others" in pipeline.describe()
        assert pipeline.communicator.job.graph.skips


@pytest.mark.ranks(4)
def test_replicas_whose_stages_hand_on_values(ranks):
    make, _, names, batch = JOBS["blocks"]
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    with Pipeline(
        lambda: torch.manual_seed(0) and make().double(),
        "Ettt|tt|t|ttL",
        grid,
        schedule="zero_bubble_v",
        names=names,
        config=PipelineConfig(variable_seq_lengths=True, check=True),
        loss=lambda output, _: output.square().mean(),
        num_microbatches=2,
    ) as pipeline:
        own = {name: value.chunk(2)[pipeline.replica] for name, value in batch.items()}
        assert pipeline.step(own).item() > 0
        assert pipeline.communicator.job.graph.skips
