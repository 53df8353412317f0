"""A small job of an encoder and a language model in any layout, and the same in one process: for checkpoint tests."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn
from torch.nn import functional as F

from pipegrid.bridges import EdgeOptions, ModuleGraph, MultiModulePipelineCommunicator
from pipegrid.schedules import PipelineConfig, get_forward_backward_func, stage_places, step_plan
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, replica_samples
from pipegrid.training import Names, TrainingState, cut, tie

WORDS, WIDTH, LAYERS, LENGTH, ROWS, MICROBATCHES = 11, 6, 8, 5, 8, 4
PARTS = {"images": Names("layers"), "language": Names("blocks")}


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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.mix(self.norm(x)))


class Language(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
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


def microbatch(step, number):
    generator = torch.Generator().manual_seed(1000 * step + number)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=generator)
    return torch.randn(ROWS, LENGTH, 3, generator=generator, dtype=torch.float64), ids


def loss_of(targets, logits):
    loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="sum")
    return loss, torch.tensor(targets.numel()), loss.detach()


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
        """The loss of a step, summed over words."""
        total, tokens = 0.0, 0
        for index in range(MICROBATCHES):
            pixels, ids = microbatch(number, index)
            logits = self.modules["language"](ids[:, :-1], self.modules["images"](pixels))
            loss, count, _ = loss_of(ids[:, 1:], logits)
            loss.backward()
            total, tokens = total + loss.item(), tokens + count
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= tokens
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class Job:
    """One rank of a layout."""

    def __init__(self, layout, *, seed=1, plan=False):
        self.layout, rank = layout, dist.get_rank()
        places = stage_places(layout.schedule, layout.pp, layout.vpp)
        language = HyperCommGrid([layout.dp, layout.pp], ["dp", "pp"])
        if layout.placement == "separate":
            encoder = HyperCommGrid([1, 1], ["dp", "pp"], rank_offset=layout.pp * layout.dp)
        else:
            encoder = HyperCommGrid([layout.pp * layout.dp, 1], ["dp", "pp"])
        self.grids = {"images": encoder, "language": language}
        for grid in self.grids.values():
            grid.create_pgs(["dp", "pp"])
        whole = modules(layout, seed=seed)
        per = LAYERS // len(places)
        texts = {"images": "ee", "language": "|".join("t" * per for _ in places)}
        self.stages = {}
        for name, numbers in (("images", (0,)), ("language", range(len(places)))):
            grid = self.grids[name]
            if rank in grid.ranks:
                place = grid.coords(rank)["pp"]
                own = [n for n in numbers if name == "images" or places[n] == place]
                output = nn.Identity() if name == "images" else None
                self.stages[name] = cut(whole[name], texts[name], own, names=PARTS[name], module=name, output=output)
        text = whole["language"]
        ties = cut(text, texts["language"], 0, names=PARTS["language"]).ties
        graph = {"images": ["language"], "language": []}
        edges = {("images", "language"): EdgeOptions(backward=not layout.frozen)}
        placement = {"language": places}
        dims = {"b": 0, "s": 1, "h": 2}

        def communicator(config):
            return MultiModulePipelineCommunicator(
                self.grids, graph, config, dim_mapping=dims, edges=edges, stage_placement=placement
            )

        options = {"pipeline_dtype": torch.float64, "calculate_per_token_loss": True, "deadline": 60.0}
        modules_of = ModuleGraph({"images": 1, "language": len(places)}, [("images", "language")])
        config = PipelineConfig(
            **options,
            tied_parameters=tie(
                ties,
                self.stages.get("language", []),
                self.grids,
                graph=modules_of,
                module="language",
                placement=places,
            ),
        )
        self.communicator = communicator(config)
        self.plan = None
        if plan:
            self.plan = step_plan(
                self.communicator.graph,
                MICROBATCHES,
                placement=self.communicator.positions.placement,
                collectives=self.communicator.collective_edges,
                schedule=layout.schedule,
            )
        for stages in self.stages.values():
            for stage in stages:
                stage.config = config
        self.groups = {name: ProcessGroupCollection.from_grid(self.grids[name]) for name in self.stages}
        unique = {id(p): p for stages in self.stages.values() for stage in stages for p in stage.parameters()}
        self.optimizer = optimizer_of(unique.values())
        self.state = TrainingState(
            stages=self.stages, optimizers=[self.optimizer], plan=self.plan, grids=self.grids, layout=texts
        )

    def share(self, module):
        lane = replica_samples(ROWS, self.grids[module])
        return slice(lane.start, lane.stop)

    def step(self, number):
        """The loss of a step summed over all words of the job, the same on every rank."""

        def forward_step(batches, stage):
            pixels, ids = next(batches)
            share = self.share(stage.module)
            if stage.module == "images":
                return stage(pixels[share]), None
            seen = stage.received["images"] if stage.is_first else None
            return stage(ids[share, :-1], seen=seen), partial(loss_of, ids[share, 1:])

        infos = get_forward_backward_func(schedule=self.layout.schedule)(
            forward_step_func=forward_step,
            data_iterator={
                name: [(microbatch(number, index) for index in range(MICROBATCHES)) for _ in stages]
                for name, stages in self.stages.items()
            },
            model=self.stages,
            num_microbatches=MICROBATCHES,
            p2p_communicator=self.communicator,
            pg_collection=self.groups,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for info in infos:
            total += info
        dist.all_reduce(total)
        return total.item()

    def values(self):
        """Every tensor and every entry of an optimizer state on this rank, by whole-model names."""
        return values_of(self.state)

    def close(self):
        self.communicator.destroy()


def values_of(state):
    """Every tensor and every entry of an optimizer state, by whole-model names."""
    found = {}
    for slot in state.slots():
        found[slot.held.key] = slot.tensor().detach().clone()
        for optimizer in state.optimizers:
            for entry, value in optimizer.state.get(slot.tensor(), {}).items():
                found[slot.held.key, entry] = value.clone()
    return found
