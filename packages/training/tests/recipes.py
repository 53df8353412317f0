"""Recipes at random: a model, its data, loss and options as scripts have them, and the same run in one process.

The run in one process shares no code with the cutting of batches: it cuts nothing, unless there is dropout, whose masks
are drawn by microbatch, or layers attach losses, which are means over one; then it takes rows by their numbers.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipegrid.topology import HyperCommGrid
from pipegrid.training import DropoutMasks, Names, Pipeline

WORDS, WIDTH, LAYERS, UPDATES = 13, 8, 4, 3
SCHEDULES = {
    1: (("1f1b", 1),),
    2: (("1f1b", 1), ("zero_bubble_h1", 1), ("interleaved_1f1b", 2), ("zero_bubble_v", 2), ("dualpipe_v", 2)),
    4: (("1f1b", 1), ("zero_bubble_h1", 1)),
}
"""By pp, names and the stages of a rank."""
LAYOUTS = {
    1: ("Et*4L",),
    2: ("Ett|ttL", "Et|tttL", "Ettt|tL", "Etttt|L", "E|ttttL"),
    4: ("Et|t|t|tL", "E|tt|tt|L", "E|t|tt|tL"),
}
HANDED_ON = ("embedding", "outputs", "table", "norms", "scales", "weight", "memory", "sum", "u-net", "each")
"""What later stages need of earlier ones, besides the hidden states."""


@frozen
class Recipe:
    """What a script has chosen; equal on every rank."""

    seed: int
    replicas: int
    schedule: str
    layouts: tuple[str, str]
    tied: bool
    frozen: tuple[int, ...]
    embedding_frozen: bool
    dropout: float
    checkpointed: bool
    planes: int
    weights: str
    loss: str
    rows: tuple[int, ...]
    cut: dict[str, int]
    optimizer: str
    options: str
    clip: float | None
    evaluates: bool
    saves: bool
    attaches: bool
    hands_on: str

    @classmethod
    def of(cls, seed: int, ranks: int) -> Recipe:
        """The recipe of a seed, for a number of ranks."""
        draw = random.Random(seed)
        pp = draw.choice([each for each in (1, 2, 4) if each <= ranks])
        schedule, chunks = draw.choice(SCHEDULES[pp])
        layouts = LAYOUTS[pp * chunks]
        size = draw.choice([1, 2])
        count = draw.randint(1, 4) * (pp if schedule in ("interleaved_1f1b", "dualpipe_v") else 1)
        count = 2 * count if schedule == "dualpipe_v" else count
        fixed = chunks == 2 or draw.random() < 0.5
        least = count if fixed else size
        rows = [least * draw.randint(1, 2) + (draw.randint(0, 2) if fixed else 0) for _ in range(UPDATES - 1)]
        return cls(
            seed=seed,
            replicas=ranks // pp,
            schedule=schedule,
            layouts=(draw.choice(layouts), draw.choice(layouts)),
            tied=draw.random() < 0.5,
            frozen=tuple(range(draw.choice([0, 0, 1, 2, LAYERS]))),
            embedding_frozen=draw.random() < 0.3,
            dropout=draw.choice([0.0, 0.0, 0.4]),
            checkpointed=draw.random() < 0.3,
            planes=draw.choice([0, 2, 3, 4]),
            weights=draw.choice(["tensor", "array", "list", "tuple", "tensors", "dict"]),
            loss=draw.choice(["rows", "words", "weighted"]),
            rows=(*rows, least),  # a last batch
            cut={"num_microbatches": count} if fixed else {"microbatch_size": size},
            optimizer=draw.choice(["AdamW", "SGD", "NAdam"]),
            options=draw.choice(["none", "by name", "two groups", "no names"]),
            clip=draw.choice([None, 0.05]),
            evaluates=draw.random() < 0.4,
            saves=draw.random() < 0.3,
            attaches=draw.random() < 0.3,
            hands_on=draw.choice(["", "", *HANDED_ON]),
        ).known()

    def known(self) -> Recipe:
        """With attached losses, a main loss that counts what is known before the backward."""
        return evolve(self, loss="words") if self.attaches and self.loss == "weighted" else self

    @property
    def by_microbatch(self) -> bool:
        """Whether what one process computes depends on the microbatches."""
        return bool(self.dropout) or self.attaches


class Attached(torch.autograd.Function):
    """Adds a loss to the gradients, beside the main one."""

    @staticmethod
    def forward(ctx, output, loss):
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(())


class Model(nn.Module):
    """Words, positions in planes, a weight for each row, weights of classes; layers, some frozen in evaluation mode."""

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed % 2**31)
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(recipe) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if recipe.tied:
            self.head.weight = self.embed.weight
        self.hands_on = recipe.hands_on
        parts = {
            "table": lambda: nn.Embedding(5, WIDTH).requires_grad_(False),
            "norms": lambda: nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS)),
            "scales": lambda: nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(LAYERS)),
            "weight": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
            "memory": lambda: nn.Linear(WIDTH, WIDTH),
            "each": lambda: nn.Embedding(WORDS, WIDTH * LAYERS),
        }
        if recipe.hands_on in parts:
            self.part = parts[recipe.hands_on]()
        self.double()
        for number in recipe.frozen:
            self.layers[number].requires_grad_(False).eval()
        if recipe.embedding_frozen and not recipe.tied:
            self.embed.requires_grad_(False)

    def forward(self, ids, labels, weights, classes, planes=None, scale=1.0, names=(), nothing=None):
        """The loss of each label, shape [rows, labels], before weights."""
        assert nothing is None
        embedded = hidden = self.embed(ids)
        if planes is not None:
            numbers = torch.arange(1, len(planes) + 1, dtype=hidden.dtype).view(-1, 1, 1)
            hidden = hidden + (planes.double() * numbers).sum(0).sin()[..., None]
        factors = torch.tensor([len(name) for name in names], dtype=hidden.dtype)
        first = hidden = hidden * factors.view(-1, 1, 1) * scale
        memory = self.part(first).tanh() if self.hands_on == "memory" else None
        each = self.part(ids).chunk(LAYERS, -1) if self.hands_on == "each" else None
        outputs = []
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden if each is None else hidden + each[number])
            outputs.append(hidden)
            if self.hands_on == "embedding":
                hidden = hidden + (first if number % 2 else embedded)
            elif self.hands_on == "outputs":
                hidden = hidden + torch.stack(outputs).mean(0)
            elif self.hands_on == "table":
                hidden = hidden * self.part(torch.arange(ids.shape[1])).cos()
            elif self.hands_on == "norms":
                hidden = self.part[number](hidden)
            elif self.hands_on == "scales":
                hidden = hidden * self.part[number]
            elif self.hands_on == "weight":
                hidden = hidden + F.linear(hidden, self.part.weight).tanh()
            elif memory is not None:
                hidden = hidden + (hidden @ memory.transpose(1, 2)).softmax(-1) @ memory
            elif self.hands_on == "u-net" and number >= LAYERS // 2:
                hidden = hidden + outputs[LAYERS - 1 - number]
        if self.hands_on == "sum":
            hidden = hidden + 0.1 * sum(one.square().mean(-1, keepdim=True) for one in outputs)
        logits = self.head(hidden) * classes
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        return losses.view(labels.shape) * as_tensor(weights).view(-1, 1)


class Layer(nn.Module):
    """A norm of batches, which is in evaluation mode in frozen layers alone and else left out, and dropout."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(recipe.dropout)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)
        self.norm.requires_grad_(False).eval()
        self.checkpointed = recipe.checkpointed
        self.attach = Attached.apply if recipe.attaches else lambda output, loss: output

    def forward(self, hidden):
        if self.checkpointed and torch.is_grad_enabled():
            return checkpoint(self.computed, hidden, use_reentrant=False)
        return self.computed(hidden)

    def computed(self, hidden):
        normed = self.norm(self.linear(hidden).flatten(0, 1)).view_as(hidden)
        made = hidden + self.drop(normed.tanh())
        return self.attach(made, 0.1 * made.square().mean() + 0.1 * self.linear.weight.square().mean())


