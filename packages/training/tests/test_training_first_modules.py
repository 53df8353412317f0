"""The first step of jobs of several modules, and of tensor-parallel ones, against one process."""

from __future__ import annotations

import os
import random
import time
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pipegrid.bridges import Axes, EdgeOptions
from pipegrid.schedules import PipelineConfig, WithLoss
from pipegrid.topology import HyperCommGrid
from pipegrid.training import CutError, Pipeline, PipelineModule
from pipegrid.training.pipeline.first_step import FirstStep
from pipegrid.training.pipeline.first_update import FirstUpdate
from pipegrid.training.pipeline.losses import GivenLoss
from stages_kit.models import MAKERS, batch_of, next_words

from .kit.jobs import made
from .kit.parallel import tensor_parallel

WORDS = 11
SECONDS = float(os.environ.get("PIPEGRID_FUZZ_SECONDS", "1800"))
"""Of the nightly run; `PIPEGRID_FUZZ_SEED` is its first seed."""


class Tower(nn.Module):
    """An encoder, with dropout and with a norm of batches whose statistics each replica keeps."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, image):
        return self.drop(self.norm(self.linear(image))[:, None])


class Words(nn.Module):
    """Layers with dropout over an image and words; tied."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4))
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, seen=0.0):
        hidden = self.embed(ids) + seen
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def encode(tower, batch):
    return tower(batch["image"])


def read(stage, batch):
    """Stages behind the first take no image: it is in the hidden states."""
    return stage(batch["ids"], stage.received["image"]) if stage.is_first else stage(batch["ids"])


def read_pair(stage, batch):
    return stage(batch["ids"], stage.received["image"]["seen"]) if stage.is_first else stage(batch["ids"])


