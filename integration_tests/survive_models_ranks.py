"""A rank of a job whose model has what is hard to do again, trained by the step functions; and the same in one process.

Traits of a model: ``tied`` (the words are the head), ``dropout`` (masks by unit), ``scaled`` (a loss scaler, and a step
that overflows), ``per_token``, ``frozen`` (a layer), ``frozen_stage`` (all of the first stage), ``norm`` (running
statistics), ``main_grad``.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import nn
from torch.nn import functional as F

from pipegrid.gradients import accumulate_in_main_grad
from pipegrid.schedules import (
    SCHEDULES,
    LossScale,
    LossScaler,
    PipelineConfig,
    UnitBatches,
    clip_grad_norm_,
    forward_backward_with_schedule,
    tie_parameters,
    zero_main_grads,
)
from pipegrid.schedules.megatron import prepared
from pipegrid.schedules.runtime import actions
from pipegrid.survive import PipelineJob, Survivors, kept
from pipegrid.topology import HyperCommGrid
from pipegrid.training import DropoutMasks

from . import survive_ranks
from .kit.models import Model
from .kit.tensor_parallel import Block
from .survive_cases import Case, Places

MICROBATCHES, WIDTH, WORDS, SAMPLES, LENGTH, CLIP = 3, 4, 7, 2, 3, 0.5
OVERFLOWS = 2  # the step in which the loss of a unit is infinite
TRAITS = ("tied", "dropout", "scaled", "per_token", "frozen", "norm", "main_grad")


@frozen
class ModelCase(Case):
    """A `Case` with the ``traits`` of its model; ``pairs`` are tensor-parallel ranks."""

    traits: tuple[str, ...] = ()
    microbatches: int = MICROBATCHES
    add: str = "as_computed"
    mistake: str | None = None

    @property
    def tp(self) -> int:
        return 2 if self.pairs else 1

    @property
    def world_size(self) -> int:
        return self.positions * self.replicas * self.tp

    @property
    def units(self) -> int:
        return self.replicas * self.microbatches


class Layer(nn.Module):
    def __init__(self, number, case, group):
        super().__init__()
        self.block = Block(number, WIDTH, group)
        self.statistics = nn.BatchNorm1d(WIDTH, dtype=torch.float64) if "norm" in case.traits else nn.Identity()
        self.dropout = nn.Dropout(0.3 if "dropout" in case.traits else 0.0)
        if group is not None:
            for name in ("A", "a", "B"):
                self.block.get_parameter(name).tensor_model_parallel = True

    def forward(self, x):
        y = torch.tanh(self.block(x))
        return self.dropout(self.statistics(y.flatten(0, 1)).view_as(y))


class Part(Model):
    """A stage: the words on the first, a layer on each, the head on the last."""

    def __init__(self, number, case, config=None, group=None):
        super().__init__(config)
        self.number, self.current_microbatch, self.current_replica = number, 0, None
        self.is_last = number == case.positions - 1
        generator = torch.Generator().manual_seed(99)
        words = torch.randn(WORDS, WIDTH, generator=generator, dtype=torch.float64)
        if number == 0:
            self.words = nn.Parameter(words)
        self.layers = nn.ModuleList([Layer(number, case, group)])
        if self.is_last:
            self.head = nn.Parameter(words.clone())
        if number == 0 and {"frozen", "frozen_stage"} & set(case.traits):
            (self if "frozen_stage" in case.traits else self.layers[0].block).requires_grad_(requires_grad=False)

    def forward(self, x):
        x = self.layers[0](self.words[x] if self.number == 0 else x)
        return x @ self.head.T if self.is_last else x


def tokens_of(step, replica, microbatch):
    """The tokens of a unit, and which of them count."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * replica + microbatch)
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    return tokens, torch.rand(SAMPLES, LENGTH, generator=generator) < 0.6


def loss_of(case, step, unit, output):
    """The loss, the tokens in it or None, and the loss as it is written down."""
    tokens, counted = tokens_of(step, *unit)
    found = F.cross_entropy(output.flatten(0, 1), tokens.roll(1, 1).flatten(), reduction="none")
    per_token = "per_token" in case.traits
    loss = (found * counted.flatten()).sum() if per_token else found.mean()
    noted = loss.detach()
    if "scaled" in case.traits and step == OVERFLOWS and unit == (case.replicas - 1, 1):
        loss = loss * math.inf
    return loss, counted.sum() if per_token else None, noted


def scaler_of(case):
    return LossScaler(LossScale(scale=2.0**16, growth_interval=2)) if "scaled" in case.traits else None


def optimizer_of(models):
    parameters = {id(p): p for model in models for p in model.parameters()}
    return torch.optim.SGD(parameters.values(), lr=0.3, momentum=0.9)


