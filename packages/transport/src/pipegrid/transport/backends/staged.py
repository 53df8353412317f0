"""Staged: tensors of any device over gloo, through host memory (pinned, for a GPU).

For several ranks on one GPU, and for GPUs without NCCL. A send is copied on the stream that made it, and the host waits
for the copy before it is posted. A receive is copied to its buffer on the stream that it was posted under (the receive
stream of the lanes, so that it does not queue behind the computing that the host has issued), when the host sees that
it has come; a stream that uses it is ordered after the copy. On a CPU the same code copies through a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from pipegrid.transport.backends.base import Operation
from pipegrid.transport.backends.gloo import GlooMover, GlooTicket
from pipegrid.transport.streams import current_stream, follow, mark, pinned_like, working_on


class StagedTicket:
    """See `Ticket`. ``tensors`` are a receive's buffers, filled from ``staging``; none for a send."""

    def __init__(
        self, inner: GlooTicket, tensors: Sequence[Tensor], staging: Sequence[Tensor], device: torch.device
    ) -> None:
        self._inner = inner
        self._copies = list(zip(tensors, staging, strict=True))
        self._device = device
        self._stream = current_stream(device)
        self._events: Sequence[Any] = ()

    def hold(self, timeout: timedelta) -> None:
        """See `Ticket.hold`."""
        self._inner.hold(timeout)
        with working_on(self._stream):
            for tensor, staging in self._copies:
                tensor.detach().copy_(staging, non_blocking=True)
            self._events = mark(self._device)

    def done(self) -> bool:
        """See `Ticket.done`."""
        return self._inner.done()

    def order(self) -> None:
        """See `Ticket.order`."""
        follow(self._events, self._device)


class StagedMover:
    """See `Mover`."""

    streams = False
    polled = False

    def __init__(self, inner: GlooMover, device: torch.device) -> None:
        self._inner = inner
        self._device = device

    def start(self, operations: Sequence[Operation]) -> Sequence[StagedTicket]:
        """See `Mover.start`."""
        staged: list[Operation] = []
        receives: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        for sending, tensors, lane, epoch in operations:
            staging = [pinned_like(tensor) for tensor in tensors]
            if sending:
                for host, tensor in zip(staging, tensors, strict=True):
                    host.copy_(tensor, non_blocking=True)
            staged.append((sending, staging, lane, epoch))
            receives.append(((), ()) if sending else (tensors, staging))
        for event in mark(self._device):
            event.synchronize()
        return [
            StagedTicket(ticket, *copied, self._device)
            for ticket, copied in zip(self._inner.start(staged), receives, strict=True)
        ]

    def abort(self) -> None:
        """See `Mover.abort`."""
