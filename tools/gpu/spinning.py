"""A kernel that spins on a flag in host memory, as a posted receive does, and the process that sets the flag in time.

Needs torch and the CUDA driver (`libcuda.so.1`), no compiler: the kernel is PTX text, which the driver compiles.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from typing import Any, Protocol

import torch

SLOTS = 64  # kernels at a time
_STREAMS = 16  # fewer than a device's pool, of which NCCL's streams are as well
_FLAGS, _STARTED, _DUE = 0, 4 * SLOTS, 8 * SLOTS  # offsets in the shared page
_MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP

# One thread polls and the others wait for it, so that a thread block takes its place on an SM and little of PCIe.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry spin(.param .u64 flag_address, .param .u64 started_address)
{
    .reg .pred %p<3>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<3>;

    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    ld.param.u64 %rd1, [flag_address];
    ld.param.u64 %rd2, [started_address];
    mov.u32 %r2, 1;
    st.volatile.global.u32 [%rd2], %r2;
AGAIN:
    ld.volatile.global.u32 %r3, [%rd1];
    setp.eq.u32 %p2, %r3, 0;
    @%p2 bra AGAIN;
DONE:
    bar.sync 0;
    ret;
}
"""


class Keeper:
    """The flags, in a page that a second process shares and in which it sets each flag when its time is over.

    A process, not a thread: a call that holds the interpreter's lock while it waits for the device would keep a thread
    from setting the flag that it waits for. Make it before anything touches the GPU, since it forks.
    """

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._flags = (ctypes.c_uint32 * SLOTS).from_buffer(self._page, _FLAGS)
        self._started = (ctypes.c_uint32 * SLOTS).from_buffer(self._page, _STARTED)
        self._due = (ctypes.c_double * SLOTS).from_buffer(self._page, _DUE)
        self._next = 0
        parent = os.getpid()
        if os.fork() == 0:
            self._keep(parent)

    @property
    def address(self) -> int:
        """Of the page."""
        return ctypes.addressof(self._flags)

    def arm(self, seconds: float) -> int:
        """A slot whose flag is set after so many seconds, at the latest."""
        slot, self._next = self._next, (self._next + 1) % SLOTS
        self._flags[slot] = self._started[slot] = 0
        self._due[slot] = time.monotonic() + seconds
        return slot

    def release(self, slot: int) -> None:
        """Set a flag now."""
        self._flags[slot] = 1

    def is_set(self, slot: int) -> bool:
        """Whether a flag is set: by `release`, or because its time is over."""
        return bool(self._flags[slot])

    def start(self, slot: int) -> None:
        """What the kernel does first: note that it runs."""
        self._started[slot] = 1

    def has_started(self, slot: int) -> bool:
        """Whether the kernel of a slot has begun to run."""
        return bool(self._started[slot])

    def _keep(self, parent: int) -> None:
        """In the second process: set flags that are due, until the first one ends."""
        try:
            while os.getppid() == parent:
                now = time.monotonic()  # the same clock in both
                for slot in range(SLOTS):
                    if 0 < self._due[slot] <= now:
                        self._flags[slot] = 1
                time.sleep(0.001)
        finally:
            os._exit(0)


class Device(Protocol):
    """What spins: the GPU, or threads in its place."""

    keeper: Keeper

    def spin(self, seconds: float, ctas: int = 1) -> int:
        """Launch a spinning kernel on a stream of its own; its slot."""

    def idle(self) -> None:
        """Wait until nothing spins any more."""


def begun(device: Device, slots: list[int], seconds: float = 0.5) -> int:
    """How many of some kernels have begun to run within ``seconds``."""
    end = time.monotonic() + seconds
    while not all(map(device.keeper.has_started, slots)) and time.monotonic() < end:
        time.sleep(0.0005)
    return sum(map(device.keeper.has_started, slots))


class Gpu:
    """Spinning kernels on the current GPU, each of 512 threads per thread block, as NCCL's are."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        torch.zeros(1, device="cuda")  # makes the context
        self._streams = [torch.cuda.Stream() for _ in range(_STREAMS)]  # type: ignore[no-untyped-call]
        self._driver, self._context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        self._driver.cuCtxGetCurrent(ctypes.byref(self._context))
        self.call("cuMemHostRegister_v2", keeper.address, mmap.PAGESIZE, flags=_MAPPED)
        page = ctypes.c_void_p()
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(page), keeper.address, flags=0)
        self._page = page.value or 0
        self._kernel = self.load()

    def call(self, name: str, *arguments: Any, flags: int | None = None) -> None:
        """A function of the driver, from any thread; integers are addresses and sizes, ``flags`` comes last.

        Raises:
            RuntimeError: it returned an error.
        """
        self._driver.cuCtxSetCurrent(self._context)
        wide = [ctypes.c_size_t(each) if isinstance(each, int) else each for each in arguments]
        status = getattr(self._driver, name)(*wide, *([] if flags is None else [ctypes.c_uint(flags)]))
        if status != 0:
            raise RuntimeError(f"{name} returned CUDA error {status}")

    def load(self) -> ctypes.c_void_p:
        """The kernel, from a new module."""
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX))
        self.call("cuModuleGetFunction", ctypes.byref(kernel), module, ctypes.c_char_p(b"spin"))
        return kernel

    def spin(self, seconds: float, ctas: int = 1) -> int:
        """Launch a spinning kernel on a stream of its own; its slot."""
        slot = self.keeper.arm(seconds)
        addresses = [ctypes.c_uint64(self._page + offset + 4 * slot) for offset in (_FLAGS, _STARTED)]
        parameters = (ctypes.c_void_p * 2)(*(ctypes.addressof(each) for each in addresses))
        stream = ctypes.c_void_p(self._streams[slot % _STREAMS].cuda_stream)
        shape = [ctypes.c_uint(size) for size in (ctas, 1, 1, 512, 1, 1, 0)]  # grid, block, shared memory
        self.call("cuLaunchKernel", self._kernel, *shape, stream, parameters, None)
        return slot

    def idle(self) -> None:
        """Wait until nothing spins any more."""
        torch.cuda.synchronize()


class Dry:
    """Threads in the place of spinning kernels, for a run without a GPU: the frame runs, and nothing is measured."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self._running: list[threading.Thread] = []

    def spin(self, seconds: float, ctas: int = 1) -> int:
        """Start a thread that ends when the flag of its slot is set."""
        del ctas
        slot = self.keeper.arm(seconds)

        def run() -> None:
            self.keeper.start(slot)
            while not self.keeper.is_set(slot):
                time.sleep(0.0005)

        self._running.append(threading.Thread(target=run, daemon=True))
        self._running[-1].start()
        return slot

    def idle(self) -> None:
        """Wait until nothing spins any more."""
        for thread in self._running.copy():
            thread.join()
        self._running = [thread for thread in self._running if thread.is_alive()]
