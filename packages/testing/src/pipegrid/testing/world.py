"""One test's world of ranks: a fresh default process group over a file store, and its end."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from pipegrid.fake_nccl import FakeDevice, Nccl2Rules, register
from pipegrid.testing.messages import Channel, RunTest
from pipegrid.testing.ranks import Ranks

# Several ranks on one GPU: an error of NCCL before 2.30, broken before this version (nccl#2257).
_NCCL_SHARED_GPU = (2, 31, 2)
# What several ranks on one GPU need; NCCL reads it once in each process. An environment that says otherwise is kept.
_SHARED_GPU_SETTINGS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
# Growth of a worker's descriptors and native threads that is not a leak: lazily opened files, a library's own thread.
_SLACK = 16
_LAST_BREATH = 0.5
# What torch calls the default group's backends. With NCCL on the GPU, gloo serves the CPU tensors: control messages and
# objects. Gloo takes CUDA tensors, too: it copies them through the host.
_BACKENDS = {"nccl": "cpu:gloo,cuda:nccl", "fake_nccl": "cpu:fake_nccl", "staged": "cpu:gloo,cuda:gloo"}


def loopback_only() -> None:
    """Make gloo listen on the loopback device: all ranks are on this machine."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def make_world(test: RunTest, channel: Channel) -> Ranks:
    """Make the default group of ``test`` and this rank's view of it."""
    device, settings, directory = device_of(test), test.settings, Path(test.directory)
    store = FileStore(str(directory / "store"), settings.world_size)
    fake_device = None
    if settings.backend == "fake_nccl":
        mode = settings.fake_nccl
        nccl2 = Nccl2Rules() if mode in ("nccl2", "lazy") else None
        fake_device = FakeDevice(serial=mode == "serial", nccl2=nccl2, lazy=mode in ("legacy", "lazy"))
        fake_device.watchdog.store = store
        register(fake_device)
    backend = _BACKENDS.get(settings.backend, settings.backend)
    # Of two hosts, the default group's store is on host a, as a launcher has it; that of the test knows no hosts.
    common = store if test.server is None else TCPStore(*test.server, is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=PrefixStore("world", common), rank=test.rank, world_size=settings.world_size)
    ranks = Ranks(
        rank=test.rank,
        world_size=settings.world_size,
        backend=settings.backend,
        device=device,
        deadline=settings.deadline,
        strict_sends=settings.strict_sends,
        host=settings.hosts * test.rank // settings.world_size,
        shared_path=directory / "shared",
        store=PrefixStore("test", store),
        fake_device=fake_device,
        channel=channel,
    )
    ranks.barrier()  # no rank begins the test, or dies in it, while another still connects
    return ranks


def end_world(ranks: Ranks | None) -> None:
    """Destroy the default group and every group that the test left."""
    if ranks is not None and ranks.fake_device is not None:
        ranks.fake_device.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()  # the GPU is shared with the other workers
    gc.collect()


def device_of(test: RunTest) -> torch.device:
    """The rank's device: the CPU, or a GPU, which several ranks share where there are fewer GPUs than ranks."""
    backend, world_size = test.settings.backend, test.settings.world_size
    count = torch.cuda.device_count() if backend in ("nccl", "staged") else 0
    if count == 0:
        if backend == "nccl":
            raise pytest.UsageError("backend 'nccl' needs a GPU and torch sees none; use --backend gloo")
        return torch.device("cpu")
    if backend == "nccl" and test.largest_world > count and nccl_version() >= _NCCL_SHARED_GPU:
        for name, value in _SHARED_GPU_SETTINGS.items():
            os.environ.setdefault(name, value)
    elif backend == "nccl" and world_size > count:
        shown, needed = (".".join(map(str, version)) for version in (nccl_version(), _NCCL_SHARED_GPU))
        pytest.skip(
            f"{world_size} ranks on {count} GPUs: NCCL {shown} is loaded, sharing a GPU needs {needed}; "
            "preload one, or use --backend staged"
        )
    device = torch.device("cuda", test.rank % count)
    torch.cuda.set_device(device)
    return device


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL library that is loaded, which a preloaded one is, and not of the one compiled against."""
    code = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:  # a torch with NCCL inside: its own is the only one
        inside: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return inside
    library.ncclGetVersion(ctypes.byref(code))
    return code.value // 10000, code.value // 100 % 100, code.value % 100


@contextmanager
def watch_leaks(left: list[str]) -> Iterator[None]:
    """Append to ``left`` what the block left behind.

    That is: child processes, Python threads, and more descriptors or native threads than slack.
    """
    threads = set(threading.enumerate())
    before, on_gpu = _held(), torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    yield
    new = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in new:
        thread.join(_LAST_BREATH)
    if alive := [thread.name for thread in new if thread.is_alive()]:
        left.append(f"threads {', '.join(alive)}")
    if _has_children():
        left.append("child processes")
    # The first use of a GPU opens it for good: the driver's descriptors and threads are no test's.
    if on_gpu == torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        left.extend(
            f"{count - before[what]} {what}" for what, count in _held().items() if count > before[what] + _SLACK
        )


def _has_children() -> bool:
    """True if a child process runs, or has ended and was not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _held() -> dict[str, int]:
    places = {"descriptors": "/dev/fd", "native threads": "/proc/self/task"}
    return {what: sum(1 for _ in Path(place).iterdir()) for what, place in places.items() if Path(place).is_dir()}
