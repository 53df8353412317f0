"""A small job of an encoder and a language model in any layout, and the same in one process: for checkpoint tests."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import nn
from torch.nn import functional as F

from pipegrid.schedules import PipelineConfig
from pipegrid.training import Names, Pipeline, PipelineModule, TrainingState

from .kit.grids import grids_of

WORDS, WIDTH, LAYERS, LENGTH, ROWS, MICROBATCHES = 11, 6, 8, 5, 8, 4


@frozen
class Layout:
    """Grids, schedule and placement; the encoder is frozen, or not, and the embedding tied, or not."""

    pp: int
    vpp: int
    dp: int
    schedule: str
    placement: str = "colocated"
    tied: bool = True
    frozen: bool = False

    @property
    def ranks(self):
        return self.pp * self.dp + (self.placement == "separate")

    def __str__(self):
        names = (("tied", self.tied), ("frozen", self.frozen))
        text = f"{self.schedule}-pp{self.pp}-vpp{self.vpp}-dp{self.dp}-{self.placement}"
        return "-".join([text, *(name for name, on in names if on)])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, pixels):
        return self.layers(pixels)


class Language(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)
        )
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.out.weight = self.word.weight

    def forward(self, ids, seen=None):
        x = self.word(ids)
        if seen is not None:
            x = x + seen
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def modules(layout, *, seed):
    """Both models whole, on one process."""
    torch.manual_seed(seed)
    encoder = Encoder().double().requires_grad_(not layout.frozen)
    return {"images": encoder, "language": Language(tied=layout.tied).double()}


def batch_of(step):
    """The microbatches of a step."""
    generator = torch.Generator().manual_seed(step)
    return [
        {
            "pixels": torch.randn(ROWS, LENGTH, 3, generator=generator, dtype=torch.float64),
            "ids": torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=generator),
        }
        for _ in range(MICROBATCHES)
    ]


def loss_of(logits, microbatch):
    """The sum over words, and how many they are."""
    targets = microbatch["ids"][:, 1:]
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="sum"), targets.numel()


def optimizer_of(parameters):
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


class Whole:
    """The reference: both models on one process."""

    def __init__(self, layout, *, seed=1):
        self.modules = modules(layout, seed=seed)
        self.optimizer = optimizer_of([p for module in self.modules.values() for p in module.parameters()])
        self.state = TrainingState(
            stages={name: {0: module} for name, module in self.modules.items()}, optimizers=[self.optimizer]
        )

    def step(self, number):
        """The mean loss of a step over its words."""
        losses, words = zip(*map(self.loss, batch_of(number)), strict=True)
        loss = sum(losses) / sum(words)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def loss(self, microbatch):
        seen = self.modules["images"](microbatch["pixels"])
        return loss_of(self.modules["language"](microbatch["ids"][:, :-1], seen), microbatch)


def read(stage, microbatch):
    """The forward of a stage of the language model: what the encoder saw comes with the words."""
    seen = stage.received["images"] if stage.is_first else None
    return stage(microbatch["ids"][:, :-1], seen=seen)


class Job:
    """One rank of a layout; ``plan``: its checkpoints know the plan of a step."""

    def __init__(self, layout, *, seed=1, plan=False):
        self.layout, whole = layout, modules(layout, seed=seed)
        ranks = layout.pp * layout.dp  # of the language model
        encoder = (ranks, {}) if layout.placement == "separate" else (0, {"dp": ranks})
        grids = grids_of({"images": encoder, "language": (0, {"dp": layout.dp, "pp": layout.pp})}, ("dp", "pp"))
        stages = layout.pp * layout.vpp
        texts = {"images": "ee", "language": "|".join(["t" * (LAYERS // stages)] * stages)}
        self.pipeline = Pipeline(
            {
                "images": PipelineModule(
                    whole["images"],
                    texts["images"],
                    grids["images"],
                    names=Names("layers"),
                    forward=lambda stage, microbatch: stage(microbatch["pixels"]),
                    output=nn.Identity(),
                    frozen=layout.frozen,
                ),
                "language": PipelineModule(
                    whole["language"], texts["language"], grids["language"], names=Names("blocks"), forward=read
                ),
            },
            topology={"images": ["language"]},
            schedule=layout.schedule,
            config=PipelineConfig(pipeline_dtype=torch.float64, deadline=60.0),
            loss=loss_of,
        )
        self.optimizer = optimizer_of(self.pipeline.parameters())
        self.state = TrainingState(
            stages=self.pipeline.stages,
            optimizers=[self.optimizer],
            plan=self.pipeline.plan(MICROBATCHES) if plan else None,
            grids=self.pipeline.grids,
            layout=texts,
        )

    def step(self, number):
        """The mean loss of a step over all words of the job, the same on every rank."""
        replica, replicas = self.pipeline.replica, self.pipeline.replicas
        loss = self.pipeline.step(
            [{name: rows.chunk(replicas)[replica] for name, rows in each.items()} for each in batch_of(number)]
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()
