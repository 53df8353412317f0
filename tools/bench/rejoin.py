"""How soon a new process of a killed rank computes with the others.

    python tools/bench/rejoin.py [--replicas 2] [--width 512] [--comings 5] [--quick]

Two positions in some replicas, a process of one thread each. The last rank is killed and started again, several times.
Printed: seconds from when the new process asks to come in (its modules are imported, its stages made) until it has done
its first step with the others, which have gone on meanwhile; beside an undisturbed step, and the bytes of its state.
"""

from __future__ import annotations

import argparse
import multiprocessing.process
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, untyped

from pipegrid.schedules import one_f_one_b
from pipegrid.survive import PipelineJob, PipelineWorld, Survivors, init_process_group
from pipegrid.topology import HyperCommGrid, job_store, serve_store
from survive_job import MICROBATCHES, POSITIONS, RANKS, Stage

LIFE = 8  # steps of a process that is to die


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
    stage = Stage(grid.coords(rank)["pp"], width)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-6)

    def step(world: PipelineWorld) -> bool:
        stage.step(world)
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
