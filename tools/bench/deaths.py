"""How soon the others begin a step again of which a rank has died, and with which weights they end.

    python tools/bench/deaths.py [--rounds 5] [--backend cpu:gloo,cuda:nccl] [--jobs 0 1 2 3] [--quick]

Pipelines of data-parallel replicas in float64, a process for each rank. In the middle of a step a rank is killed, or
stopped: as a machine that is gone, of which no connection ends. Printed for each job: seconds from the death until the
first action of the step that is done again, on all ranks that live; and the largest difference of a weight from the
undisturbed run. ``--quick``: two jobs, once.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from attrs import define, evolve, frozen
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, untyped

from pipegrid.schedules import Action, PipelineConfig, UnitBatches, forward_backward_with_schedule, one_f_one_b
from pipegrid.survive import PipelineJob, PipelineWorld, Survivors, init_process_group
from pipegrid.topology import HyperCommGrid, job_store, serve_store

MICROBATCHES, ROWS, WIDTH, STEPS, DIES_IN, HEARTBEAT = 4, 64, 256, 4, 2, 2.0
RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(["torch._dynamo", "pipegrid.survive"])


@frozen
class Job:
    """Positions, replicas, and the rank that ends by a signal before its second action of a kind; None: none does."""

    positions: int
    replicas: int
    dies: int | None
    at: str = "B"
    by: signal.Signals = signal.SIGKILL

    def __str__(self) -> str:
        word = "killed" if self.by is signal.SIGKILL else "stopped"
        death = "undisturbed" if self.dies is None else f"rank {self.dies} {word} at its second {self.at}"
        return f"{self.positions} x {self.replicas}, {death}"


JOBS = [Job(1, 2, 1), Job(2, 2, 3), Job(2, 2, 2, "F"), Job(2, 2, 0, "B", signal.SIGSTOP)]


@define
class Watch:
    """A hook: ends this process where its job says so, and notes when the first action began."""

    job: Job
    rank: int
    folder: Path
    step: int = -1
    seen: int = 0
    first: float | None = None

    def before(self, action: Action) -> None:
        """Before an action."""
        if self.first is None:
            self.first = time.monotonic()
        if (self.rank, self.step, action.kind.name) == (self.job.dies, DIES_IN, self.job.at):
            self.seen += 1
            if self.seen == 2:
                (self.folder / "died").write_text(repr(time.monotonic()))
                os.kill(os.getpid(), self.job.by)

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

    def step(self, watch: Watch, world: PipelineWorld) -> None:
        """A step of 1F1B with its reduction, whose first action is noted anew."""
        watch.first = None

        def rows(unit: int, *_: object) -> Tensor:
            generator = torch.Generator().manual_seed(1000 * watch.step + unit)
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
    """The steps of one rank; its weights are a file, and when it began a step again."""
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
    world, own = (
        PipelineJob(grid, one_f_one_b(job.positions, MICROBATCHES), stage.config),
        job_store("survive", address=address),
    )
    with Survivors(own, world, modules=stage, retire=world.retire, heartbeat=HEARTBEAT) as survivors:
        for step in range(STEPS):
            deaths, watch.step, watch.seen = len(survivors.events), step, 0
            survivors.run(f"step {step}", partial(stage.step, watch))
            if len(survivors.events) > deaths and watch.first is not None:
                (folder / f"again.{rank}").write_text(repr(watch.first))
            optimizer.step()
            optimizer.zero_grad()
    torch.save(torch.cat([each.detach().cpu().flatten() for each in stage.parameters()]), folder / f"weights.{rank}")
    os._exit(0)  # without the farewell of groups that have dead members


def run(job: Job, backend: str, seconds: float) -> tuple[dict[int, Tensor], list[float]]:
    """The weights of the ranks that live, when all have ended, and how soon after the death each began again."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name, serve_store() as address:
        folder, ranks = Path(name), range(job.positions * job.replicas)
        children = [RANKS.Process(target=run_rank, args=(address, job, backend, rank, name)) for rank in ranks]
        for child in children:
            child.start()
        living = [child for rank, child in enumerate(children) if rank != job.dies]
        for child in living:
            child.join(max(0.1, end - time.monotonic()))
        stuck = [child for child in living if child.exitcode is None]
        for child in stuck:  # its stacks
            os.kill(child.pid or 0, signal.SIGUSR1)
            time.sleep(0.5)
        for child in children:
            child.kill()
            child.join()
        weights = {rank: folder / f"weights.{rank}" for rank in ranks}
        died = float((folder / "died").read_text()) if (folder / "died").exists() else 0.0
        again = [float(path.read_text()) - died for path in folder.glob("again.*")]
        return {rank: torch.load(path) for rank, path in weights.items() if path.exists()}, again


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each run")
    parser.add_argument("--jobs", type=int, nargs="*", default=[*range(len(JOBS))], help="by number; all of them")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    chosen, rounds = ([1, 3], 1) if options.quick else (options.jobs, options.rounds)
    undisturbed: dict[tuple[int, int], dict[int, Tensor]] = {}
    failed = False
    for job in [JOBS[number] for number in chosen]:
        shape = job.positions, job.replicas
        if shape not in undisturbed:
            undisturbed[shape], _ = run(evolve(job, dies=None), options.backend, options.seconds)
        wanted, times, worst = undisturbed[shape], list[float](), 0.0
        for _ in range(rounds):
            survived, again = run(job, options.backend, options.seconds)
            missing = set(wanted) - {job.dies} - set(survived) or set(survived) - set(wanted)
            if missing:
                print(f"{job}: no weights of ranks {sorted(missing)}", flush=True)
                failed = True
                break
            times += again
            worst = max([worst, *(float((survived[rank] - wanted[rank]).abs().max()) for rank in survived)])
        else:
            failed = failed or worst > 1e-12
            text = f"again after {statistics.median(times):.2f} s in the median, {max(times):.2f} s at worst"
            print(f"{job}: {text} ({len(times)} times); weights differ by {worst:.1e}", flush=True)
    print(f"a rank that is silent is lost after its heartbeat, {HEARTBEAT:g} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
