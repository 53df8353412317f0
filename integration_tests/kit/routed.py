"""Steps in which replicas differ: a graph of modules on ranks, and the same units in one process, by raw routes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import nn

from pipegrid.bridges import EdgeOptions, ModuleGraph, MultiModulePipelineCommunicator
from pipegrid.gradients.reduction import ties_among
from pipegrid.schedules import (
    UnitBatches,
    WithLoss,
    chain,
    clip_grad_norm_,
    stage_places,
    tie_parameters,
)
from pipegrid.schedules.megatron.step_functions import forward_backward_with_schedule
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.transport import P2PCommunicator

from .data import coins, normal
from .grids import grids_of
from .models import Model, call, config_for, counted_loss

LENGTH, BATCH, WIDTH = 2, 3, 4


class Layer(Model):
    """A stage of one weight matrix; the step functions number its microbatches."""

    def __init__(self, number, config=None):
        super().__init__(config)
        self.number, self.current_microbatch, self.current_replica = number, 0, None
        self.weight = nn.Parameter(normal(number, WIDTH, WIDTH))

    def forward(self, x):
        return torch.tanh(x @ self.weight)


def load(name, replica, microbatch):
    """What the first stage of module ``name`` reads for a microbatch of a home replica."""
    return normal(1000 * replica + 10 * microbatch + len(name), LENGTH, BATCH, WIDTH)


def tokens(replica, microbatch):
    """Which tokens count: more in some microbatches and replicas than in others."""
    return coins(5000 + 100 * replica + microbatch, LENGTH, BATCH)


@frozen
class Job:
    """``places`` has the offset and the dims of each module's grid, ``flow`` the modules that each module feeds.

    ``own_loss``: a module whose last stage has a loss of its own, the mean over the microbatches of a call. ``frozen``
    modules have no backward; with ``tied`` the first and the last stage share their weights.
    """

    ranks: int
    places: dict
    flow: dict
    schedule: str = "1f1b"
    per_token: bool = False
    own_loss: str | None = None
    frozen: tuple = ()
    tied: bool = False

    def of(self, schedule):
        """The same job with another schedule."""
        return evolve(self, schedule=schedule)


def part_of(routes, unit, source, x):
    """Of what a call of ``source`` made, the part of ``unit``: its batches are side by side."""
    place = routes.served(routes.call(unit, source), source).index(unit)
    return x[:, place * BATCH : (place + 1) * BATCH]


def joined(routes, module, number, own, arrived):
    """The input of a first stage: the batches of its call, each with what arrives for it from other modules."""
    parts = list(own)
    for source, x in arrived.items():
        for place, unit in enumerate(routes.served(number, module)):
            if not routes.skips_module(unit, source):
                parts[place] = parts[place] + part_of(routes, unit, source, x)
    return torch.cat(parts, dim=1)


def in_one_process(job, graph, routes):
    """The stages with the gradients of one step of all units."""
    stages = [Layer(number) for number in range(graph.num_stages)]
    if job.tied:
        stages[-1].weight = stages[0].weight
    values, losses, total = {}, [], routes.num_units
    if job.per_token:
        total = sum(tokens(routes.home(u), routes.microbatch(u)).sum() for u in range(routes.num_units))
    for stage, model in enumerate(stages):
        module, index = graph.module_of(stage)
        for number in routes.calls(module):
            units = [(routes.home(unit), routes.microbatch(unit)) for unit in routes.served(number, module)]
            if index:
                x = values[stage - 1, number]
            else:
                arrived = {}
                for source in [source for source, destination in graph.edges if destination == module]:
                    for unit in routes.served(number, module):
                        if not routes.skips_module(unit, source):
                            arrived[source] = values[graph.stage(source, -1), routes.call(unit, source)]
                x = joined(routes, module, number, [load(module, *unit) for unit in units], arrived)
            output = model(x)
            values[stage, number] = output.detach() if module in job.frozen else output
            if graph.stage(module, -1) == stage and module == job.own_loss:
                losses.append(len(units) * output.square().mean() / total)
            if graph.stage(module, -1) == stage and module in graph.sinks:
                losses.append(counted_loss(output, tokens(*units[0]), per_token=job.per_token)[0] / total)
    sum(losses).backward()
    return stages


class OnRanks:
    """This rank's part of a job; its replica is that of its first module. ``moves``: units may move over bridges."""

    moves = False

    def __init__(self, job, ranks, **options):
        self.job = job
        self.grids = grids_of(job.places, ("tp", "dp", "pp"))
        for grid in self.grids.values():
            grid.create_pgs(["tp", "dp", "pp"])
        self.config = config_for(
            ranks,
            calculate_per_token_loss=job.per_token,
            variable_seq_lengths=True,
            deadline=30.0,
            open_deadline=30.0,
            **options,
        )
        last = list(self.grids)[-1]  # the schedule is that of the module with the loss
        self.places = stage_places(job.schedule, self.grids[last].dim_size("pp"))
        self.communicator, self.graph, stages = self.connect(last)
        self.models = {number: Layer(number, self.config).to(ranks.device) for number in stages}
        if job.tied:
            ends = (0, self.graph.num_stages - 1)
            with torch.no_grad():
                for number in set(self.models) & {ends[1]}:
                    self.models[number].weight.copy_(Layer(0).weight)
            copies = {number: self.models[number].weight for number in ends if number in self.models}
            self.configure(
                tied_parameters=(tie_parameters("ends", copies, stages=ends, grids=self.grids[last], graph=self.graph),)
            )
        held = {self.graph.module_of(number)[0] for number in self.models}
        self.groups = {name: ProcessGroupCollection.from_grid(self.grids[name]) for name in held}
        self.replica = dist.get_rank(next(iter(self.groups.values())).dp)
        self.device = ranks.device

    def configure(self, **options):
        """Give the models another config."""
        self.config = evolve(self.config, **options)
        for model in self.models.values():
            model.config = self.config

    def connect(self, last):
        """The communicator, the graph, and the stages of this rank."""
        flow = {name: self.job.flow.get(name, []) for name in self.grids}
        edges = {(name, other): EdgeOptions(backward=False) for name in self.job.frozen for other in flow[name]}
        places = {last: self.places}
        made = MultiModulePipelineCommunicator(
            self.grids, flow, self.config, stage_placement=places, edges=edges, replicas=self.moves
        )
        return made, made.graph, made.stages

    def by_module(self, values):
        """Values by stage as a step function takes them: by module, a list where it has several stages here."""
        found = {}
        for number, value in values.items():
            found.setdefault(self.graph.module_of(number)[0], []).append(value)
        return {name: each[0] if len(each) == 1 else each for name, each in found.items()}

    def data(self, routes, *, by_unit):
        """The data of each stage here: by unit, or an item for each call of this replica, in order."""

        def of(number):
            name, _ = self.graph.module_of(number)
            if by_unit:
                return UnitBatches(lambda replica, microbatch: load(name, replica, microbatch))
            first = routes.units_of(self.replica).start
            calls = [number for number in routes.calls(name) if routes.home(number) == self.replica]
            return iter([[load(name, self.replica, u - first) for u in routes.served(c, name)] for c in calls])

        return self.by_module({number: of(number) for number in self.models})

    def forward_step(self, routes):
        graph = self.graph

        def forward(iterator, model):
            name, index = graph.module_of(model.number)
            home = self.replica if model.current_replica is None else model.current_replica
            number = routes.unit(home, model.current_microbatch)
            received = model.received if isinstance(model.received, dict) else {name: model.received[0]}
            if index:
                (x,) = received.values()
            else:
                own = list(iterator) if isinstance(iterator, UnitBatches) else next(iterator)
                arrived = {source: x for source, x in received.items() if x is not None}
                x = joined(routes, name, number, [each.to(self.device) for each in own], arrived)
            output = model(x)
            if graph.stage(name, -1) == model.number and name in graph.sinks:
                counted = tokens(home, model.current_microbatch).to(self.device)

                def loss_func(output):
                    *loss, _ = counted_loss(output, counted, per_token=self.job.per_token)
                    return *loss, number

                return output, loss_func
            carried = {name: output} if len(graph.modules) > 1 else output
            if graph.stage(name, -1) == model.number and name == self.job.own_loss:
                carried = WithLoss(carried, output.square().mean())
            return carried, None

        return forward

    def step(self, routes, *, by_unit=False, **options):
        """One step along ``routes``, with fresh gradients; the infos."""
        for model in self.models.values():
            model.zero_grad()
        given = {
            "forward_step_func": self.forward_step(routes),
            "data_iterator": self.data(routes, by_unit=by_unit),
            "pg_collection": self.groups,
            "schedule": self.job.schedule,
            "p2p_communicator": self.communicator,
            "routes": routes,
        }
        models = self.by_module(self.models)
        return call(forward_backward_with_schedule, model=models, count=routes.units[self.replica], **given | options)

    def check(self, routes, *, rtol=1e-11, **options):
        """One step has the gradients of one process, and the infos of the microbatches that this rank computes."""
        infos = self.step(routes, **options)
        expected = in_one_process(self.job, self.graph, routes)
        for number, model in self.models.items():
            wanted = expected[number].weight.grad
            wanted = torch.zeros(WIDTH, WIDTH, dtype=torch.float64) if wanted is None else wanted
            found = torch.zeros_like(model.weight) if model.weight.grad is None else model.weight.grad
            torch.testing.assert_close(found.cpu(), wanted, rtol=rtol, atol=1e-13)
        sinks = [
            number for number in self.models if number in {self.graph.stage(name, -1) for name in self.graph.sinks}
        ]
        here = [
            number
            for stage in sinks
            for number in routes.calls(self.graph.module_of(stage)[0])
            if routes.of(number, stage) == self.replica
        ]
        assert infos == here
        norms = [stage.weight.grad.norm() for stage in expected if stage.weight.grad is not None]
        if self.job.tied:
            del norms[-1]
        models, parts = self.by_module(self.models), self.groups
        found = clip_grad_norm_(models, parts, 1e9, job_group=self.config.job_group)
        torch.testing.assert_close(found.cpu(), torch.stack(norms).norm(), rtol=rtol, atol=0)


