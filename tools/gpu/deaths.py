"""Pipelines of which a rank is killed in the middle of a step: how soon the others go on, and with which weights.

    python tools/gpu/deaths.py [--backend gloo] [--jobs 0 1 2] [--seconds 60]

Over NCCL on the GPUs that there are, in float64. Each job runs undisturbed, and with a death: what the ranks print, and
the largest difference of a weight.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, untyped

from pipegrid.schedules import (
    Action,
    ActionKind,
    PipelineConfig,
    UnitBatches,
    forward_backward_with_schedule,
    one_f_one_b,
)
from pipegrid.topology import HyperCommGrid, job_store, serve_store
from pipegrid.training.survive import PipelineJob, PipelineWorld, Survivors, init_process_group

MICROBATCHES, ROWS, WIDTH, STEPS, KILLED_IN = 4, 64, 256, 4, 2
RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(["torch._dynamo", "pipegrid.training.survive"])


@frozen
class Job:
    """Positions, replicas, and the rank that is killed before its second action of a kind; None: none is."""

    positions: int
    replicas: int
    killed: int | None
    at: ActionKind = ActionKind.B

    def __str__(self) -> str:
        death = "undisturbed" if self.killed is None else f"rank {self.killed} killed at its second {self.at.name}"
        return f"{self.positions} x {self.replicas}, {death}"


JOBS = [Job(1, 2, 1), Job(2, 2, 3), Job(2, 2, 2, ActionKind.F)]


@define
class Watch:
    """A hook of each action: ends this process where its job says so, and has the time of the first action after it."""

    job: Job
    rank: int
    folder: Path
    step: int = -1
    seen: int = 0
    first: float | None = field(default=None)

    def before(self, action: Action) -> None:
        """Before an action."""
        if self.first is None:
            self.first = time.monotonic()
        if (self.rank, self.step, action.kind) == (self.job.killed, KILLED_IN, self.job.at):
            self.seen += 1
            if self.seen == 2:
                (self.folder / "killed").write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)

    def after(self, action: Action) -> None:
        """Nothing."""


class Stage(nn.Module):
    """The layers of one position."""

    def __init__(self, position: int, device: torch.device, watch: Watch) -> None:
        super().__init__()
        torch.manual_seed(position)
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.layers = nn.Sequential(*layers).to(device, torch.float64)
        self.config = PipelineConfig(pipeline_dtype=torch.float64, deadline=60.0, hooks=(watch,))
        self.position, self.device, self.received = position, device, list[Tensor]()

    def set_input_tensor(self, received: list[Tensor]) -> None:
        """Called by the step functions."""
        self.received = received

    def forward(self, x: Tensor) -> Tensor:
        """The layers."""
        y: Tensor = self.layers(self.received[0] if self.position else x)
        return y

    def step(self, world: PipelineWorld, step: int) -> None:
        """A step of 1F1B with its reduction."""

        def rows(unit: int, *_: object) -> Tensor:
            generator = torch.Generator().manual_seed(1000 * step + unit)
            return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator).to(self.device)

        forward_backward_with_schedule(
            schedule="1f1b",
            forward_step_func=lambda batches, model: (model(next(batches)), lambda y: (y.square().mean(), None)),
            data_iterator=UnitBatches(rows),
            model=self,
            num_microbatches=MICROBATCHES,
            p2p_communicator=world.communicator,
            pg_collection=world.groups,
            routes=world.routes,
        )


def run_rank(address: str, job: Job, backend: str, rank: int, name: str) -> None:
    """The steps of one rank; its weights are a file."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # the end of a transfer is the survivors' matter
    device, folder = torch.device("cpu"), Path(name)
    if backend != "gloo":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    host, _, port = address.rpartition(":")
    store = PrefixStore("world", TCPStore(host, int(port), is_master=False))
    size = job.positions * job.replicas
    init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    grid = HyperCommGrid([job.replicas, job.positions], ["dp", "pp"])
    watch = Watch(job, rank, folder)
    stage = Stage(grid.coords(rank)["pp"], device, watch)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    world = PipelineJob(grid, one_f_one_b(job.positions, MICROBATCHES), stage.config)
    with Survivors(job_store("survive", address=address), world, modules=stage, retire=world.retire) as survivors:
        for step in range(STEPS):
            began, watch.step, watch.first, watch.seen = time.monotonic(), step, None, 0
            deaths = len(survivors.events)
            survivors.run(f"step {step}", partial(again, stage, watch, step))
            if len(survivors.events) > deaths:
                died = float((folder / "killed").read_text())
                first = (watch.first or died) - died
                print(f"  rank {rank}: first action again {first:.2f} s after the death", flush=True)
            optimizer.step()
            optimizer.zero_grad()
            print(f"  rank {rank}: step {step} in {time.monotonic() - began:.2f} s", flush=True)
    weights = torch.cat([each.detach().cpu().flatten() for each in stage.parameters()])
    torch.save(weights, folder / f"weights.{rank}")
    os._exit(0)  # without the farewell of groups that have dead members


def again(stage: Stage, watch: Watch, step: int, world: PipelineWorld) -> None:
    """A step, whose first action is noted anew."""
    watch.first = None
    stage.step(world, step)


def run(job: Job, backend: str, seconds: float) -> dict[int, Tensor]:
    """The weights of the ranks that live, when all have ended."""
    began = time.monotonic()
    print(f"{job}:", flush=True)
    with tempfile.TemporaryDirectory() as folder, serve_store() as address:
        ranks = range(job.positions * job.replicas)
        children = [RANKS.Process(target=run_rank, args=(address, job, backend, rank, folder)) for rank in ranks]
        for child in children:
            child.start()
        for child in children:
            child.join(max(0.1, began + seconds - time.monotonic()))
        stuck = [child for child in children if child.exitcode is None]
        for end in (signal.SIGUSR1, signal.SIGKILL) if stuck else ():  # its stacks first
            for child in stuck:
                os.kill(child.pid or 0, end)
            time.sleep(0.5)
        took = time.monotonic() - began
        print(f"  ended with {[child.exitcode for child in children]} after {took:.1f} s", flush=True)
        found = {rank: Path(folder) / f"weights.{rank}" for rank in ranks}
        return {rank: torch.load(path) for rank, path in found.items() if path.exists()}


def main() -> int:
    """Run the jobs; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cpu:gloo,cuda:nccl")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each job")
    parser.add_argument("--jobs", type=int, nargs="*", default=[*range(len(JOBS))], help="by number; all of them")
    options = parser.parse_args()
    undisturbed: dict[tuple[int, int], dict[int, Tensor]] = {}
    failed = False
    for job in [JOBS[number] for number in options.jobs]:
        shape = job.positions, job.replicas
        if shape not in undisturbed:
            undisturbed[shape] = run(Job(*shape, None), options.backend, options.seconds)
        survived = run(job, options.backend, options.seconds)
        missing = {*range(job.positions * job.replicas)} - {job.killed} - set(survived)
        missing |= set(survived) - set(undisturbed[shape])
        differences = [(survived[rank] - undisturbed[shape][rank]).abs().max() for rank in survived if not missing]
        worst = float(max(differences, default=0.0))
        failed = failed or bool(missing) or worst > 1e-12
        print(f"{job}: no weights of {missing}" if missing else f"{job}: weights differ by {worst:.1e}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
