#!/usr/bin/env python3
"""What the proofs assume of a GPU, measured beside a kernel that spins as a posted receive does: one table.

    python tools/gpu/7_spin.py [calls] [polls] [receives] [streams] [communicators]

One GPU and one process; needs torch alone. A call *waits* where it returns only after the spinning kernel's time is
over. The last column says what the proofs assume; an empty cell, nothing. ``DRY_RUN=1``: threads in the place of
kernels, and calls that wait or return as assumed, so that the frame of each question runs on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from spinning import Device, Dry, Gpu, begun
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, untyped

LIMIT = 540  # seconds for everything; then the process ends with its stacks
MEGABYTE = 1 << 20
WAITS, RETURNS = "waits", "returns"
DRY = bool(os.environ.get("DRY_RUN"))
SPIN = 0.6 if DRY else 1.5  # seconds that a kernel spins where nothing sets its flag before
Call: TypeAlias = Callable[[], object]

# The calls, in the order in which they are made, and what the proofs assume of each.
ASSUMED = {
    "torch.cuda.synchronize()": WAITS,
    "a kernel that was used before, on another stream": RETURNS,
    "memory from torch's cache": RETURNS,
    "Event.query() of an idle stream": RETURNS,
    "first use of a kernel (lazy module loading)": WAITS,
    "first matmul (cuBLAS, its workspace)": "",
    "cuModuleLoadData": WAITS,
    "new memory (cudaMalloc)": "",
    "empty_cache() (cudaFree)": WAITS,
    "cuMemFree": WAITS,
    "pin_memory=True (cudaHostAlloc)": WAITS,
    "cuMemFreeHost": "",
    "cuStreamCreate": "",
    "copy to the GPU from memory that is not pinned": "",
    ".cpu() of a tensor": "",
    "mem_get_info()": "",
}
POLLS = ("Event.query() of a stream that has ended", "Work.is_completed() of a work that has ended")
FREES = ("cuMemFree", "empty_cache() (cudaFree)")
ENDS = ("abort()", "destroy_process_group()")


def row(question: str, answer: str, assumed: str = "") -> None:
    """One row of the table."""
    print(f"| {question} | {answer} | {assumed} |", flush=True)


class GpuCalls:
    """The calls on a GPU, each made ready before anything spins."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._x = torch.ones(1024, device="cuda").add_(1)
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def ready(self, text: str) -> Call:
        """A call of `ASSUMED`."""
        gpu, x = self._gpu, self._x
        if text == "a kernel that was used before, on another stream":
            return self._add
        if text == "memory from torch's cache":
            torch.empty(4 * MEGABYTE, device="cuda")
            return lambda: torch.empty(4 * MEGABYTE, device="cuda")
        if text == "Event.query() of an idle stream":
            return self.idle_event().query
        if text == "new memory (cudaMalloc)":
            return lambda: torch.empty(300 * MEGABYTE, device="cuda")
        if text == "empty_cache() (cudaFree)":
            torch.empty(300 * MEGABYTE, device="cuda")
            return torch.cuda.empty_cache
        if text == "cuMemFree":
            address = ctypes.c_uint64()
            gpu.call("cuMemAlloc_v2", ctypes.byref(address), 64 * MEGABYTE)
            return lambda: gpu.call("cuMemFree_v2", address)
        if text == "cuMemFreeHost":
            host = ctypes.c_void_p()
            gpu.call("cuMemHostAlloc", ctypes.byref(host), 64 * MEGABYTE, flags=0)
            return lambda: gpu.call("cuMemFreeHost", host)
        plain = torch.ones(MEGABYTE)
        calls: dict[str, Call] = {
            "torch.cuda.synchronize()": torch.cuda.synchronize,
            "first use of a kernel (lazy module loading)": lambda: torch.hypot(x, x),
            "first matmul (cuBLAS, its workspace)": lambda: x.view(32, 32) @ x.view(32, 32),
            "cuModuleLoadData": gpu.load,
            "pin_memory=True (cudaHostAlloc)": lambda: torch.empty(64 * MEGABYTE, dtype=torch.uint8, pin_memory=True),
            "cuStreamCreate": lambda: gpu.call("cuStreamCreate", ctypes.byref(ctypes.c_void_p()), flags=1),
            "copy to the GPU from memory that is not pinned": lambda: plain.to("cuda"),
            ".cpu() of a tensor": x.cpu,
            "mem_get_info()": torch.cuda.mem_get_info,
        }
        return calls[text]

    def poll(self, text: str) -> Call:
        """A poll of `POLLS`."""
        if text == POLLS[0]:
            return self.idle_event().query
        work: Any = dist.all_reduce(self._x, async_op=True)
        torch.cuda.synchronize()
        poll: Call = work.is_completed
        return poll

    def idle_event(self) -> torch.cuda.Event:
        """An event that has passed, of a stream with nothing else on it."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._side)
        event.synchronize()
        return event

    def _add(self) -> None:
        with torch.cuda.stream(self._side):
            self._x.add_(1)
        self._side.synchronize()


class DryCalls:
    """Calls that wait or return as the proofs assume."""

    def __init__(self, dry: Dry) -> None:
        self._dry = dry

    def ready(self, text: str) -> Call:
        """A call of `ASSUMED`."""
        return self._dry.idle if ASSUMED[text] == WAITS else bool

    def poll(self, text: str) -> Call:
        """A poll of `POLLS`."""
        del text
        return self._dry.idle


def beside(device: Device, call: Call) -> str:
    """How a call goes while a kernel spins: waits, returns or fails; and its time."""
    slot = device.spin(SPIN)
    if not begun(device, [slot]):
        device.release(slot)
        device.idle()
        return "the spinning kernel did not start"
    began = time.perf_counter()
    try:
        call()
        word = WAITS if device.has_ended(slot) else RETURNS
        if time.perf_counter() - began > 1.5 * SPIN:
            word = "takes longer than the kernel spun"
    except RuntimeError as error:
        word = f"fails: {str(error).splitlines()[0]}"
    took = time.perf_counter() - began
    device.release(slot)
    device.idle()
    return f"{word}, {1e3 * took:.1f} ms"


def calls(device: Device, made: GpuCalls | DryCalls) -> None:
    """Which calls wait for the device."""
    for text, assumed in ASSUMED.items():
        ready = made.ready(text)
        device.idle()
        row(text, beside(device, ready), assumed)


def polls_behind_a_free(device: Device, made: GpuCalls | DryCalls) -> None:
    """Whether a poll waits where another thread is in a free that waits for the device."""
    for free in FREES:
        for text in POLLS:
            poll, call = made.poll(text), made.ready(free)
            device.idle()
            freeing = threading.Thread(target=call)

            def behind(freeing: threading.Thread = freeing, poll: Call = poll) -> None:
                freeing.start()
                time.sleep(0.1)  # it is in the driver by now
                poll()

            answer = beside(device, behind)
            if freeing.ident is not None:
                freeing.join()
            row(f"{text}, another thread in {free}", answer, WAITS)


def early_receives(device: Device) -> None:
    """What kernels that spin take from a matmul beside them."""
    side, repeats = (64, 3) if DRY else (8192, 20)
    where = torch.device("cpu" if DRY else "cuda")
    a = torch.randn(side, side, device=where, dtype=torch.float32 if DRY else torch.bfloat16)

    def rate() -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            a @ a
        if not DRY:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            event.synchronize()  # of this stream only
        return 2e-12 * side**3 * repeats / (time.perf_counter() - began)

    rate()
    alone = rate()
    row(f"matmul of {side}, alone", "not measured" if DRY else f"{alone:.1f} TFLOP/s")
    for kernels, ctas in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (1, 4), (4, 4), (1, 16), (1, 32), (4, 32)):
        slots = [device.spin(2 * SPIN, ctas) for _ in range(kernels)]
        started = begun(device, slots)
        reached = rate()
        stuck = any(map(device.has_ended, slots))
        for slot in slots:
            device.release(slot)
        device.idle()
        answer = "stuck behind them" if stuck else f"{reached:.1f} TFLOP/s, {100 * reached / alone:.0f} %"
        answer = "not measured" if DRY else answer
        row(f"beside {kernels} receives of {ctas} thread blocks ({started} started)", answer)


def streams(device: Device) -> None:
    """How many streams go on while one of them waits for a kernel that spins: they share the GPU's hardware queues."""
    most = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
    for count in (2, 4, 8, 16, 28):
        slot, done = device.spin(SPIN), 0
        if isinstance(device, Gpu):
            spinning = device.stream(slot)
            every = [torch.cuda.Stream() for _ in range(2 * count + 4)]  # type: ignore[no-untyped-call]
            several = {each.cuda_stream: each for each in every if each != spinning}  # they come round again
            waiting, *others = list(several.values())[: count + 1]
            x = torch.zeros(1, device="cuda")
            waiting.wait_stream(spinning)
            with torch.cuda.stream(waiting):
                x.add_(1)
            events: list[Any] = []
            for stream in others:
                with torch.cuda.stream(stream):
                    x.add_(1)
                    events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                    events[-1].record()
            time.sleep(SPIN / 4)
            done = sum(event.query() for event in events)
        device.release(slot)
        device.idle()
        answer = "not measured" if DRY else f"{done} go on"
        row(f"{count} streams beside one that waits for a receive, CUDA_DEVICE_MAX_CONNECTIONS {most}", answer)


