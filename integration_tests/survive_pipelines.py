"""A pipeline of data-parallel replicas that survives deaths, and in one process; and the training loop of the page."""

from __future__ import annotations

import math
import re
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import field, frozen

from pipegrid.schedules import PipelineRuntime, clip_grad_norm_, one_f_one_b, zero_bubble_h1
from pipegrid.survive import PipelineJob, Survivors
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import P2PConfig

from .kit.stages import Stage
from .survive_cases import Case, Places

SCHEDULES = {"1f1b": one_f_one_b, "zero_bubble": zero_bubble_h1}
MICROBATCHES, WIDTH = 4, 6


def module(number: int) -> torch.nn.Module:
    torch.manual_seed(number)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double()


def batch(step: int, unit: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * step + unit))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def loss_of(output, units):
    return output.square().sum() / units


@frozen
class History:
    """What a script has of its steps."""

    norms: list[torch.Tensor] = field(factory=list)
    losses: list[torch.Tensor] = field(factory=list)

    def state_dict(self):
        return {"norms": self.norms, "losses": self.losses}

    def load_state_dict(self, state):
        self.norms[:], self.losses[:] = state["norms"], state["losses"]


def pipeline(case: Case, places: Places, store) -> dict[str, object]:
    rank, (positions, replicas) = dist.get_rank(), (case.positions, case.replicas)
    grid = HyperCommGrid([replicas, positions], ["dp", "pp"])
    units, at = replicas * MICROBATCHES, grid.coords(rank)
    model = module(at["pp"])
    optimizer, losses = optimizer_of(model), list[torch.Tensor]()
    plan = SCHEDULES[case.schedule](positions, MICROBATCHES)
    config = P2PConfig(deadline=20.0, open_deadline=300.0)
    job = PipelineJob(grid, plan, config, timeout=300.0)

    def reduce(world):
        places.reach("REDUCE")
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=world.groups.dp)
        places.reach("after REDUCE")

    def loss(output):
        found = loss_of(output, units)
        losses.append(found.detach())
        return found

    def train(world):
        losses.clear()
        if getattr(world, "runtime", None) is None:
            stage = Stage(
                plan.graph,
                at["pp"],
                model,
                data=lambda unit: batch(places.step, unit if world.plan.routes else unit + at["dp"] * MICROBATCHES),
                loss=loss,
                before=lambda unit: places.reach("forward"),
            )
            reducers = {at["pp"]: partial(reduce, world)} if world.plan.routes else {}
            world.runtime = PipelineRuntime(
                world.proof,
                {at["pp"]: stage},
                world.communicator,
                replica=world.actor.replica if world.plan.routes else None,
                reducers=reducers,
                hooks=[places],
            )
        optimizer.zero_grad()
        world.runtime.step(finish=None if world.plan.routes else partial(reduce, world))
        # Here, not in a later function: what is on one rank only may die with it.
        total = sum(losses, torch.zeros((), dtype=torch.float64))
        dist.all_reduce(total, group=world.job_group)
        places.reach("after step")
        return total

    def norm_of(world):
        places.reach("norm")
        norm = clip_grad_norm_(model, world.groups, math.inf, job_group=world.job_group)
        places.reach("after norm")
        return norm

    history = History()
    survivors = Survivors(
        store,
        job,
        modules=model,
        state={"optimizer": optimizer, "history": history},
        heartbeat=case.heartbeat,
        deadline=case.deadline,
        retire=job.retire,
    )
    return train_on(survivors, case, places, model, at["pp"], optimizer, train, norm_of, history)


def train_on(survivors, case, places, model, number, optimizer, train, norm_of, history) -> dict[str, object]:
    """The outcome of the steps of a job: this rank's stage is ``number``."""
    with places.around(survivors):
        for step in survivors.steps(range(case.steps)):
            places.begin(step)
            places.reach("between")
            if step in case.back and dist.get_rank() == survivors.epochs.current.members[0]:
                while len(survivors.epochs.current.members) < case.world_size and not survivors.epochs.asking:
                    time.sleep(0.02)
            history.losses.append(survivors.run(f"step {step}", train))
            places.reach("in between")
            history.norms.append(survivors.run(f"norm {step}", norm_of, keep_gradients=False))
            places.reach("optimizer")
            for parameter in model.parameters():
                parameter.grad.mul_(1.0 / history.norms[-1])
            optimizer.step()
            places.reach("after optimizer")
    weights = {f"{number}.{name}": value for name, value in model.state_dict().items()}
    weights |= {"norms": torch.stack(history.norms), "losses": torch.stack(history.losses)}
    return {"weights": weights, "events": [str(event) for event in survivors.events]}


def pipeline_alone(case: Case) -> dict[str, torch.Tensor]:
    models = [module(number) for number in range(case.positions)]
    optimizers, units, norms, totals = [optimizer_of(model) for model in models], case.replicas * MICROBATCHES, [], []
    for step in range(case.steps):
        totals.append(torch.zeros((), dtype=torch.float64))
        for unit in range(units):
            value = batch(step, unit)
            for model in models:
                value = model(value)
            loss = loss_of(value, units)
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


def page(case: Case, places: Places, store) -> dict[str, object]:
    """The training loop of the page, on two stages that sum their gradients; the groups are made already."""
    text = (Path(__file__).parents[1] / "docs/concepts/survive.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Survivors(" in block)
    code = re.sub(r"^init_process_group.*$", "", code, flags=re.MULTILINE).replace("[3, 2]", "[1, 2]")
    rank = dist.get_rank()
    stage = module(rank)

    def forward_backward(world, step):
        stage(batch(step, rank)).square().sum().backward()
        for parameter in stage.parameters():
            dist.all_reduce(parameter.grad, group=world.groups.dp)

    names = {
        "rank": rank,
        "store": store,
        "stage": stage,
        "config": P2PConfig(open_deadline=300.0),
        "steps": case.steps,
        "optimizer": optimizer_of(stage),
        "forward_backward": forward_backward,
        "norm_of": lambda world: clip_grad_norm_(stage, world.groups, math.inf, job_group=world.job_group),
        "scale": lambda stage, norm: torch.nn.utils.clip_grads_with_norm_(stage.parameters(), 1.0, norm),
    }
    exec(code, names)
    return {"weights": stage.state_dict(), "events": names["survivors"].events}
