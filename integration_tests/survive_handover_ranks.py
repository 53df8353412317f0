"""A rank of a job that survives deaths while it can, and starts again from a checkpoint when it cannot."""

from __future__ import annotations

import math
import os
import signal
import sys
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import frozen

from pipegrid.checkpoint import saving
from pipegrid.schedules import (
    PipelineConfig,
    UnitBatches,
    clip_grad_norm_,
    forward_backward_with_schedule,
    one_f_one_b,
)
from pipegrid.survive import PipelineJob, Survivors
from pipegrid.topology import HyperCommGrid, job_store
from pipegrid.training import Attempt, RestartError, TrainingState

from .kit.processes import write_to
from .survive_cases import Case, Kill, Places
from .survive_pipelines import MICROBATCHES, batch, module, optimizer_of, pipeline_alone

POSITIONS, REPLICAS = 2, 2
RANKS = POSITIONS * REPLICAS


@frozen
class Attempts:
    """Kills of each attempt of a run of ``steps`` steps, a checkpoint every two; rank ``stopped[0]`` gets SIGTERM."""

    steps: int
    kills: tuple[tuple[Kill, ...], ...]
    stopped: tuple[int, int] | None = None

    def alone(self) -> dict[str, torch.Tensor]:
        """Weights of one process without deaths."""
        return pipeline_alone(Case("pipeline", POSITIONS, REPLICAS, (Kill(-1, "", self.steps - 2),)))


def rank_main(attempts: Attempts, number: int, rank: int, address: str, folder: str) -> None:
    """Run attempt ``number`` as ``rank``; the outcome is a file, the exit code that of a script."""
    write_to(Path(folder) / f"log.{number}.{rank}")
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "PIPEGRID_STORE": address,
        "TORCHELASTIC_RESTART_COUNT": str(number),
    }
    torch.set_num_threads(1)
    store = job_store(f"ranks {number}")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    kills = attempts.kills[number] if number < len(attempts.kills) else ()
    places = Places(Case("pipeline", POSITIONS, REPLICAS, kills), rank, Path(folder))
    code = 1
    try:
        code, outcome = train(attempts, number, places)
        torch.save(outcome, Path(folder) / f"outcome.{number}.{rank}")
    except RestartError as error:
        code = error.exit_code
    except BaseException:  # noqa: BLE001 -- in the log, for the test
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train(attempts: Attempts, number: int, places: Places) -> tuple[int, dict[str, object]]:
    rank, grid = dist.get_rank(), HyperCommGrid([REPLICAS, POSITIONS], ["dp", "pp"])
    grid.create_pg("pp")
    at, directory = grid.coords(rank)["pp"], places.folder / "checkpoints"
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=20.0, open_deadline=300.0, hooks=(places,))
    model = module(at)
    model.config, model.received = config, None
    model.set_input_tensor = lambda received: setattr(model, "received", received)
    optimizer = optimizer_of(model)
    state = TrainingState(stages={"model": {at: torch.nn.ModuleDict({str(at): model})}}, optimizers=[optimizer])
    job = PipelineJob(grid, one_f_one_b(POSITIONS, MICROBATCHES), config, timeout=300.0, checkpoints=directory)
    write = saving.dcp.save

    def written(*arguments, **options):
        places.reach("write")
        return write(*arguments, **options)

    saving.dcp.save = written

    def forward_step(batches, model):
        value = next(batches)
        return model(model.received[0] if at else value), lambda output: (output.square().sum(), {})

    def forward_backward(world):
        forward_backward_with_schedule(
            schedule="1f1b",
            forward_step_func=forward_step,
            data_iterator=UnitBatches(lambda *unit: batch(places.step, unit[0] * MICROBATCHES + unit[1])),
            model=model,
            num_microbatches=MICROBATCHES,
            p2p_communicator=world.communicator,
            pg_collection=world.groups,
            routes=world.routes,
        )

    def norm_of(world):
        return clip_grad_norm_(model, world.groups, math.inf, job_group=world.job_group)

    def save(step, world):
        world.checkpoints.save(state, step=step)

    with (
        Survivors(job_store(f"survivors {number}"), job, modules=model, retire=job.retire) as survivors,
        Attempt(directory, survivors=survivors) as attempt,
    ):
        found = survivors.run("load", lambda world: world.checkpoints.load(state))
        first = attempt.begin(found.step if found else 0)
        for step in range(first, attempts.steps):
            places.begin(step)
            survivors.run(f"step {step}", forward_backward)
            norm = survivors.run(f"norm {step}", norm_of, keep_gradients=False)
            for parameter in model.parameters():
                parameter.grad.mul_(1.0 / norm)
            optimizer.step()
            optimizer.zero_grad()
            if (rank, step) == attempts.stopped:
                os.kill(os.getpid(), signal.SIGTERM)
                while attempt._signals.received is None:
                    os.sched_yield()
            stopping = attempt.completed(step + 1)
            if stopping or step % 2:
                survivors.run("save", partial(save, step + 1), keep_gradients=False)
            if stopping:
                break
    weights = {f"{at}.{name}": value for name, value in model.state_dict().items()}
    return attempt.exit_code, {"weights": weights, "first": first, "events": [str(event) for event in survivors.events]}
