"""The work of one entry of the fake NCCL, as `torch.distributed` gives it to callers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipegrid.fake_nccl.device import FakeDevice
from pipegrid.fake_nccl.entries import QueueEntry
from pipegrid.fake_nccl.torch_compat import WorkBase

_LOOK_SECONDS = 0.005


def comes(event: threading.Event, seconds: float) -> bool:
    """Whether ``event`` is set within ``seconds`` of `time.monotonic`, which a test may move: no sleep for hours."""
    end = time.monotonic() + seconds
    while not event.wait(max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True


class FakeWork(WorkBase):  # type: ignore[misc]
    """The work of one entry, with the behaviour of NCCL's.

    `is_completed` is true for an entry that failed, too; then `exception` returns the error. `wait` raises nothing,
    as that of nccl-legacy; nccl2's raises an error that is known by then (`nccl2.Nccl2Work`). Its two forms: see
    `FakeDevice`. With a timeout it holds the host in both; past it, it aborts the group and raises, and so it does
    with what the entry failed with.

    Args:
        entry: of the work.
        device: that it was launched on.
        holds: whether a wait holds the host.
        abort: that of the group.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> device = FakeDevice()
        >>> dist.init_process_group(register(device), store=dist.HashStore(), rank=0, world_size=1)
        >>> type(dist.all_reduce(torch.ones(4), async_op=True)).__name__
        'FakeWork'
        >>> device.close()
    """

    def __init__(self, entry: QueueEntry, device: FakeDevice, *, holds: bool, abort: Callable[[], None]) -> None:
        super().__init__()
        self.entry = entry
        self._device, self._holds, self._abort = device, holds, abort

    def is_completed(self) -> bool:
        """Whether the entry has ended, well or not. On virtual streams a poll orders nothing: it might be earlier."""
        self._device.streams.poll(self.entry.signal)
        return self.entry.ended.is_set()

    def is_success(self) -> bool:
        """Whether the entry has ended well."""
        return self.entry.ended.is_set() and self.entry.error is None

    def exception(self) -> Exception | None:
        """The error of an entry that failed."""
        return self.entry.error if self.entry.ended.is_set() else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order later work of the current stream after the entry."""
        streams = self._device.streams
        self._device.order(self.entry)
        if self.entry.captured:
            return True
        if timeout is not None and timeout > timedelta(0):
            with streams.host_waiting():
                if not comes(self.entry.ended, timeout.total_seconds()):
                    self._abort()
                    raise dist.DistBackendError(f"{self.entry} is not done after {timeout.total_seconds():g} s")
            streams.host_waits("Work.wait(timeout)", self.entry.clock)
            if self.entry.error is not None:
                raise self.entry.error
        elif self._holds:
            with streams.host_waiting():
                self.entry.released.wait()
        return True

    synchronize = wait

    def get_future(self) -> Any:
        """A future of no value, done at the entry's end."""
        return self._future(lambda: None)

    def get_future_result(self) -> Any:
        """A future of the work's status, done at the entry's end: NCCL's are 0 for success, 2 for a lost connection."""
        return self._future(lambda: 0 if self.exception() is None else 2)

    def _future(self, value: Callable[[], Any]) -> Any:
        future: Any = torch.futures.Future()
        self.entry.when_ended(lambda: future.set_result(value()))
        return future
