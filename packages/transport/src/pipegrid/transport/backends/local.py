"""A rank to itself: copies, first in first out. A send is done at once, a receive when its send has come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from pipegrid.transport.backends.base import Mover, Operation
from pipegrid.transport.streams import current_stream, follow, mark, used_here


class LocalTicket:
    """A send or a receive of a rank to itself."""

    def __init__(self, mover: LocalMover, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.stream = current_stream(mover.device)
        self.matched = False
        self.events: Sequence[Any] = mark(mover.device)  # of a receive, before the copy: the buffers are free
        self._mover = mover

    def hold(self, timeout: timedelta) -> None:
        """Wait until the send has come; the copy itself is ordered by `order`."""
        with self._mover.changed:
            self._mover.changed.wait_for(lambda: self.matched or self._mover.aborted, timeout.total_seconds())
        if not self.matched:
            raise RuntimeError(f"no send came in {timeout.total_seconds():.3g} s")

    def done(self) -> bool:
        """Whether the send has come."""
        return self.matched

    def order(self) -> None:
        """Order the current stream after the copy."""
        follow(self.events, self._mover.device)


class LocalMover(Mover):
    """Copies from sends to receives of one rank, in order."""

    streams = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.changed = threading.Condition()
        self.aborted = False
        self._copies: deque[tuple[list[Tensor], Sequence[Any], Any]] = deque()
        self._receives: deque[LocalTicket] = deque()

    def start(self, operations: Sequence[Operation]) -> Sequence[LocalTicket]:
        """Copy what is sent, and fill the receives whose sends have come."""
        tickets = []
        with self.changed:
            for sending, tensors, _, _ in operations:
                ticket = LocalTicket(self, tensors)
                tickets.append(ticket)
                if sending:
                    copies = [tensor.detach().clone() for tensor in tensors]
                    self._copies.append((copies, mark(self.device), current_stream(self.device)))
                    ticket.matched = True
                else:
                    self._receives.append(ticket)
            while self._copies and self._receives:
                self._copy(self._receives.popleft(), *self._copies.popleft())
            self.changed.notify_all()
        return tickets

    def _copy(self, receive: LocalTicket, copies: Sequence[Tensor], made: Sequence[Any], stream: Any) -> None:
        follow((*made, *receive.events), self.device)
        used_here(copies, stream)
        used_here(receive.tensors, receive.stream)
        for buffer, copy in zip(receive.tensors, copies, strict=True):
            buffer.detach().copy_(copy)
        receive.events, receive.matched = mark(self.device), True

    def abort(self) -> None:
        """Drop what was sent, and end the waits for it."""
        with self.changed:
            self.aborted = True
            self._copies.clear()
            self.changed.notify_all()