class OnRank:
    """This rank's part: its stage, its ties, and the functions of a step."""

    def __init__(self, case: ModelCase, places: Places) -> None:
        self.case, self.places, self.step = case, places, 0
        self.grid = grid = HyperCommGrid([case.tp, case.replicas, case.positions], ["tp", "dp", "pp"])
        grid.create_pgs(["tp", "pp"])
        self.at = grid.coords(dist.get_rank())
        self.scaler = scaler_of(case)
        self.config = PipelineConfig(
            pipeline_dtype=torch.float64,
            calculate_per_token_loss="per_token" in case.traits,
            grad_scale_func=self.scaler,
            grad_add=case.add,
            hooks=(places,),
            deadline=20.0,
            open_deadline=300.0,
            variable_seq_lengths=True,
        )
        tp = grid.get_pg("tp") if case.tp > 1 else None
        self.model = Part(self.at["pp"], case, self.config, tp)
        if "main_grad" in case.traits:
            accumulate_in_main_grad(self.model, dtype=torch.float64)
        if "tied" in case.traits:
            ends = (0, case.positions - 1)
            names = dict(zip(ends, ("words", "head"), strict=True))
            copies = {n: getattr(self.model, names[n]) for n in ends if n == self.at["pp"]}
            ties = (tie_parameters("words", copies, stages=ends, grids=grid),)
            self.model.config = evolve(self.config, tied_parameters=ties)
        self.masks = DropoutMasks(seed=5, lane=self.at["dp"])
        if "dropout" in case.traits:
            self.masks.apply(self.model)
        self.optimizer = optimizer_of([self.model])
        plan = SCHEDULES[case.schedule].plan(case.positions, case.microbatches)
        self.job = PipelineJob(grid, plan, self.config, timeout=300.0)

    def forward_step(self, batches, model):
        self.places.reach("forward")
        replica = self.at["dp"] if model.current_replica is None else model.current_replica
        unit = (replica, model.current_microbatch)
        self.masks.step, self.masks.microbatch = self.step, model.current_microbatch
        (x,) = model.received
        y = model(next(batches)[0] if x is None else x)

        def loss_func(output):
            loss, count, noted = loss_of(self.case, self.step, unit, output)
            info = unit[0] * self.case.microbatches + unit[1], noted
            return (loss, info) if count is None else (loss, count, info)

        return y, loss_func

    def train(self, world):
        """Forwards, backwards, the reduction; the sum of the losses, which is on one rank and may die with it."""
        if self.case.tp > 1:
            self.model.layers[0].block.group = world.groups.tp
        losses = forward_backward_with_schedule(
            schedule=self.case.schedule,
            forward_step_func=self.forward_step,
            data_iterator=UnitBatches(partial(tokens_of, self.step)),
            model=self.model,
            num_microbatches=self.case.microbatches,
            p2p_communicator=world.communicator,
            pg_collection=world.groups,
            routes=world.routes,
        )
        every = torch.zeros(self.case.units, dtype=torch.float64)
        for unit, loss in losses if self.at["tp"] == 0 else ():
            every[unit] = loss
        dist.all_reduce(every, group=world.job_group)
        self.places.reach("after step")
        return every.sum()

    def clip(self, world):
        """The norm; None where a gradient has overflowed."""
        self.places.reach("unscale")
        if self.scaler is not None and not self.scaler.unscale(self.model):
            return None
        self.places.reach("clip")
        norm = clip_grad_norm_(self.model, world.groups, CLIP, job_group=world.job_group, add=self.case.add)
        self.places.reach("after clip")
        return norm

    def steps(self, store):
        """The losses, and the norms of the steps that did not overflow."""
        case, places, totals, norms = self.case, self.places, [], []
        self.survivors = survivors = Survivors(
            store,
            self.job,
            modules=self.model,
            heartbeat=case.heartbeat,
            deadline=case.deadline,
            retire=self.job.retire,
        )
        with places.around(survivors):
            for self.step in range(case.steps):
                places.begin(self.step)
                places.reach("between")
                totals.append(survivors.run(f"step {self.step}", self.train))
                places.reach("in between")
                norm = survivors.run(f"clip {self.step}", self.clip)
                if norm is not None:
                    norms.append(norm)
                    places.reach("optimizer")
                    for parameter in self.model.parameters():
                        if getattr(parameter, "main_grad", None) is not None:
                            parameter.grad = parameter.main_grad
                    self.optimizer.step()
                zero(self.model, self.optimizer)
                places.reach("after optimizer")
        return totals, norms


def zero(model, optimizer):
    optimizer.zero_grad()
    zero_main_grads(model)


