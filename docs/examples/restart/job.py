"""One rank of a job that can be killed: `torchrun ... job.py --directory runs/a`. `run.py` starts it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

# The examples are folders of modules, not installed packages; their parent makes them importable by name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.schedules import Monitor, PipelineConfig, get_forward_backward_func, stage_places
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, control_store, replica_samples
from pipegrid.training import Attempt, Checkpoints, RestartError, TrainingState, attempt_store
from restart.faults import Fault, FaultHook
from restart.model import Position, Stage, samples

BATCH, MICROBATCHES = 16, 4


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="job.py", description=__doc__)
    add = parser.add_argument
    add("--directory", type=Path, required=True, help="of the checkpoints and of losses.jsonl")
    add("--pp", type=int, default=2, help="stages of the pipeline (default 2); replicas on the other ranks")
    add("--schedule", default="1f1b", help="any that trains (default 1f1b)")
    add("--steps", type=int, default=24, help="of training (default 24)")
    add("--every", type=int, default=4, help="steps between checkpoints (default 4)")
    add("--deadline", type=float, default=10.0, help="seconds for an action of a step (default 10)")
    add("--limit", type=int, default=2, help="failures at one step without progress that end the run (default 2)")
    add("--pause", type=float, default=0.0, help="seconds to wait in each step (default 0)")
    add("--faults", default="", help="kind@step:rank of the first attempt, of its restart, ..., by commas")
    return parser.parse_args(arguments)


def train(given: argparse.Namespace) -> int:
    """Train to the last step, or until a signal stops the run; the exit code."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    grid = HyperCommGrid([world_size // given.pp, given.pp], ["dp", "pp"])
    grid.create_pgs(["dp", "pp"])
    groups = ProcessGroupCollection.from_grid(grid)
    places = stage_places(given.schedule, given.pp)
    monitor = Monitor(
        control_store("restart"), rank=rank, ranks=range(world_size), deadline=given.deadline, interval=0.1
    )
    faults, restarts = (
        given.faults.split(",") if given.faults else [],
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )
    hook = FaultHook(Fault.parse(faults[restarts]) if restarts < len(faults) else None, rank)
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=given.deadline, monitor=monitor, hooks=(hook,))
    communicator = MultiModulePipelineCommunicator(
        {"model": grid}, {"model": []}, config, stage_placement={"model": places}
    )
    mine = [stage for stage, place in enumerate(places) if place == grid.coords(rank)["pp"]]
    stages = [Stage(number, len(places), config) for number in mine]
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=1e-2)
    position = Position()
    state = TrainingState(stages={"model": stages}, optimizers=[optimizer], data=position, grids={"model": grid})
    step_function = get_forward_backward_func(schedule=given.schedule)

    def forward_step(batches: Iterator[range], stage: Stage) -> tuple[Tensor, object]:
        x, target = samples(next(batches))
        y = stage(stage.received[0] if stage.number else x)
        return y, lambda y: (F.mse_loss(y, target), F.mse_loss(y, target).item())

    def train_step(step: int) -> float:
        """The loss of one step, on every rank."""
        hook.start(step)
        time.sleep(given.pause)
        infos = step_function(
            forward_step_func=forward_step,
            data_iterator=[_lane(position.next, grid) for _ in stages],
            model=stages,
            num_microbatches=MICROBATCHES,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
        position.next += BATCH
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.tensor([sum(infos), len(infos)], dtype=torch.float64)
        dist.all_reduce(loss)
        return (loss[0] / loss[1]).item()

    with contextlib.closing(monitor), Attempt(given.directory, monitor=monitor, limit=given.limit) as attempt:
        checkpoints = Checkpoints(given.directory, timeout=timedelta(seconds=60))
        found = checkpoints.load(state)
        first = attempt.begin(found.step if found else 0)
        for step in range(first + 1, given.steps + 1):
            loss = train_step(step)
            if rank == 0:
                with (given.directory / "losses.jsonl").open("a") as file:
                    print(json.dumps({"step": step, "loss": loss, "first": first}), file=file)
            stopping = attempt.completed(step)
            if stopping or step % given.every == 0:
                checkpoints.save(state, step=step, blocking=False)
            if stopping:
                break
        checkpoints.close()
    communicator.destroy()
    return attempt.exit_code


def _lane(first: int, grid: HyperCommGrid) -> Iterator[range]:
    """This rank's samples of each microbatch of the batch that starts with sample ``first``."""
    size = BATCH // MICROBATCHES
    share = replica_samples(size, grid)
    for start in range(first, first + BATCH, size):
        yield range(start + share.start, start + share.stop)


def main(arguments: Sequence[str]) -> int:
    """Make the process group of this attempt, and train."""
    given = parse(arguments)
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=attempt_store(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    try:
        return train(given)
    except RestartError as error:
        if dist.get_rank() == 0:
            print(error, file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
