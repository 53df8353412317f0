"""Facts about a machine with GPUs, printed one per line: versions, transports between two ranks, memory of groups."""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import FileStore  # type: ignore[attr-defined]

MEGABYTE = 1 << 20
GROUPS = (0, 1, 4, 8)


def versions() -> None:
    """Of the system, torch and its NCCL, and the NCCL that is loaded."""
    print(f"python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(f"preloaded: {os.environ.get('LD_PRELOAD') or 'nothing'}")
    for index in range(torch.cuda.device_count()):
        print(f"GPU {index}: {torch.cuda.get_device_name(index)}, {torch.cuda.mem_get_info(index)[1] // MEGABYTE} MB")
    if dist.is_nccl_available():
        code = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
        compiled: object = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        print(f"NCCL: compiled against {compiled}, loaded {code.value}")
    else:
        print("NCCL: torch was built without it")


def exchange(rank: int, device: torch.device, options: argparse.Namespace) -> None:
    """Two ranks exchange a megabyte, both ways, five times."""
    mine, theirs = (torch.full((MEGABYTE // 4,), float(rank), device=device) for _ in range(2))
    for turn in range(5):
        began = time.perf_counter()
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        )
        for work in works:
            work.wait()
        value = theirs[-1].item()
        if value != 1 - rank:
            raise RuntimeError(f"rank {rank} received {value} from rank {1 - rank}")
        if rank == 0:
            print(f"exchange {turn} of 1 MB: {1e3 * (time.perf_counter() - began):.2f} ms")
    if rank == 0 and options.works:
        Path(options.works).touch()


def memory(rank: int, device: torch.device, options: argparse.Namespace) -> None:
    """GPU memory that groups of two ranks take, each connected by one transfer of a number."""
    del options
    made = 0
    for count in GROUPS:
        for _ in range(made, count):
            group = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(1, device=device), group=group)
            made += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        if rank == 0:
            free = torch.cuda.mem_get_info(device)[0] // MEGABYTE if device.type == "cuda" else "no"
            print(f"{count} groups: {free} MB free on the GPU")
        dist.barrier()


def _rank(
    rank: int, part: Callable[[int, torch.device, argparse.Namespace], None], options: argparse.Namespace, store: str
) -> None:
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        options.backend,
        store=FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=options.seconds),
    )
    part(rank, device, options)
    dist.destroy_process_group()


def main() -> None:
    """Print the facts of one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("versions", "exchange", "memory"))
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="nccl")
    parser.add_argument("--seconds", type=float, default=60.0, help="for anything to happen between the ranks")
    parser.add_argument("--works", help="a file to make where the exchange worked")
    options = parser.parse_args()
    if options.part == "versions":
        versions()
        return
    part = exchange if options.part == "exchange" else memory
    mp.set_forkserver_preload(["torch.distributed"])
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(_rank, (part, options, str(Path(directory) / "store")), 2, start_method="forkserver")  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
