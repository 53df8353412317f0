"""How soon a new process of a killed rank computes with the others.

    python tools/bench/rejoin.py [--replicas 2] [--width 512] [--comings 5] [--quick]

Two positions in some replicas, a process of one thread each. The last rank is killed and started again, several times.
Printed: seconds from when the new process asks to come in (its modules are imported, its stages made) until it has done
its first step with the others, which have gone on meanwhile; beside an undisturbed step, and the bytes of its state.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, untyped

from pipegrid.schedules import PipelineConfig, UnitBatches, forward_backward_with_schedule, one_f_one_b
from pipegrid.topology import HyperCommGrid, job_store, serve_store
from pipegrid.training.survive import PipelineJob, PipelineWorld, Survivors, init_process_group

POSITIONS, MICROBATCHES, ROWS, LIFE = 2, 8, 64, 8  # LIFE: steps of a process that is to die
# Ranks are forked by a server that has imported torch, and has no threads.
RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(["torch._dynamo", "pipegrid.training.survive"])


class Stage(nn.Module):
    """Half of the model."""

    def __init__(self, position: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(position)
        self.layers = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())])
        self.config = PipelineConfig(pipeline_dtype=torch.float32)
        self.position, self.received = position, list[Tensor]()

    def set_input_tensor(self, received: list[Tensor]) -> None:
        """Called by the step functions."""
        self.received = received

    def forward(self, x: Tensor) -> Tensor:
        """The layers."""
        y: Tensor = self.layers(self.received[0] if self.position else x)
        return y


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--comings", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    comings = 1 if options.quick else options.comings
    ranks = POSITIONS * options.replicas
    with serve_store() as address:

        def start(rank: int, life: int) -> multiprocessing.process.BaseProcess:
            arguments = address, rank, options.replicas, options.width, life, comings
            child = RANKS.Process(target=run_rank, args=arguments)
            child.start()
            return child

        children = [start(rank, 0) for rank in range(ranks)]
        for life in range(1, comings + 1):
            children[-1].join()
            if children[-1].exitcode != -signal.SIGKILL:
                break
            children[-1] = start(ranks - 1, life)
        for child in children:
            child.join()
        codes = [child.exitcode for child in children]
        if any(codes):
            print(f"ranks ended with {codes}", file=sys.stderr)
            return 1
        store = job_store("bench", address=address)
        came = [float(store.get(f"came {life}")) for life in range(1, comings + 1)]
        step, size = float(store.get("step")), int(store.get("bytes"))
    print(f"{POSITIONS} x {options.replicas} ranks on {os.cpu_count()} cores, width {options.width}, {comings} comings")
    print(f"came     {statistics.median(came):6.3f} s from asking to the first common step, worst {max(came):.3f} s")
    print(f"step     {step:6.3f} s undisturbed; {size / 2**20:.1f} MiB of state")
    return 0


def run_rank(address: str, rank: int, replicas: int, width: int, life: int, comings: int) -> None:
    """One process of a rank; the last rank's ones die, but for the last of them, which ends the job."""
    torch.set_num_threads(1)
    host, _, port = address.rpartition(":")
    said = job_store("bench", address=address)
    store = PrefixStore("world", TCPStore(host, int(port), is_master=False))
    init_process_group("gloo", store=store, rank=rank, world_size=POSITIONS * replicas)
    grid = HyperCommGrid([replicas, POSITIONS], ["dp", "pp"])
    stage, rows = Stage(grid.coords(rank)["pp"], width), torch.ones(ROWS, width)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-6)

    def forward_step(batches: Iterator[Tensor], model: Stage) -> tuple[Tensor, object]:
        return model(next(batches)), lambda output: (output.square().mean(), None)

    def step(world: PipelineWorld) -> bool:
        forward_backward_with_schedule(
            schedule="1f1b",
            forward_step_func=forward_step,
            data_iterator=UnitBatches(lambda *_: rows),
            model=stage,
            num_microbatches=MICROBATCHES,
            p2p_communicator=world.communicator,
            pg_collection=world.groups,
            routes=world.routes,
        )
        enough = torch.tensor(float(said.check(["enough"])))
        dist.all_reduce(enough, dist.ReduceOp.MAX, group=world.job_group)
        return bool(enough)

    job, mortal = (
        PipelineJob(grid, one_f_one_b(POSITIONS, MICROBATCHES), stage.config),
        rank == POSITIONS * replicas - 1,
    )
    times, began = list[float](), time.perf_counter()
    own = job_store("survive", address=address)
    with Survivors(own, job, modules=stage, state={"optimizer": optimizer}, retire=job.retire) as survivors:
        for number in survivors.steps(range(10**9)):
            enough = survivors.run(f"step {number}", step)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
            if mortal and len(times) == 1 and life:
                said.set(f"came {life}", str(times[0]))
            if mortal and len(times) == LIFE:
                if life < comings:
                    os.kill(os.getpid(), signal.SIGKILL)
                said.set("step", str((times[-1] - times[1]) / (LIFE - 2)))
                held = (*stage.parameters(), *(v for s in optimizer.state.values() for v in s.values()))
                said.set("bytes", str(sum(each.nbytes for each in held)))
                said.set("enough", "")
            if enough:
                break
    os._exit(0)  # without the farewell of groups that have dead members


if __name__ == "__main__":
    sys.exit(main())
