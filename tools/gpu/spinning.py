"""A kernel that spins on a flag in host memory, as a posted receive does, and ends by itself when its time is over.

Needs torch and the CUDA driver (`libcuda.so.1`), no compiler: the kernel is PTX text, which the driver compiles.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, Protocol

import torch

SLOTS = 64  # kernels at a time
_STREAMS = 16  # fewer than a device's pool, of which NCCL's streams are as well
_WORDS = 3  # of 4 bytes for each kernel: its flag, whether it has started, whether it has ended
_MAPPED = 2  # CU_MEMHOSTALLOC_DEVICEMAP

# One thread polls and the others wait for it, so that a thread block takes its place on an SM and little of PCIe. It
# looks at the GPU's clock: a call that holds the interpreter's lock while it waits could keep the host from the flag.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry spin(.param .u64 words_address, .param .u64 nanoseconds)
{
    .reg .pred %p<4>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<6>;

    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    ld.param.u64 %rd1, [words_address];
    ld.param.u64 %rd2, [nanoseconds];
    mov.u64 %rd3, %globaltimer;
    add.u64 %rd4, %rd3, %rd2;
    mov.u32 %r2, 1;
    st.volatile.global.u32 [%rd1+4], %r2;
AGAIN:
    ld.volatile.global.u32 %r3, [%rd1];
    setp.ne.u32 %p2, %r3, 0;
    @%p2 bra ENDED;
    mov.u64 %rd5, %globaltimer;
    setp.lt.u64 %p3, %rd5, %rd4;
    @%p3 bra AGAIN;
ENDED:
    st.volatile.global.u32 [%rd1+8], %r2;
    membar.sys;
DONE:
    bar.sync 0;
    ret;
}
"""


class Device(Protocol):
    """What spins: the GPU, or threads in its place."""

    def spin(self, seconds: float, ctas: int = 1) -> int:
        """Launch a spinning kernel on a stream of its own, which ends after so many seconds at the latest; its slot."""

    def release(self, slot: int) -> None:
        """Set the flag of a kernel: it ends now."""

    def has_started(self, slot: int) -> bool:
        """Whether a kernel has begun to run."""

    def has_ended(self, slot: int) -> bool:
        """Whether a kernel is over: released, or because its time is."""

    def idle(self) -> None:
        """Wait until nothing spins any more."""


def begun(device: Device, slots: list[int], seconds: float = 0.5) -> int:
    """How many of some kernels have begun to run within ``seconds``."""
    end = time.monotonic() + seconds
    while not all(map(device.has_started, slots)) and time.monotonic() < end:
        time.sleep(0.0005)
    return sum(map(device.has_started, slots))


class Gpu:
    """Spinning kernels on the current GPU, each of 512 threads per thread block, as NCCL's are."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes the context
        self._streams = [torch.cuda.Stream() for _ in range(_STREAMS)]  # type: ignore[no-untyped-call]
        self._driver, self._context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        self._driver.cuCtxGetCurrent(ctypes.byref(self._context))
        host, page = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(host), 4 * _WORDS * SLOTS, flags=_MAPPED)
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(page), host, flags=0)
        self._words = (ctypes.c_uint32 * (_WORDS * SLOTS)).from_address(host.value or 0)
        self._page = page.value or 0
        self._next = 0
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
        """Launch a spinning kernel on a stream of its own, which ends after so many seconds at the latest; its slot."""
        slot, self._next = self._next, (self._next + 1) % SLOTS
        self._words[_WORDS * slot : _WORDS * (slot + 1)] = [0] * _WORDS
        arguments = [ctypes.c_uint64(self._page + 4 * _WORDS * slot), ctypes.c_uint64(int(1e9 * seconds))]
        parameters = (ctypes.c_void_p * 2)(*(ctypes.addressof(each) for each in arguments))
        stream = ctypes.c_void_p(self.stream(slot).cuda_stream)
        shape = [ctypes.c_uint(size) for size in (ctas, 1, 1, 512, 1, 1, 0)]  # grid, block, shared memory
        self.call("cuLaunchKernel", self._kernel, *shape, stream, parameters, None)
        return slot

    def stream(self, slot: int) -> torch.cuda.Stream:
        """That of a kernel."""
        return self._streams[slot % _STREAMS]

    def release(self, slot: int) -> None:
        """Set the flag of a kernel: it ends now."""
        self._words[_WORDS * slot] = 1

    def has_started(self, slot: int) -> bool:
        """Whether a kernel has begun to run."""
        return bool(self._words[_WORDS * slot + 1])

    def has_ended(self, slot: int) -> bool:
        """Whether a kernel is over: released, or because its time is."""
        return bool(self._words[_WORDS * slot + 2])

    def idle(self) -> None:
        """Wait until nothing spins any more."""
        torch.cuda.synchronize()


class Dry:
    """Threads in the place of spinning kernels, for a run without a GPU: the frame runs, and nothing is measured."""

    def __init__(self) -> None:
        self._flags: list[threading.Event] = []
        self._running: list[threading.Thread] = []

    def spin(self, seconds: float, ctas: int = 1) -> int:
        """Start a thread that ends when the flag of its slot is set, or after so many seconds."""
        del ctas
        flag = threading.Event()
        self._flags.append(flag)
        self._running.append(threading.Thread(target=flag.wait, args=(seconds,), daemon=True))
        self._running[-1].start()
        return len(self._flags) - 1

    def release(self, slot: int) -> None:
        """Set the flag of a slot."""
        self._flags[slot].set()

    def has_started(self, slot: int) -> bool:
        """Threads start at once."""
        return self._running[slot].ident is not None

    def has_ended(self, slot: int) -> bool:
        """Whether the thread of a slot is over."""
        return not self._running[slot].is_alive()

    def idle(self) -> None:
        """Wait until nothing spins any more."""
        for thread in self._running:
            thread.join()