def mean(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def batch(replica):
    generator = torch.Generator().manual_seed(replica)
    ids = torch.randint(0, WORDS, (16, 5), generator=generator)
    labels = ids.masked_fill(torch.rand(16, 5, generator=generator) < 0.05 * torch.arange(16)[:, None], -100)
    return {"ids": ids, "labels": labels, "image": torch.randn(16, 3, generator=generator).double()}


def grids(image, language):
    """By module, a first rank and sizes of dp and pp."""
    return [HyperCommGrid([dp, pp], ["dp", "pp"], rank_offset=first) for first, dp, pp in (image, language)]


SHARED = ((0, 2, 1), (2, 1, 2))  # two towers for one language model
SAME = ((0, 2, 1), (2, 2, 1))
COLOCATED = ((0, 4, 1), (0, 2, 2))


def step(places=SHARED, *, frozen=False, layout=None, encode=encode, read=read, config=None, loss=mean, **options):
    image, language = grids(*places)
    layout = layout or ("Ett|ttL" if places[1][2] == 2 else "EttttL")
    modules = {
        "image": PipelineModule(made(Tower), None, image, forward=encode, frozen=frozen),
        "language": PipelineModule(made(Words), layout, language, forward=read),
    }
    torch.manual_seed(5)
    with Pipeline(
        modules, topology={"image": ["language"]}, num_microbatches=2, loss=loss, config=config, **options
    ) as job:
        optimizer = torch.optim.AdamW(job.parameters(), lr=0.1)
        for _ in range(2):
            job.step(batch(job.replica))
            optimizer.step()
            optimizer.zero_grad()


def lines_of(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if "not compared with one process" in line]


def watched(monkeypatch):
    """What of the step and of the update is compared."""
    found = []
    for kind, name in ((FirstStep, "_differences"), (FirstUpdate, "_difference")):
        original = getattr(kind, name)

        def kept(self, *given, original=original, kind=kind):
            found.append(kind.__name__)
            return original(self, *given)

        monkeypatch.setattr(kind, name, kept)
    return found


class AsPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = Tower()

    def forward(self, image):
        return {"seen": self.tower(image)}


RIGHT = {
    "two towers for one": {},
    "a tower each": {"places": SAME},
    "colocated": {"places": COLOCATED},
    "frozen": {"frozen": True},
    "stages of one rank": {"layout": "Et|t|t|tL", "schedule": "zero_bubble_v"},
    "payload": {
        "places": SAME,
        "encode": lambda tower, batch: {"seen": encode(tower, batch)},
        "read": read_pair,
        "edges": {("image", "language"): EdgeOptions(payload={"seen": Axes("b", "s", "h")})},
    },
    "narrow on the wire": {"edges": {("image", "language"): EdgeOptions(comm_dtype=torch.bfloat16)}},
    "beside a loss": {
        "places": SAME,
        "encode": lambda tower, batch: WithLoss(encode(tower, batch), tower.linear.weight.square().sum()),
    },
}


@pytest.mark.ranks(4)
@pytest.mark.few(2)
@pytest.mark.parametrize("name", RIGHT)
def test_the_first_step_of_two_modules_is_compared_and_no_error(ranks, name, monkeypatch, capfd):
    compared = watched(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(**RIGHT[name])
    assert compared.count("FirstStep") == 1
    assert "FirstUpdate" in compared or RIGHT[name].get("frozen")
    assert not lines_of(capfd)


def doubled(kind):
    def edit(stage):
        for parameter in stage.parameters() if kind in type(stage).__name__ else ():
            parameter.register_hook(lambda gradient: 2 * gradient)

    return edit


def twice(monkeypatch):
    original = GivenLoss.__call__

    def weighed(self, *given):
        loss, weight, told = original(self, *given)
        return 2 * loss, weight, told

    monkeypatch.setattr(GivenLoss, "__call__", weighed)


@pytest.mark.few(2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("places", "mistake", "text"),
    [
        (SHARED, {"parallelize": doubled("Tower")}, r"gradient of image\.linear\.weight .*: error 1 of"),
        (COLOCATED, {"parallelize": doubled("Tower")}, r"gradient of image\.linear\.weight .*: error 1 of"),
        (SHARED, {"parallelize": doubled("Stage")}, r"gradient of language\.embed\.weight .*: error 1 of"),
        (SAME, twice, r"gradient of image\.linear\.weight.*: error 1 of"),
    ],
    ids=["image doubled", "colocated image doubled", "language doubled", "loss doubled"],
)
def test_a_planted_mistake_of_one_of_two_modules_is_an_error_on_every_rank(ranks, places, mistake, text, monkeypatch):
    if callable(mistake):
        mistake(monkeypatch)
    options = {} if callable(mistake) else mistake
    with pytest.raises(CutError, match=rf"(?s)the first step is not that of one process: loss (\S+), and \1;.*{text}"):
        step(places, **options)
    step(places, config=PipelineConfig(variable_seq_lengths=True, check=False), **options)


@pytest.mark.ranks(4)
def test_a_module_that_a_step_does_not_use_has_zeros_and_is_no_error(ranks, monkeypatch):
    compared = watched(monkeypatch)
    step(read=lambda stage, batch: stage(batch["ids"]))
    assert "FirstStep" in compared


def summed(output, batch):
    losses = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return losses, int((batch["labels"] != -100).sum())


def of_rows(output, batch):
    losses = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return losses.view(batch["labels"].shape).sum(1).mean()


def require_found(seed):
    """A job of a seed, in which every gradient of a module is doubled, or none; whether it was."""
    draw = random.Random(seed)
    places, frozen = draw.choice([SHARED, SAME, COLOCATED]), draw.random() < 0.2
    options = {"places": places, "frozen": frozen, "loss": draw.choice([mean, summed, of_rows])}
    if places[1][2] == 2:
        kinds = [("1f1b", "Ett|ttL"), ("zero_bubble_h1", "Et|tttL"), ("zero_bubble_v", "Et|t|t|tL")]
        options["schedule"], options["layout"] = draw.choice(kinds[: 2 if places is COLOCATED else 3])
    mistake = draw.choice([None, "Stage", *([] if frozen else ["Tower"])])
    try:
        if mistake is None:
            step(**options)
            return False
        with pytest.raises(CutError, match=r"the first step is not that of one process: loss (\S+), and \1;"):
            step(**options, parallelize=doubled(mistake))
    except BaseException as error:
        error.add_note(f"seed {seed}: {options}, {mistake}")
        raise
    return True


@pytest.mark.ranks(4)
def test_random_jobs_of_two_modules_are_right_or_their_mistake_is_found(ranks):
    assert {require_found(seed) for seed in range(6)} == {False, True}


@pytest.mark.nightly
@pytest.mark.ranks(4, deadline=SECONDS + 300)
def test_many_jobs_of_two_modules_are_right_or_their_mistake_is_found(ranks):
    seed = torch.tensor(int(os.environ.get("PIPEGRID_FUZZ_SEED", time.time())))
    dist.broadcast(seed, 0)
    end = time.monotonic() + SECONDS
    for number in range(int(seed), int(seed) + 10**6):
        goes_on = torch.tensor(time.monotonic() < end)
        dist.broadcast(goes_on, 0)
        if not goes_on:
            return
        require_found(number)


# -- tensor parallelism -----------------------------------------------------------------------------------------


def parallel_step(edit, *, check=None, dims=("tp", "dp", "pp"), make="llama"):
    grid = HyperCommGrid([2, 1, 2], list(dims))
    config = PipelineConfig(variable_seq_lengths=True, check=check)
    parallelize = None if edit is None else partial(edit, grid)
    with Pipeline(
        made(MAKERS[make]), "Ett|ttL", grid, parallelize=parallelize, loss=next_words, num_microbatches=2, config=config
    ) as job:
        optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
        for _ in range(2):
            job.step(batch_of(make, rows=4))
            optimizer.step()
            optimizer.zero_grad()


def split(grid, stage):
    tensor_parallel(stage, grid.to_device_mesh(["tp"]))


def split_and_doubled(grid, stage):
    split(grid, stage)
    name = f"{stage.layers[0]}.mlp.down_proj.weight"
    stage.get_parameter(name).register_hook(lambda gradient: 2 * gradient)


@pytest.mark.ranks(4)
@pytest.mark.filterwarnings("ignore:To construct DTensor from torch.Tensor:UserWarning")
def test_the_first_step_of_tensor_parallel_ranks_is_compared(ranks, monkeypatch, capfd):
    compared = watched(monkeypatch)
    parallel_step(split)
    assert compared == ["FirstStep"]
    lines = lines_of(capfd)
    assert len(lines) == (ranks.rank == 0)
    assert all("the first update is not compared with one process: parameters are sharded" in line for line in lines)


@pytest.mark.few(1)
@pytest.mark.ranks(4)
@pytest.mark.filterwarnings("ignore:To construct DTensor from torch.Tensor:UserWarning")
@pytest.mark.parametrize("check", [None, False])
def test_a_doubled_gradient_of_tensor_parallel_ranks_is_an_error_on_every_rank(ranks, check):
    if check is False:  # it is a mistake that nothing else finds
        parallel_step(split_and_doubled, check=check)
        return
    with pytest.raises(CutError, match=r"gradient of model\.layers\.0\.mlp\.down_proj\.weight on stage 0: error 1 of"):
        parallel_step(split_and_doubled)


class Summed(nn.Module):
    """A model whose code sums over ranks, as that of Megatron does."""

    def __init__(self, group):
        super().__init__()
        self.embed, self.group = nn.Linear(3, 4), group
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        total = hidden.detach().clone()
        if self.training:
            torch.distributed.all_reduce(total, group=self.group())
        return self.head(hidden) + total.sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("dim", "why"), [("tp", "no DTensors"), ("dp", "communicates with other ranks (c10d.allreduce_")]
)
def test_a_model_that_communicates_is_not_compared_and_hangs_no_rank(ranks, dim, why, capfd):
    grid = HyperCommGrid([2, 1], [dim, "pp"])
    grid.create_pg(dim)
    make = made(lambda: Summed(lambda: grid.get_pg(dim)))
    config = PipelineConfig(variable_seq_lengths=True, deadline=20.0)
    module = PipelineModule(make, None, grid, forward=lambda model, batch: model(batch["x"]))
    with Pipeline({"model": module}, num_microbatches=2, loss=lambda out, _: out.square().mean(), config=config) as job:
        job.step({"x": torch.linspace(-1, 1, 12).view(4, 3).double()})
    lines = lines_of(capfd)
    assert len(lines) == (ranks.rank == 0)
    assert all(why in line for line in lines)