def names_of(recipe: Recipe) -> Names:
    """What the model's parts are."""
    parts = ("table", "norms", "scales", "weight", "memory", "each")
    return Names("layers", embedding=("part",) if recipe.hands_on in parts else ())


def as_tensor(weights: Any) -> torch.Tensor:
    """The weights of rows in any form."""
    if isinstance(weights, dict):
        return weights["of"][0]
    return weights if isinstance(weights, torch.Tensor) else torch.tensor([float(each) for each in weights])


def batch_of(recipe: Recipe, step: int, replica: int) -> dict[str, Any]:
    """The batch of a replica, as a collator would make it."""
    draw = torch.Generator().manual_seed(recipe.seed * 100 + 10 * step + replica)
    rows, tokens = recipe.rows[step], 5
    labels = torch.randint(0, WORDS, (rows, tokens), generator=draw)
    labels[:, 1:][torch.rand(rows, tokens - 1, generator=draw) < 0.4] = -100
    weights = torch.rand(rows, generator=draw, dtype=torch.float64) + 0.5
    batch = {
        "ids": torch.randint(0, WORDS, (rows, tokens), generator=draw),
        "labels": labels,
        "weights": {
            "tensor": weights,
            "array": weights.numpy(),
            "list": weights.tolist(),
            "tuple": tuple(weights.tolist()),
            "tensors": list(weights.unbind()),
            "dict": {"of": [weights], "unit": "one"},
        }[recipe.weights],
        "classes": torch.linspace(0.5, 1.5, WORDS, dtype=torch.float64),
        "scale": 0.7,
        "names": ["x" * (1 + int(each)) for each in torch.randint(0, 3, (rows,), generator=draw)],
        "nothing": None,
    }
    if recipe.planes:
        batch["planes"] = torch.randint(0, 9, (recipe.planes, rows, tokens), generator=draw)
    return batch


