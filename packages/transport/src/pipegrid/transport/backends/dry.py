"""A dry run: one rank of a world whose other ranks do not exist, over torch's ``fake`` backend.

Sends vanish, receives hold zeros. Nothing is compared with another rank, and nothing waits for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from pipegrid.transport.backends.base import Mover, Operation


class DryTicket:
    """A message of a dry run: done from the start."""

    def hold(self, timeout: timedelta) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Always true."""
        return True

    def order(self) -> None:
        """Return: there is nothing to follow."""


class DryMover(Mover):
    """Drops what is sent, and receives zeros."""

    streams = False

    def start(self, operations: Sequence[Operation]) -> Sequence[DryTicket]:
        """Fill the buffers of receives with zeros."""
        for sending, tensors, _, _ in operations:
            for tensor in () if sending else tensors:
                tensor.detach().zero_()
        return [DryTicket()] * len(operations)

    def abort(self) -> None:
        """Return: nothing is under way."""
