"""CUDA streams, where there are any: on a CPU everything here is nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that this thread works on; None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextmanager
def working_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on a stream that was current elsewhere: in whatever thread this is, as if it were there."""
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def mark(device: torch.device) -> Sequence[Any]:
    """Where the current stream stands, as one event; no event on a CPU."""
    stream = current_stream(device)
    return () if stream is None else (stream.record_event(),)


def follow(events: Sequence[Any], device: torch.device) -> None:
    """Order the current stream after events."""
    for event in events:
        torch.cuda.current_stream(device).wait_event(event)


def used_here(tensors: Sequence[Tensor], made_on: torch.cuda.Stream | None) -> None:
    """Tell the allocator that tensors of another stream are used on the current one, too."""
    for tensor in tensors if made_on is not None else ():
        here = torch.cuda.current_stream(tensor.device)
        if here != made_on:
            tensor.record_stream(here)
