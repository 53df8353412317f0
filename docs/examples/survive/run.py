"""Train on six ranks, four of which are killed with -9 one after the other: `python run.py`. See README.md."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

# The examples are folders of modules, not installed packages; their parent makes them importable by name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from survive import job

BOUND = 1e-9
SECONDS = 600.0


def main(arguments: Sequence[str]) -> int:
    """Train twice and compare; 0 where all is as promised."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__)
    parser.add_argument("--steps", type=int, default=160, help="of training (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/survive"), help="directory (default %(default)s)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    console, ranks = Console(highlight=False), job.POSITIONS * job.REPLICAS
    deaths = list(job.victims())[: given.steps // job.KILLED_EVERY]
    console.print(f"{given.steps} steps of {job.POSITIONS} stages x {job.REPLICAS} replicas on {ranks} processes")
    for number, (rank, action) in enumerate(deaths, start=1):
        console.print(f"  step {number * job.KILLED_EVERY}: kill -9 of rank {rank} as it comes to {action}")
    began = time.monotonic()
    codes = _run(ranks, given)
    found = [torch.load(file) for rank in range(ranks) if (file := _file(given.out, rank)).exists()]
    console.print(f"{len(found)} ranks are left after {time.monotonic() - began:.0f} s; exit codes {codes}")
    if len(found) != ranks - len(deaths):
        return 1
    whole, losses = job.train_alone(given.steps)
    wanted = whole.state_dict()
    far = max(
        (one["stage"][name] - wanted[f"{one['position']}.{name}"]).abs().max().item()
        for one in found
        for name in one["stage"]
    )
    apart = max(abs(a - b) for one in found for a, b in zip(one["losses"], losses, strict=True))
    for one in found:
        whole[one["position"]].load_state_dict(one["stage"])
    console.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; accuracy {job.Digits.load().accuracy(whole):.1%}")
    console.print(f"against an undisturbed run in one process: losses differ by {apart:.1e}, weights by {far:.1e}")
    return 0 if max(far, apart) < BOUND else 1


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


def _run(ranks: int, given: argparse.Namespace) -> list[int | None]:
    """Start the ranks and wait until all have ended; their exit codes. The store lives here, where no rank is."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    started = []
    for rank in range(ranks):
        _file(given.out, rank).unlink(missing_ok=True)
        started.append(context.Process(target=_rank, args=(rank, ranks, store.port, given.steps, given.out)))
        started[-1].start()
    end = time.monotonic() + SECONDS
    for one in started:
        one.join(max(0.0, end - time.monotonic()))
        if one.exitcode is None:
            one.kill()
            one.join()
    return [one.exitcode for one in started]


def _rank(rank: int, ranks: int, port: int, steps: int, folder: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    found = job.train(PrefixStore("survive", TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))), steps)
    torch.save(found | {"position": rank // job.REPLICAS}, _file(folder, rank))
    os._exit(0)  # without the farewell of groups that have dead members


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
