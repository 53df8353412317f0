"""What survival costs a step that nothing disturbs: a step of `Survivors.run` beside the same step called directly.

    python tools/bench/survive.py [--replicas 2] [--width 512] [--pairs 60] [--quick]

Two positions in some replicas, a process of one thread each; on more processes than cores both kinds of step wait for
each other alike. In turns, in the same processes and the same world: a step of 1F1B with its reduction, by the step
function; and that step by ``survivors.run``, which keeps buffers and random generators, and agrees that all have done
it. Printed: seconds of both on rank 0, and the median ratio of neighbouring pairs. A small step shows the fixed cost.
``--quick``: a few pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, untyped

from pipegrid.schedules import one_f_one_b
from pipegrid.survive import PipelineJob, PipelineWorld, Survivors
from pipegrid.topology import HyperCommGrid, job_store, serve_store
from survive_job import MICROBATCHES, POSITIONS, RANKS, Stage


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    pairs = 3 if options.quick else options.pairs
    ranks = POSITIONS * options.replicas
    with serve_store() as address:
        children = [
            RANKS.Process(target=run_rank, args=(address, rank, options.replicas, options.width, pairs))
            for rank in range(ranks)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
        codes = [child.exitcode for child in children]
        if any(codes):
            print(f"ranks ended with {codes}", file=sys.stderr)
            return 1
        store = job_store("bench", address=address)
        direct, surviving = ([float(each) for each in store.get(name).split()] for name in ("direct", "surviving"))
    ratios = [one / other for one, other in zip(surviving, direct, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    added = statistics.median(one - other for one, other in zip(surviving, direct, strict=True))
    print(f"{POSITIONS} x {options.replicas} ranks on {os.cpu_count()} cores, width {options.width}, {pairs} pairs")
    print(f"direct {statistics.median(direct) * 1e3:.1f} ms, surviving {statistics.median(surviving) * 1e3:.1f} ms")
    print(f"ratio {statistics.median(ratios):.3f} (quartiles {low:.3f} to {high:.3f}), {added * 1e6:+.0f} us a step")
    return 0


def run_rank(address: str, rank: int, replicas: int, width: int, pairs: int) -> None:
    """The steps of one rank; rank 0 writes down what they take."""
    torch.set_num_threads(1)
    host, _, port = address.rpartition(":")
    store = PrefixStore("world", TCPStore(host, int(port), is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=POSITIONS * replicas)
    grid = HyperCommGrid([replicas, POSITIONS], ["dp", "pp"])
    grid.create_pg("pp")
    stage = Stage(grid.coords(rank)["pp"], width)
    worlds: list[PipelineWorld] = []
    job = PipelineJob(grid, one_f_one_b(POSITIONS, MICROBATCHES), stage.config)
    times: dict[str, list[float]] = {"direct": [], "surviving": []}
    with Survivors(job_store("survive", address=address), job, modules=stage) as survivors:
        survivors.run("the world", worlds.append)
        for number in range(pairs + 3):
            for kind in ("direct", "surviving") if number % 2 else ("surviving", "direct"):
                dist.barrier()
                began = time.perf_counter()
                if kind == "direct":
                    stage.step(worlds[0])
                else:
                    survivors.run(f"step {number}", stage.step)
                dist.barrier()
                times[kind].append(time.perf_counter() - began)
                stage.zero_grad()
    if rank == 0:
        for kind, seconds in times.items():
            job_store("bench", address=address).set(kind, " ".join(map(str, seconds[3:])))


if __name__ == "__main__":
    sys.exit(main())
