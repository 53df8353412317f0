"""What agreement costs: an undisturbed `Epochs.done`, and the time from a death to the end of the survivors' vote.

    python tools/bench/epochs.py [--ranks 8] [--keys 300] [--deaths 5] [--heartbeat 5] [--quick]

The ranks are processes of this machine with a TCPStore in this one. *done*: per key, beside a bare barrier over the
same store (a counter, and a wait for the last one), in the same processes. *killed*: SIGKILL of the middle rank at the
edge of a key, noticed by the ring of watchers; *silent*: SIGSTOP, noticed by its heartbeat. The time is from the signal
until the last survivor has its result. ``--quick``: few keys and one death of each kind with a heartbeat of 1 s.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, untyped

from pipegrid.monitor import Epochs
from pipegrid.survive.neighbours import Neighbours
from pipegrid.topology import job_store, serve_store

WAIT = timedelta(seconds=120)
# Ranks are forked by a server that has imported torch, and has no threads: those of a store's process hang at times.
RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(["torch.distributed", "pipegrid.monitor", "pipegrid.survive.neighbours"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--keys", type=int, default=300)
    parser.add_argument("--deaths", type=int, default=5, help="of each kind")
    parser.add_argument("--heartbeat", type=float, default=5.0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.ranks, options.keys, options.deaths, options.heartbeat = 4, 50, 1, 1.0
    kinds = {"killed": signal.SIGKILL, "silent": signal.SIGSTOP}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    costs: list[tuple[float, float]] = []
    for number in range(options.deaths):
        for kind, sent in kinds.items():
            cost, seconds = one_job(options.ranks, options.keys, options.heartbeat, sent)
            costs.append(cost)
            times[kind].append(seconds)
        print(f"death {number + 1} of {options.deaths}", file=sys.stderr)
    barrier, done = (statistics.median(cost[place] for cost in costs) * 1e6 for place in (0, 1))
    print(f"{options.ranks} ranks on {os.cpu_count()} cores, heartbeat {options.heartbeat:g} s")
    print(f"done     {done:6.0f} us per key; a bare barrier over the store {barrier:.0f} us")
    for kind, found in times.items():
        print(f"{kind}   {statistics.median(found):6.3f} s from the signal to the result, worst {max(found):.3f} s")
    return 0


def one_job(ranks: int, keys: int, heartbeat: float, sent: int) -> tuple[tuple[float, float], float]:
    """Seconds per barrier and per done on rank 0, and from the death to the last result."""
    with serve_store() as address:
        store = job_store("bench", address=address, timeout=WAIT)
        children = [
            RANKS.Process(target=run_rank, args=(address, rank, ranks, keys, heartbeat, sent)) for rank in range(ranks)
        ]
        for child in children:
            child.start()
        dying = ranks // 2
        survivors = [rank for rank in range(ranks) if rank != dying]
        try:
            store.wait([f"result of {rank}" for rank in survivors], WAIT)
            died = float(store.get("death"))
            last = max(float(store.get(f"result of {rank}")) for rank in survivors)
            barrier, done = map(float, store.get("cost").split())
        finally:
            children[dying].kill()  # it may be stopped
            for child in children:
                child.join()
    return (barrier, done), last - died


def run_rank(address: str, rank: int, ranks: int, keys: int, heartbeat: float, sent: int) -> None:
    """One rank: barriers, keys, and a death in the middle of the ranks."""
    own = job_store("bench", address=address)
    host, _, port = address.rpartition(":")
    world = PrefixStore("world", TCPStore(host, int(port), is_master=False))
    dist.init_process_group("gloo", store=world, rank=rank, world_size=ranks)
    epochs = Epochs(job_store("epochs", address=address), rank=rank, ranks=range(ranks), heartbeat=heartbeat)
    ring = Neighbours(epochs.lost, members=epochs.current.members, name="epoch 0")
    began = time.perf_counter()
    for number in range(keys):
        if own.add(f"came {number}", 1) == ranks:
            own.set(f"over {number}", "")
        own.wait([f"over {number}"], WAIT)
    between = time.perf_counter()
    for number in range(keys):
        if not epochs.done(f"key {number}"):
            raise RuntimeError(f"an alarm at key {number}: {epochs.vote(f'key {number}')}")
    if rank == 0:
        own.set("cost", f"{(between - began) / keys} {(time.perf_counter() - between) / keys}")
    if rank == ranks // 2:
        own.set("death", str(time.time()))
        os.kill(os.getpid(), sent)
    if epochs.done("the last"):
        raise RuntimeError("the dead rank has said done")
    epochs.vote("the last")
    own.set(f"result of {rank}", str(time.time()))
    ring.close()
    epochs.close()


if __name__ == "__main__":
    sys.exit(main())
