"""One rank of a job that goes on when others are killed: the digit reader in two replicas. See `run.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from digit_reader.job import token_loss
from digit_reader.strips import Split
from pipegrid.schedules import (
    PipelineConfig,
    UnitBatches,
    clip_grad_norm_,
    forward_backward_with_schedule,
    one_f_one_b,
)
from pipegrid.survive import PipelineJob, PipelineWorld, Survived, Survivors
from pipegrid.topology import HyperCommGrid, job_store
from pipegrid.training import Attempt, TrainingState
from survive.deaths import Killer, deaths
from survive.picture import Camera
from survive.reader import (
    MICROBATCHES,
    POSITIONS,
    REPLICAS,
    Stage,
    optimize,
    optimizer_of,
    samples,
    unit,
)


@frozen(kw_only=True)
class Options:
    """A run: its steps, those between two deaths and between two checkpoints, and the folder of what it writes."""

    steps: int
    every: int
    checkpoint_every: int
    out: Path

    @property
    def drawn(self) -> range:
        """The step of the first death, with the one before and the one after."""
        return range(self.every - 1, self.every + 2)


def train(options: Options, attempt_number: int) -> dict[str, Any]:
    """Train on this rank; its stage, the losses by step, and what has happened."""
    rank, grid = dist.get_rank(), HyperCommGrid([REPLICAS, POSITIONS], ["dp", "pp"])
    grid.create_pg("pp")
    camera = Camera(options.out, rank, options.drawn if attempt_number == 0 else range(0))
    killer = Killer(frozenset(deaths(options.steps, options.every)), rank, attempt_number, camera.write)
    config = PipelineConfig(
        pipeline_dtype=torch.float64,
        calculate_per_token_loss=True,
        deadline=30.0,
        open_deadline=10.0,
        hooks=(camera.recorder, killer),
    )
    number = grid.coords(rank)["pp"]
    stage, strips = Stage(number, config), samples(Split.TRAIN)
    optimizer = optimizer_of(stage)
    state = TrainingState(stages={"reader": {number: stage}}, optimizers=[optimizer], grids={"reader": grid})

    def forward_step(batches: Iterator[range], stage: Stage) -> tuple[Tensor, Any]:
        numbers = next(batches)
        if stage.number:
            return stage(stage.received[0]), lambda logits: token_loss(logits, strips.targets(numbers))
        return stage(strips.strips(numbers).double(), strips.inputs(numbers)), None

    def forward_backward(world: PipelineWorld) -> float:
        camera.start(killer.step, world)
        try:
            infos = forward_backward_with_schedule(
                schedule="1f1b",
                forward_step_func=forward_step,
                data_iterator=UnitBatches(lambda *of: unit(killer.step, *of)),
                model=stage,
                num_microbatches=MICROBATCHES,
                p2p_communicator=world.communicator,
                pg_collection=world.groups,
                routes=world.routes,
            )
            # In the same function: a loss that only one rank knows is lost with it.
            total = sum((torch.stack([one["loss"], one["tokens"]]) for one in infos), torch.zeros(2).double())
            dist.all_reduce(total, group=world.job_group)
        except RuntimeError:
            camera.failed()
            raise
        return float(total[0] / total[1])

    def norm(world: PipelineWorld) -> Tensor:
        return clip_grad_norm_(stage, world.groups, math.inf, job_group=world.job_group)

    job = PipelineJob(
        grid, one_f_one_b(POSITIONS, MICROBATCHES), config, timeout=10.0, checkpoints=options.out / "checkpoints"
    )
    store, losses = job_store(f"survivors {attempt_number}"), dict[int, float]()

    def on_event(event: Survived) -> None:
        camera.agreed()
        if rank == event.result.epoch.members[0]:
            print(event, flush=True)

    with (
        Survivors(store, job, modules=stage, heartbeat=5.0, retire=job.retire, on_event=on_event) as survivors,
        Attempt(options.out / "checkpoints", survivors=survivors) as attempt,
    ):
        found = survivors.run("load", lambda world: world.checkpoints.load(state))
        for killer.step in range(attempt.begin(found.step if found else 0) + 1, options.steps + 1):
            losses[killer.step] = survivors.run(f"step {killer.step}", forward_backward)
            now = survivors.run(f"norm {killer.step}", norm, keep_gradients=False)
            killer.reach("optimizer")
            with camera.recorder.aside("optimizer"):
                optimize(optimizer, now, killer.step, options.steps)
            camera.write()
            stopping = attempt.completed(killer.step)
            if stopping or killer.step % options.checkpoint_every == 0:
                survivors.run("save", lambda world: world.checkpoints.save(state, step=killer.step))
            if stopping:
                break
    return {"stage": stage.state_dict(), "losses": losses, "code": attempt.exit_code}
