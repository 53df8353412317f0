"""A rank to itself: copies, first in first out. A send is done at once, a receive when its send has come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from pipegrid.transport.backends.base import Mover, Operation
from pipegrid.transport.streams import current_stream, follow, mark, used_here


@define(eq=False)
class _LocalTicket:
    mover: LocalMover
    tensors: Sequence[Tensor]
    stream: torch.Stream | None
    events: Sequence[Any]  # of a receive, before the copy: the buffers are free
    matched: bool = False

    def hold(self, timeout: timedelta) -> None:
        """Wait until the send has come; the copy itself is ordered by `order`."""
        with self.mover.changed:
            self.mover.changed.wait_for(lambda: self.matched or self.mover.aborted, timeout.total_seconds())
        if not self.matched:
            raise RuntimeError(f"no send came in {timeout.total_seconds():.3g} s")

    def done(self) -> bool:
        return self.matched

    def order(self) -> None:
        follow(self.events, self.mover.device)


@define(eq=False)
class LocalMover(Mover):
    """Copies from sends to receives of one rank, in order."""

    device: torch.device
    changed: threading.Condition = field(factory=threading.Condition, init=False)
    aborted: bool = field(default=False, init=False)
    _copies: deque[tuple[list[Tensor], Sequence[Any], Any]] = field(factory=deque, init=False)
    _receives: deque[_LocalTicket] = field(factory=deque, init=False)

    streams = False

    def start(self, operations: Sequence[Operation]) -> Sequence[_LocalTicket]:
        """Copy what is sent, and fill the receives whose sends have come."""
        tickets = []
        with self.changed:
            for sending, tensors, _, _ in operations:
                ticket = _LocalTicket(self, tensors, current_stream(self.device), mark(self.device))
                tickets.append(ticket)
                if sending:
                    copies = [tensor.detach().clone() for tensor in tensors]
                    self._copies.append((copies, mark(self.device), ticket.stream))
                    ticket.matched = True
                else:
                    self._receives.append(ticket)
            while self._copies and self._receives:
                self._copy(self._receives.popleft(), *self._copies.popleft())
            self.changed.notify_all()
        return tickets

    def _copy(self, receive: _LocalTicket, copies: Sequence[Tensor], made: Sequence[Any], stream: Any) -> None:
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
