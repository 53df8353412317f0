"""One rank of a job that goes on when others are killed: two stages read digits, in three replicas. See `run.py`."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import define, frozen
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from pipegrid.schedules import (
    PipelineConfig,
    UnitBatches,
    clip_grad_norm_,
    forward_backward_with_schedule,
    one_f_one_b,
)
from pipegrid.topology import HyperCommGrid
from pipegrid.training.survive import PipelineJob, PipelineWorld, Survivors, require_redoable

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

POSITIONS, REPLICAS, MICROBATCHES, SAMPLES, CLIP = 2, 3, 4, 16, 1.0
UNITS, TESTED = REPLICAS * MICROBATCHES, 300
KILLED_EVERY = 30  # steps
ACTIONS = ("F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE", "norm", "optimizer")


class Stage(nn.Module):
    """A stage of the model: an image, or what the stage before has made of it, to what the next one reads."""

    def __init__(self, number: int, config: PipelineConfig | None = None) -> None:
        super().__init__()
        torch.manual_seed(number)
        sizes = [(64, 64, 48), (48, 32, 10)][number]
        self.layers = nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:])).double()
        self.number, self.config, self.received = number, config, list[Tensor]()

    def set_input_tensor(self, received: list[Tensor]) -> None:
        """Called by the step functions with what the stage before has sent."""
        self.received = received

    def forward(self, x: Tensor) -> Tensor:
        """The layers, after a tanh between the stages."""
        y: Tensor = self.layers(torch.tanh(x) if self.number else x)
        return y


def optimizer_of(stages: nn.Module) -> torch.optim.Optimizer:
    """An optimizer; each rank steps its own."""
    return torch.optim.AdamW(stages.parameters(), lr=3e-3)


@frozen
class Digits:
    """The images that come with scikit-learn, and their labels. The last ones are for a test."""

    images: Tensor
    labels: Tensor

    @classmethod
    def load(cls) -> Digits:
        """All of them."""
        found: Any = load_digits()
        return cls(torch.from_numpy(found.data).double() / 16, torch.from_numpy(found.target).long())

    def batch(self, step: int, replica: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """A microbatch: a function of its numbers, so that any rank may read it."""
        chosen = torch.Generator().manual_seed(step * UNITS + replica * MICROBATCHES + microbatch)
        at = torch.randint(len(self.images) - TESTED, (SAMPLES,), generator=chosen)
        return self.images[at], self.labels[at]

    def accuracy(self, whole: nn.Module) -> float:
        """On the images that no step has seen."""
        with torch.no_grad():
            right = whole(self.images[-TESTED:]).argmax(dim=1) == self.labels[-TESTED:]
        return float(right.double().mean())


def victims() -> Iterator[tuple[int, str]]:
    """Ranks in the order of their deaths, with the action at which each dies. One replica is left."""
    chance = random.Random(7)
    ranks = [rank for rank in range(POSITIONS * REPLICAS) if rank % REPLICAS]
    for rank in chance.sample(ranks, k=len(ranks)):
        lacking = {"RECV_F", "SEND_B"} if rank < REPLICAS else {"SEND_F", "RECV_B"}  # of the first stage, of the last
        yield rank, chance.choice([action for action in ACTIONS if action not in lacking])


@define(eq=False)
class Killer:
    """Kills this process with SIGKILL where it is its turn. A hook of the steps, for their actions."""

    rank: int
    step: int = 0

    def reach(self, action: str) -> None:
        """This rank has come to ``action``."""
        turn, rest = divmod(self.step, KILLED_EVERY)
        if not rest and dict(enumerate(victims(), start=1)).get(turn) == (self.rank, action):
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, action: Any) -> None:
        """Called before each action."""
        self.reach(action.kind.name)

    def after(self, action: Any) -> None:
        """Called after each action."""


def train(store: Store, steps: int) -> dict[str, Any]:
    """Train on this rank; its stage, the losses and what has happened.

    ``store`` is for the agreement of the ranks that live.
    """
    rank, grid = dist.get_rank(), HyperCommGrid([REPLICAS, POSITIONS], ["dp", "pp"])
    grid.create_pg("pp")
    killer, digits = Killer(rank), Digits.load()
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=30.0, open_deadline=10.0, hooks=(killer,))
    stage = Stage(grid.coords(rank)["pp"], config)
    require_redoable(stage, grid.group_ranks("dp", rank))
    optimizer = optimizer_of(stage)

    def forward_step(batches: Iterator[tuple[Tensor, Tensor]], stage: Stage) -> tuple[Tensor, Any]:
        images, labels = next(batches)
        y = stage(stage.received[0] if stage.number else images)

        def loss_of(y: Tensor) -> tuple[Tensor, Tensor]:
            loss = F.cross_entropy(y, labels)
            return loss, loss.detach()

        return y, loss_of

    def forward_backward(world: PipelineWorld) -> float:
        losses = forward_backward_with_schedule(
            schedule="1f1b",
            forward_step_func=forward_step,
            data_iterator=UnitBatches(lambda *unit: digits.batch(killer.step, *unit)),
            model=stage,
            num_microbatches=MICROBATCHES,
            p2p_communicator=world.communicator,
            pg_collection=world.groups,
            routes=world.routes,
        )
        # In the same function: a loss that only one rank knows is lost with it.
        total = torch.stack([torch.zeros(()).double(), *losses]).sum()
        dist.all_reduce(total, group=world.job_group)
        return total.item() / UNITS

    def norm(world: PipelineWorld) -> Tensor:
        killer.reach("norm")
        return clip_grad_norm_(stage, world.groups, math.inf, job_group=world.job_group)

    job, losses = PipelineJob(grid, one_f_one_b(POSITIONS, MICROBATCHES), config, timeout=10.0), list[float]()
    with Survivors(store, job, modules=stage, heartbeat=2.0, retire=job.retire) as survivors:
        for killer.step in range(1, steps + 1):
            losses.append(survivors.run(f"step {killer.step}", forward_backward))
            norm_now = survivors.run(f"norm {killer.step}", norm, keep_gradients=False)
            killer.reach("optimizer")
            clip(stage, norm_now)
            optimizer.step()
            optimizer.zero_grad()
    return {"stage": stage.state_dict(), "losses": losses, "events": [str(event) for event in survivors.events]}


def clip(modules: nn.Module, norm: Tensor) -> None:
    """Scale gradients of norm ``norm`` to at most `CLIP`."""
    for parameter in modules.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(torch.clamp(CLIP / norm, max=1.0))


def train_alone(steps: int) -> tuple[nn.Sequential, list[float]]:
    """The same training in one process, undisturbed: the whole model, and the losses."""
    whole, digits = nn.Sequential(*map(Stage, range(POSITIONS))), Digits.load()
    optimizer, losses = optimizer_of(whole), []
    for step in range(1, steps + 1):
        units = [digits.batch(step, *divmod(unit, MICROBATCHES)) for unit in range(UNITS)]
        images, labels = map(torch.cat, zip(*units, strict=True))
        loss = F.cross_entropy(whole(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        clip(whole, torch.nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None]))
        optimizer.step()
        optimizer.zero_grad()
    return whole, losses