def loss_of(recipe: Recipe, losses: torch.Tensor, batch: dict[str, Any]) -> Any:
    """As ``Pipeline(loss=...)`` takes it: a mean over rows, or a sum with its count."""
    if recipe.loss == "rows":
        return losses.sum(dim=1).mean()
    if recipe.loss == "words":
        return losses.sum(), int((batch["labels"] != -100).sum())
    return losses.sum(), as_tensor(batch["weights"]).double().sum()


def options(recipe: Recipe, named: list[tuple[str, nn.Parameter]]) -> Any:
    """Parameters with options as recipes choose them; what is tied has the same ones by its name."""
    if recipe.options == "none":
        return [{"params": [parameter for _, parameter in named]}]
    if recipe.options == "two groups":
        decay = [parameter for name, parameter in named if "bias" not in name and "embed" not in name]
        rest = [parameter for name, parameter in named if "bias" in name or "embed" in name]
        return [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]
    if recipe.options == "by name":
        made = [{"params": [p], "lr": 0.01 * (1 + sum(map(ord, name)) % 5)} for name, p in named]
        return made or [{"params": []}]
    return None


def optimizer_of(recipe: Recipe, groups: Any) -> torch.optim.Optimizer:
    kinds = {
        "AdamW": lambda: torch.optim.AdamW(groups, lr=0.03, weight_decay=0.1),
        "SGD": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1),
        "NAdam": lambda: torch.optim.NAdam(groups, lr=0.03, weight_decay=0.1),
    }
    return kinds[recipe.optimizer]()


