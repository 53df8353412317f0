"""Staged: tensors of any device over gloo, through host memory (pinned, for a GPU).

For several ranks on one GPU, and for GPUs without NCCL. A send is copied on a stream of its own, after what made the
tensor, and a thread hands the copy to gloo when it is there: neither the host nor the computing stream waits for it. A
receive is copied to its buffer on the stream that it was posted under (the receive stream of the lanes, so that it does
not queue behind the computing that the host has issued), when the host sees that it has come; a stream that uses it is
ordered after the copy. On a CPU the same code copies through a buffer, at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from pipegrid.transport.backends.base import Mover, Operation, Ticket
from pipegrid.transport.backends.gloo import GlooMover
from pipegrid.transport.errors import text_of
from pipegrid.transport.streams import current_stream, follow, mark, new_stream, pinned_like, used_here, working_on
from pipegrid.transport.waits.wait_lock import BackgroundThread


@define(eq=False)
class _StagedSend:
    """A send by ``operation`` of the copy in host memory, which is there after ``copied``."""

    _operation: Operation
    copied: Sequence[Any]
    _inner: Ticket | None = field(default=None, init=False)
    _error: RuntimeError | None = field(default=None, init=False)
    _posted: threading.Event = field(factory=threading.Event, init=False)

    def post(self, mover: GlooMover) -> None:
        self._inner = mover.start_one(*self._operation)
        self._posted.set()

    def fail(self, error: RuntimeError) -> None:
        self._error = error
        self._posted.set()

    def hold(self, timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        if not self._posted.wait(timeout.total_seconds()):
            raise RuntimeError(f"not copied to host memory after {timeout.total_seconds():.3g} s")
        if self._inner is None:
            raise RuntimeError(text_of(self._error)) from self._error
        self._inner.hold(max(timedelta(seconds=end - time.monotonic()), timedelta(milliseconds=1)))

    def done(self) -> bool:
        return self._inner is not None and self._inner.done()

    def order(self) -> None:
        """Return: the tensors have been read once the host has waited."""


@define(eq=False)
class _StagedReceive:
    """A receive by ``inner`` into host memory, copied to the buffers: pairs of a buffer and its host memory."""

    _inner: Ticket
    _copies: Sequence[tuple[Tensor, Tensor]]
    _device: torch.device
    _stream: torch.Stream | None
    _events: Sequence[Any] = ()

    def hold(self, timeout: timedelta) -> None:
        self._inner.hold(timeout)
        with working_on(self._stream):
            for tensor, staging in self._copies:
                tensor.detach().copy_(staging, non_blocking=True)
            self._events = mark(self._device)

    def done(self) -> bool:
        return self._inner.done()

    def order(self) -> None:
        follow(self._events, self._device)


@define(eq=False)
class StagedMover(Mover):
    """Messages by way of host memory, over gloo."""

    _inner: GlooMover
    _device: torch.device
    _copying: torch.Stream | None = field(init=False)
    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _unposted: deque[_StagedSend] = field(factory=deque, init=False)
    _aborted: bool = field(default=False, init=False)
    _thread: BackgroundThread | None = field(default=None, init=False)

    streams = False

    def __attrs_post_init__(self) -> None:
        self._copying = new_stream(self._device)

    def start(self, operations: Sequence[Operation]) -> Sequence[Ticket]:
        """Start the copies of sends to the host, and the receives into it."""
        return [self._send(one) if one[0] else self._receive(one) for one in operations]

    def _receive(self, operation: Operation) -> _StagedReceive:
        _, tensors, lane, epoch = operation
        staging = [pinned_like(tensor) for tensor in tensors]
        inner = self._inner.start_one(False, staging, lane, epoch)
        copies = list(zip(tensors, staging, strict=True))
        return _StagedReceive(inner, copies, self._device, current_stream(self._device))

    def _send(self, operation: Operation) -> _StagedSend:
        _, tensors, lane, epoch = operation
        made, stream = mark(self._device), current_stream(self._device)
        with working_on(self._copying):
            follow(made, self._device)
            staging = [pinned_like(tensor) for tensor in tensors]
            for host, tensor in zip(staging, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            used_here(tensors, stream)
            send = _StagedSend((True, staging, lane, epoch), mark(self._device, blocking=True))
        if not send.copied:
            send.post(self._inner)
            return send
        with self._changed:
            if self._aborted:
                raise RuntimeError("the lane has ended")
            self._unposted.append(send)
            self._changed.notify()
            if self._thread is None:
                self._thread = BackgroundThread(target=self._post_all, name="pipegrid-staged", daemon=True)
                self._thread.start()
        return send

    def _post_all(self) -> None:
        """Hand sends to gloo, in order, each when its copy is there."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._aborted or self._unposted)
                if self._aborted:
                    return
                first = self._unposted[0]
            for event in first.copied:
                event.synchronize()
            with self._changed:
                if self._aborted:
                    return
                try:
                    self._unposted.popleft().post(self._inner)
                except RuntimeError as error:
                    first.fail(error)

    def abort(self) -> None:
        """Fail the sends that gloo does not have yet."""
        with self._changed:
            self._aborted = True
            for send in self._unposted:
                send.fail(RuntimeError("the lane has ended"))
            self._unposted.clear()
            self._changed.notify()
