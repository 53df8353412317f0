"""The first step of a `Pipeline` against one process: mistakes that are planted, one at a time, are each an error."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipegrid.schedules import PipelineConfig
from pipegrid.stages.comparison.compare import compared_gradients
from pipegrid.stages.stage import Stage
from pipegrid.topology import HyperCommGrid
from pipegrid.training import CutError, Pipeline
from pipegrid.training.pipeline import first_step
from pipegrid.training.pipeline.losses import GivenLoss
from pipegrid.training.pipeline.rows import Rows

WORDS = 11


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.4)
        self.norm = nn.BatchNorm1d(8)
        self.norm.running_var.uniform_(0.5, 2.0)
        self.norm.eval()

    def forward(self, hidden):
        return hidden + self.drop(self.norm(self.linear(hidden).flatten(0, 1)).view_as(hidden).tanh())


class Model(nn.Module):
    calls = 0

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids, factors):
        type(self).calls += 1
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden) * factors[:, None, None]


def batch(replica):
    generator = torch.Generator().manual_seed(replica)
    ids = torch.randint(0, WORDS, (4, 5), generator=generator)
    labels = ids.masked_fill(torch.rand(4, 5, generator=generator) < 0.4 * torch.tensor([[0], [1], [1], [2]]), -100)
    return {"ids": ids, "labels": labels, "factors": torch.rand(4, generator=generator, dtype=torch.float64) + 0.5}


def mean(output, inputs):
    return F.cross_entropy(output.flatten(0, 1), inputs["labels"].flatten())


def step(config=None, prepare=None, **options):
    grid = HyperCommGrid([2, 2], ["dp", "pp"])

    def forward(stage, inputs):
        return stage(ids=inputs["ids"], factors=inputs["factors"])

    with Pipeline(
        Model, "Ett|ttL", grid, config=config, num_microbatches=2, loss=mean, forward=forward, **options
    ) as job:
        if prepare is not None:
            prepare(job)
        return job.step(batch(job.replica)).item()


def modes_are_lost(monkeypatch):
    original = Stage.__init__

    def made(self, *args, **options):
        original(self, *args, **options)
        self.train()

    monkeypatch.setattr(Stage, "__init__", made)


def a_mean_is_over_rows(monkeypatch):
    monkeypatch.setattr(GivenLoss, "_found", lambda *_: 0)
    monkeypatch.setattr(GivenLoss, "_require_of_halves", lambda *_: None)


def swapped(original):
    def split(self, given, count):
        parts = original(self, given, count)
        return [{**part, "factors": other["factors"]} for part, other in zip(parts, parts[::-1], strict=True)]

    return split


def gradients_are_not_divided(monkeypatch):
    original = GivenLoss.__call__

    def weighed(self, *given):
        loss, weight, told = original(self, *given)
        return 2 * loss, weight, told

    monkeypatch.setattr(GivenLoss, "__call__", weighed)


MISTAKES = (modes_are_lost, a_mean_is_over_rows, gradients_are_not_divided)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.__name__)
def test_a_planted_mistake_is_an_error_on_every_rank(ranks, mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises(CutError, match="the first step is not that of one process: loss .*\n  (gradient|buffer) of "):
        step()
    step(PipelineConfig(variable_seq_lengths=True, check=False))


@pytest.mark.ranks(4)
def test_rows_that_go_to_another_microbatch_are_a_warning_of_the_first_rank(ranks, monkeypatch):
    """A model whose rows depend on each other looks the same, so this is none of an error."""
    monkeypatch.setattr(Rows, "split", swapped(Rows.split))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step()
    texts = [str(each.message) for each in found if "an entry of the batch is cut wrongly" in str(each.message)]
    assert len(texts) == (ranks.rank == 0)


def froze(job):
    for stage in job.stages["model"]:
        stage.get_submodule(stage.layers[0]).requires_grad_(False).eval()


def summed(output, inputs):
    losses = F.cross_entropy(output.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
    return losses, (inputs["labels"] != -100).sum()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prepare": froze},
        {"schedule": "zero_bubble_h1"},
        {"config": PipelineConfig(variable_seq_lengths=True, grad_scale_func=lambda loss: loss * 64)},
    ],
    ids=["plain", "frozen by the script", "zero bubble", "loss scale"],
)
def test_a_right_step_is_compared_and_no_error(ranks, options, monkeypatch):
    compared = []
    original = first_step.FirstStep._differences
    monkeypatch.setattr(Model, "calls", 0)
    monkeypatch.setattr(
        first_step.FirstStep, "_differences", lambda self, *given: compared.append(given[0]) or original(self, *given)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(**options)
    assert len(compared) == 1
    assert Model.calls == 2, "the forwards of one process leave no trace on the first rank"
    assert all(gradient is not None for gradient in compared[0].values())


@pytest.mark.ranks(4)
def test_what_one_process_cannot_run_is_said_once(ranks, monkeypatch):
    def fails(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(first_step.FirstStep, "_whole", fails)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step()
    texts = [
        str(each.message)
        for each in found
        if "is not compared with one process, MemoryError: no room" in str(each.message)
    ]
    assert len(texts) == (ranks.rank == 0)


def test_a_model_of_frozen_parameters_alone_has_no_gradients_to_compare():
    assert list(compared_gradients({}, {}, {})) == []
