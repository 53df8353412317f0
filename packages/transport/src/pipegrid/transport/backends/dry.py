"""A dry run: one rank of a world whose other ranks do not exist, over torch's ``fake`` backend.

Sends vanish, receives hold zeros. Nothing is compared with another rank, and nothing waits for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from pipegrid.transport.backends.base import Mover, Operation


class DryTicket:
    """See `Ticket`: done from the start."""

    def hold(self, timeout: timedelta) -> None:
        """See `Ticket.hold`."""

    def done(self) -> bool:
        """See `Ticket.done`."""
        return True

    def order(self) -> None:
        """See `Ticket.order`."""


class DryMover(Mover):
    """See `Mover`."""

    streams = False

    def start(self, operations: Sequence[Operation]) -> Sequence[DryTicket]:
        """See `Mover.start`."""
        for sending, tensors, _, _ in operations:
            for tensor in () if sending else tensors:
                tensor.detach().zero_()
        return [DryTicket()] * len(operations)

    def abort(self) -> None:
        """See `Mover.abort`."""