def in_one_process(recipe: Recipe) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The losses of steps and of evaluations, and the parameters after the last update."""
    model, losses, evaluated = Model(recipe), [], []
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    named = options(recipe, trained)
    optimizer = optimizer_of(recipe, [each for _, each in trained] if named is None else named)
    masks = DropoutMasks(seed=recipe.seed)
    if recipe.dropout:
        masks.apply(model, names=names_of(recipe))
    attached: list[torch.Tensor] = []
    for layer in model.layers if recipe.attaches else ():
        layer.attach = lambda output, loss: attached.append(loss) or output
    for step in range(UPDATES):
        attached.clear()
        parts = [
            (replica, number, part)
            for replica in range(recipe.replicas)
            for number, part in enumerate(_parts(recipe, batch_of(recipe, step, replica)))
        ]
        sums = []
        for masks.lane, masks.microbatch, part in parts:
            masks.step = step
            sums.append(_sum(recipe, model(**part), part))
        total, count = (sum(each[place] for each in sums) for place in (0, 1))
        (total / count + sum(attached) / len(parts)).backward()
        losses.append((total / count).item())
        if recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_([each for _, each in trained], recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        if recipe.evaluates:
            modes = [(module, module.training) for module in model.modules()]
            model.eval()
            with torch.no_grad():
                sums = [_sum(recipe, model(**part), part) for _, _, part in parts]
            evaluated.append((sum(each[0] for each in sums) / sum(each[1] for each in sums)).item())
            for module, mode in modes:
                module.training = mode
    return losses, evaluated, dict(model.named_parameters())


def _sum(recipe: Recipe, losses: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    found = loss_of(recipe, losses, batch)
    return found if isinstance(found, tuple) else (found * len(losses), len(losses))


def _parts(recipe: Recipe, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The batch of a replica: whole; where masks or losses depend on the microbatch, its rows by their numbers."""
    if not recipe.by_microbatch:
        return [batch]
    rows = len(batch["ids"])
    count = recipe.cut.get("num_microbatches") or rows // recipe.cut["microbatch_size"]
    made = []
    for own in torch.arange(rows).tensor_split(count):
        weights = as_tensor(batch["weights"])[own]
        part = batch | {"ids": batch["ids"][own], "labels": batch["labels"][own], "weights": weights}
        part["names"] = [batch["names"][row] for row in own.tolist()]
        if recipe.planes:
            part["planes"] = batch["planes"].index_select(1, own)
        made.append(part)
    return made


def require_the_run_of_one_process(recipe: Recipe, folder: Any, **config: Any) -> None:
    """Three updates through `Pipeline`, saved and loaded on the way, have the losses and parameters of one process."""
    losses, evaluated, expected = in_one_process(recipe)
    world = torch.distributed.get_world_size()
    grid = HyperCommGrid([recipe.replicas, world // recipe.replicas], ["dp", "pp"])
    masks = DropoutMasks(seed=recipe.seed)

    def begun(layout: str) -> tuple[Pipeline, torch.optim.Optimizer]:
        pipeline = Pipeline(
            lambda: Model(recipe),
            layout,
            grid,
            schedule=recipe.schedule,
            loss=lambda output, batch: loss_of(recipe, output, batch),
            names=names_of(recipe),
            rows={"planes": 1},
            whole=("classes",),
            **recipe.cut,
            **config,
        )
        masks.lane = pipeline.replica
        for stage in pipeline.stages["model"] if recipe.dropout else ():
            masks.apply(stage)
        named = options(recipe, list(pipeline.named_parameters()))
        return pipeline, optimizer_of(recipe, pipeline.parameters() if named is None else named)

    pipeline, optimizer = begun(recipe.layouts[0])
    for masks.step in range(UPDATES):
        batch = batch_of(recipe, masks.step, pipeline.replica)
        _require_close(pipeline.step(batch), losses[masks.step], "loss")
        if recipe.clip is not None:
            pipeline.clip(recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        if recipe.evaluates:
            _require_close(pipeline.evaluate(batch), evaluated[masks.step], "evaluation")
        if recipe.saves and masks.step == 0:
            pipeline.save(folder, optimizer, step=1)
            pipeline.close()
            pipeline, optimizer = begun(recipe.layouts[1])
            assert pipeline.load(folder, optimizer).step == 1
    for name, parameter in pipeline.named_parameters():
        _require_close(parameter, expected[name], name)
    pipeline.close()


def _require_close(found: torch.Tensor, expected: Any, name: str) -> None:
    right = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(
        found.detach().double(), right.detach(), rtol=1e-8, atol=1e-10, msg=partial("{}: {}".format, name)
    )