def models(case: ModelCase, places: Places, store) -> dict[str, object]:
    """The job of a rank, which may also be killed as it comes to a collective of gradients."""
    dist.all_reduce = places.within("all_reduce", dist.all_reduce)
    if case.mistake is not None:
        MISTAKES[case.mistake]()
    rank = OnRank(case, places)
    totals, norms = rank.steps(store)
    weights = named(case, rank.model, rank.scaler, totals, norms, tp=rank.at["tp"], replica=rank.at["dp"])
    return {"weights": weights, "events": [str(event) for event in rank.survivors.events]}


def named(case, model, scaler, totals, norms, *, tp, replica):
    """What a rank has in the end; shards by their tp rank, and statistics by their replica."""
    found = {"losses": torch.stack(totals), "norms": torch.stack(norms)}
    if scaler is not None:
        found["scale"] = torch.tensor([scaler.state.scale, scaler.skipped])
    for name, value in model.named_parameters():
        shard = f" of tp {tp}" if case.tp > 1 and name.endswith((".A", ".a", ".B")) else ""
        found[f"{model.number}.{name}{shard}"] = value.detach()
    for name, value in model.named_buffers():
        found[f"{model.number}.{name} of {replica}"] = value
    return found


def models_alone(case: ModelCase) -> dict[str, torch.Tensor]:
    """The same training in one process, with one set of running statistics for each replica."""
    parts, scaler = [Part(number, case) for number in range(case.positions)], scaler_of(case)
    if "tied" in case.traits:
        parts[-1].head = parts[0].words
    masks = DropoutMasks(seed=5)
    for part in parts:
        if "dropout" in case.traits:
            masks.apply(part)
    statistics = [[{n: b.clone() for n, b in part.named_buffers()} for part in parts] for _ in range(case.replicas)]
    optimizer, totals, norms = optimizer_of(parts), [], []
    for masks.step in range(case.steps):
        units = [(r, m) for r in range(case.replicas) for m in range(case.microbatches)]
        tokens = sum(tokens_of(masks.step, *unit)[1].sum() for unit in units)
        divisor, notes = tokens if "per_token" in case.traits else case.units, []
        for replica, masks.microbatch in units:
            x = tokens_of(masks.step, replica, masks.microbatch)[0]
            for part, own in zip(parts, statistics[replica], strict=True):
                part.current_replica = replica
                x = torch.func.functional_call(part, own, (x,))
            loss, _, noted = loss_of(case, masks.step, (replica, masks.microbatch), x)
            ((loss if scaler is None else scaler(loss)) / divisor).backward()
            notes.append(noted)
        totals.append(torch.stack(notes).sum())
        if scaler is None or scaler.unscale(nn.ModuleList(parts)):
            parameters = optimizer.param_groups[0]["params"]
            norms.append(nn.utils.clip_grad_norm_(parameters, CLIP))
            optimizer.step()
        optimizer.zero_grad()
    found = {}
    for replica in range(case.replicas):
        for tp in range(case.tp):
            for part, own in zip(parts, statistics[replica], strict=True):
                shown = named(case, part, scaler, totals, norms, tp=tp, replica=replica)
                shown |= {f"{part.number}.{name} of {replica}": value for name, value in own.items()}
                for name in shown:
                    if name.endswith(f" of tp {tp}"):
                        dim = 0 if name.endswith((f".a of tp {tp}", f".B of tp {tp}")) else 1
                        shown[name] = shown[name].chunk(case.tp, dim)[tp]
                found |= shown
    return found


def masks_of_the_computing_rank():
    base = DropoutMasks.base
    DropoutMasks.base = lambda self, microbatch, replica=None: base(self, microbatch)


# What each promise would be silently false by. Each is planted in the processes of one job alone.
MISTAKES = {
    "a divisor of those that live": lambda: setattr(
        prepared, "units_per_replica", lambda routes: routes.num_units / (routes.num_replicas - 1)
    ),
    "masks of the rank that computes": masks_of_the_computing_rank,
    "statistics of the rank that computes": lambda: setattr(
        actions, "for_another_replica", lambda stage, forward: forward()
    ),
    "buffers as they are": lambda: setattr(kept, "_buffers_of", lambda stage: ()),
    "gradients as they are": lambda: setattr(kept, "_PLACES", ()),
    "loss scales as they are": lambda: setattr(kept, "LossScaler", kept.KeptState),
}

PLACES = ("forward", "F", "after F", "B", "after B", "all_reduce", "after all_reduce", "after step", "vote", "done")
PLACES += ("unscale", "clip", "after clip", "optimizer", "after optimizer", "between", "after done")
IN_HALVES = (*[place for place in PLACES if place not in ("B", "after B")], "I", "after I", "W", "after W")

survive_ranks.JOBS["models"] = models
survive_ranks.ALONE["models"] = models_alone