def communicators(device: Device) -> None:
    """Memory of a communicator by the largest number of its thread blocks, and its end while a kernel spins."""
    backend, x = "gloo" if DRY else "nccl", torch.ones(1, device="cpu" if DRY else "cuda")

    def connected(most: int | None = None) -> Any:
        options = None
        if not DRY and most is not None:
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = most
        group = dist.new_group([0], backend=backend, pg_options=options)
        dist.all_reduce(x, group=group)
        device.idle()
        return group

    def free() -> int:
        return 0 if DRY else torch.cuda.mem_get_info()[0] // MEGABYTE

    connected()
    row("first collective of a new communicator", beside(device, device.idle if DRY else connected), WAITS)
    for most in (1, 2, 4, 8, 16, 32):
        before = free()
        connected(most)
        taken = "not measured" if DRY else f"{before - free()} MB"
        row(f"memory of a communicator of one rank with max_ctas={most}", taken)
    for text in ENDS:
        group = connected()
        end: Call = group.abort if text == ENDS[0] else partial(dist.destroy_process_group, group)
        row(f"{text} of an idle communicator", beside(device, device.idle if DRY else end), WAITS)


@contextlib.contextmanager
def alone_in_a_world() -> Iterator[None]:
    """A default group of this process."""
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group(
            "gloo" if DRY else "cpu:gloo,cuda:nccl",
            store=FileStore(str(Path(directory) / "store"), 1),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=60),
        )
        yield


def main() -> None:
    """Print the table, or the parts of it that are named."""
    made: GpuCalls | DryCalls
    parts: dict[str, Call] = {
        "calls": lambda: calls(device, made),
        "polls": lambda: polls_behind_a_free(device, made),
        "receives": lambda: early_receives(device),
        "streams": lambda: streams(device),
        "communicators": lambda: communicators(device),
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*parts, []])
    wanted = parser.parse_args().parts or list(parts)
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    device = Dry() if DRY else Gpu()
    made = GpuCalls(device) if isinstance(device, Gpu) else DryCalls(device)
    device.release(device.spin(SPIN))  # its own first use
    device.idle()
    print(f"torch {torch.__version__}, {'a dry run: nothing is measured' if DRY else torch.cuda.get_device_name()}")
    row("question", "answer", "assumed")
    row("---", "---", "---")
    with alone_in_a_world():
        for part in wanted:
            parts[part]()
    sys.stdout.flush()
    os._exit(0)  # the end of a communicator that was aborted is no question of this table


if __name__ == "__main__":
    main()
