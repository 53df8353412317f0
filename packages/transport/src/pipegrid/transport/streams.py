"""All uses of `torch.cuda`: streams and events. On a device without streams every function here does nothing.

Tests replace `cuda` and `types` to run the same code over virtual streams on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

cuda: Any = torch.cuda
_AS_IT_IS: AbstractContextManager[None] = nullcontext()
types = frozenset({"cuda"})  # of device that have streams


def has_streams(device: torch.device) -> bool:
    """Whether work on the device runs in streams, beside the host."""
    return device.type in types


def current_device() -> torch.device | None:
    """The device with streams that is current; None where there is none."""
    return torch.device("cuda", cuda.current_device()) if cuda.is_available() else None


def used_device() -> torch.device | None:
    """The current device, where this process has used one with streams; does not begin to."""
    return current_device() if cuda.is_initialized() else None


def synchronize(device: torch.device) -> None:
    """Hold this thread until the device has done all that was issued to it."""
    cuda.synchronize(device)


def new_stream(device: torch.device) -> torch.Stream | None:
    """A stream beside the one that computes; None on a device without streams."""
    return cuda.Stream(device) if has_streams(device) else None


def current_stream(device: torch.device) -> torch.Stream | None:
    """The current stream of this thread; None on a device without streams."""
    return cuda.current_stream(device) if has_streams(device) else None


def working_on(stream: torch.Stream | None) -> AbstractContextManager[None]:
    """Make ``stream`` the current stream of this thread inside the block; None changes nothing."""
    return _AS_IT_IS if stream is None else _under(stream)


@contextmanager
def _under(stream: torch.Stream) -> Iterator[None]:
    with cuda.device(stream.device), cuda.stream(stream):
        yield


def mark(device: torch.device, *, blocking: bool = False) -> Sequence[Any]:
    """Record an event on the current stream, if the device has any; a waiter for a ``blocking`` one sleeps."""
    stream = current_stream(device)
    return () if stream is None else (stream.record_event(cuda.Event(blocking=True) if blocking else None),)


def timed_mark(device: torch.device) -> Any:
    """Record an event that keeps its time on the current stream of a device with streams."""
    return cuda.current_stream(device).record_event(cuda.Event(enable_timing=True))


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds of the device between two events of `timed_mark`; the host waits for the second."""
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000.0


def follow(events: Sequence[Any], device: torch.device) -> None:
    """Order the current stream after events."""
    for event in events:
        cuda.current_stream(device).wait_event(event)


def used_here(tensors: Sequence[Tensor], made_on: torch.Stream | None) -> None:
    """Tell the allocator that tensors allocated on the stream ``made_on`` are also used on the current stream."""
    for tensor in tensors if made_on is not None else ():
        here = cuda.current_stream(tensor.device)
        if here != made_on:
            tensor.record_stream(here)


def pinned_like(tensor: Tensor) -> Tensor:
    """Host memory for a copy of ``tensor``: pinned where the device has streams."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=has_streams(tensor.device))
