"""A rank of an encoder and a language model that survive deaths: on one grid, or on one grid each over a bridge."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist
from attrs import frozen

from pipegrid.bridges import ModuleGraph
from pipegrid.schedules import PipelineRuntime, Routes, clip_grad_norm_, schedule_for
from pipegrid.schedules.runtime import Forwarded
from pipegrid.survive import PipelineJob, Survivors
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import P2PConfig

from . import survive_ranks
from .survive_cases import HALVES, PLACES, Case, Places, all_kills
from .survive_pipelines import MICROBATCHES, WIDTH, History, loss_of, module, optimizer_of, train_on
from .survive_ranks import ALONE, JOBS

GRAPH = ModuleGraph({"images": 1, "text": 2}, [("images", "text")])
STAGES = GRAPH.num_stages


@frozen
class ModulesCase(Case):
    """An encoder of one position and a language model of two, ``replicas`` each; rank ``p * replicas + r`` is ``p@r``.

    ``bridge``: each module has a grid of its own. ``skips``: units without an image.
    """

    job: str = "modules"
    positions: int = STAGES
    bridge: bool = False
    skips: tuple[int, ...] = ()
    strict: bool = False


def read(what: str, step: int, unit: int) -> torch.Tensor:
    seed = 1000 * step + 10 * unit + len(what)
    return torch.randn(2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def output_of(stage: int, model, step: int, unit: int, arrived) -> torch.Tensor:
    """What a stage makes of ``unit``: the first of each module reads data; what arrives is added."""
    name, index = GRAPH.module_of(stage)
    parts = list(arrived) if index else [read(name, step, unit), *arrived]
    return model(sum(parts[1:], parts[0]))


def modules(case: ModulesCase, places: Places, store) -> dict[str, object]:
    rank, replicas = dist.get_rank(), case.replicas
    stage, replica = divmod(rank, replicas)
    if case.bridge:
        grid = {
            name: HyperCommGrid(
                [replicas, GRAPH.depth(name)], ["dp", "pp"], rank_offset=replicas * GRAPH.stage(name, 0)
            )
            for name in GRAPH.order
        }
    else:
        grid = HyperCommGrid([replicas, STAGES], ["dp", "pp"])
        grid.create_pg("pp")
    units, model = replicas * MICROBATCHES, module(stage)
    optimizer, losses = optimizer_of(model), list[torch.Tensor]()
    plan = schedule_for(GRAPH, case.schedule, MICROBATCHES)
    config = P2PConfig(deadline=20.0, open_deadline=300.0, strict=case.strict)
    routes = Routes((MICROBATCHES,) * replicas, skips={"images": case.skips})
    options = {"module_output_ndim": {"images": 2}} if case.bridge else {}
    job = PipelineJob(grid, plan, config, routes=routes, timeout=300.0, options=options)
    outgoing = [edge for edge in GRAPH.stage_edges if edge.source == stage]

    class Stage:
        def forward(self, number, inputs):
            places.reach("forward")
            unit = number if world_of[0].plan.routes else number + replica * MICROBATCHES
            output = output_of(stage, model, places.step, unit, inputs.values())
            if outgoing:
                return Forwarded(dict.fromkeys(outgoing, output))
            loss = loss_of(output, units)
            losses.append(loss.detach())
            return Forwarded({}, loss)

    def reduce(world):
        places.reach("REDUCE")
        group = (world.groups[GRAPH.module_of(stage)[0]] if case.bridge else world.groups).dp
        for parameter in model.parameters():
            if parameter.grad is None:  # of a stage whose units are all elsewhere
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
        places.reach("after REDUCE")

    world_of = [None]

    def train(world):
        losses.clear()
        world_of[0] = world
        differ = world.plan.routes is not None
        if getattr(world, "runtime", None) is None:
            world.runtime = PipelineRuntime(
                world.proof,
                {stage: Stage()},
                world.communicator,
                replica=world.actor.replica if differ else None,
                reducers={stage: partial(reduce, world)} if differ else {},
                hooks=[places],
            )
        optimizer.zero_grad()
        world.runtime.step(finish=None if differ else partial(reduce, world))
        total = sum(losses, torch.zeros((), dtype=torch.float64))
        dist.all_reduce(total, group=world.job_group)
        places.reach("after step")
        return total

    def norm_of(world):
        places.reach("norm")
        by_module = {GRAPH.module_of(stage)[0]: model} if case.bridge else model
        norm = clip_grad_norm_(by_module, world.groups, math.inf, job_group=world.job_group)
        places.reach("after norm")
        return norm

    survivors = Survivors(
        store, job, modules=model, heartbeat=case.heartbeat, deadline=case.deadline, retire=job.retire
    )
    return train_on(survivors, case, places, model, stage, optimizer, train, norm_of, History())


def modules_alone(case: ModulesCase) -> dict[str, torch.Tensor]:
    models = [module(number) for number in range(STAGES)]
    optimizers, units, norms, totals = [optimizer_of(model) for model in models], case.replicas * MICROBATCHES, [], []
    for step in range(case.steps):
        totals.append(torch.zeros((), dtype=torch.float64))
        for unit in range(units):
            values = [output_of(0, models[0], step, unit, [])] if unit not in case.skips else []
            for stage in range(1, STAGES):
                values = [output_of(stage, models[stage], step, unit, values)]
            loss = loss_of(values[0], units)
            loss.backward()
            totals[-1] += loss.detach()
        gradients = [parameter.grad for model in models for parameter in model.parameters()]
        norms.append(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
        for gradient in gradients:
            gradient.mul_(1.0 / norms[-1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {f"{n}.{name}": value for n, model in enumerate(models) for name, value in model.state_dict().items()}
    return {**weights, "norms": torch.stack(norms), "losses": torch.stack(totals)}


JOBS["modules"], ALONE["modules"] = modules, modules_alone
MESSAGES = {
    0: ("SEND_F", "after SEND_F", "RECV_B", "after RECV_B"),
    1: ("RECV_F", "after RECV_F", "SEND_F", "after SEND_F", "RECV_B", "after RECV_B", "SEND_B", "after SEND_B"),
    2: ("RECV_F", "after RECV_F", "SEND_B", "after SEND_B"),
}


def rank_main(case: ModulesCase, rank: int, port: int, folder: str) -> None:
    """`survive_ranks.rank_main`, with the jobs of this file."""
    survive_ranks.rank_main(case, rank, port, folder)


def whole_matrix(case: ModulesCase) -> list[ModulesCase]:
    """Every rank at every place of its own."""
    halves = [place for place in PLACES["pipeline"] if place not in ("B", "after B")] + [*HALVES]
    splits = [case.schedule != "1f1b" and stage > 0 for stage in range(STAGES)]  # an encoder's backwards stay whole
    places = [[*(halves if splits[stage] else PLACES["pipeline"]), *MESSAGES[stage]] for stage in range(STAGES)]
    left = {rank: [*places[rank // case.replicas]] for rank in range(case.world_size)}
    return all_kills(case, left)