class Across(OnRanks):
    """A job whose communicator also leads to other replicas: of one module lanes, of several bridges as well."""

    moves = True

    def connect(self, last):
        if len(self.grids) > 1:
            return super().connect(last)
        grid = self.grids[last]
        replicas = [list(row) for row in grid.get_rank_enum("pp")]
        pipeline = grid.get_pg("pp")
        made = P2PCommunicator(pipeline, self.config, placement=self.places, replicas=replicas)
        here = dist.get_rank(pipeline)
        return made, chain(len(self.places)), [stage for stage, place in enumerate(self.places) if place == here]

    def bury(self, dead):
        """Groups of the ranks that are not ``dead``, made by all of them; whether this rank lives."""
        rows = {(name, tuple(row)) for name, grid in self.grids.items() for row in grid.get_rank_enum("dp")}
        living = sorted({rank for _, row in rows for rank in row} - set(dead))
        here, before = dist.get_rank(), self.groups
        self.groups = {}
        for name, row in sorted(rows):
            group = dist.new_group([rank for rank in row if rank not in dead])
            if here in row and here not in dead:
                self.groups[name] = Living(group, tp=before[name].tp)
        everyone = dist.new_group(living)
        if here not in dead:
            ties = ties_among(self.config.tied_parameters, living, label="after a death")
            self.configure(job_group=everyone, tied_parameters=ties)
        return here not in dead


class OneGrid(Across):
    """A job of several modules on the pipelines of one grid, in the order of the modules, under `P2PCommunicator`."""

    def connect(self, last):
        depths = {name: grid.dim_size("pp") for name, grid in self.grids.items()}
        graph = ModuleGraph(depths, [(name, other) for name, others in self.job.flow.items() for other in others])
        grid = HyperCommGrid([self.grids[last].dim_size("dp"), graph.num_stages], ["dp", "pp"])
        pipeline = grid.create_pg("pp")
        replicas = [list(row) for row in grid.get_rank_enum("pp")]
        made = P2PCommunicator(pipeline, self.config, replicas=replicas, graph=graph)
        return made, graph, made.job.stages


@frozen
class Living:
    """The process groups of a rank that lives."""

    dp: object
    cp: None = None
    tp: None = None
