"""What a process holds between two steps, so that a run can show that none of it grows."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
import tracemalloc
from pathlib import Path

import attrs
import torch.distributed as dist

from pipegrid.topology.torch_compat import default_store

MALLOC = ctypes.CDLL(None)


class MallInfo(ctypes.Structure):
    """What glibc's `mallinfo2` tells, in bytes but for the counts: `uordblks` given out and `fordblks` held free by all
    arenas, `hblkhd` given out by mmap."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple(zip(_names, [ctypes.c_size_t] * 10, strict=True))


def _heap():
    """Zeros where the C library is no glibc 2.33 or newer."""
    if not hasattr(MALLOC, "mallinfo2"):
        return MallInfo()
    MALLOC.mallinfo2.restype = MallInfo
    return MALLOC.mallinfo2()


def native_threads():
    """Threads of this process, those of other languages included."""
    return len(list(Path("/proc/self/task").iterdir()))


def _descriptors():
    """Open descriptors; the monitor's thread holds one more while it reads a store that is a file."""
    time.sleep(0.01)
    return len(list(Path("/proc/self/fd").iterdir()))


@attrs.frozen
class Held:
    """What this process holds; ``keys`` is the whole job's store.

    ``malloc`` is what the C library gave out and did not get back, ``used`` the resident memory without what it holds
    free.
    """

    rss: int
    used: int
    malloc: int
    traced: int
    objects: int
    descriptors: int
    threads: int
    native_threads: int
    keys: int

    @classmethod
    def now(cls, ranks):
        """Count between two barriers, while no rank is in a step. A barrier of the test's own would add keys."""
        dist.barrier()
        if ranks.fake_device is not None:
            ranks.fake_device.forget()
        gc.collect()
        heap = _heap()
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        held = cls(
            rss=rss,
            used=rss - heap.fordblks,
            malloc=heap.uordblks + heap.hblkhd,
            traced=tracemalloc.get_traced_memory()[0],
            objects=len(gc.get_objects()),
            descriptors=min(_descriptors() for _ in range(10)),
            threads=threading.active_count(),
            native_threads=native_threads(),
            keys=default_store().num_keys(),
        )
        dist.barrier()
        return held

    def require_no_more(self, before, **bounds):
        """Each figure in ``bounds`` has grown by no more than its bound."""
        for what, more in bounds.items():
            assert getattr(self, what) <= getattr(before, what) + more, (what, before, self)
