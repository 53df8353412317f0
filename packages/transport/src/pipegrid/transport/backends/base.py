"""The interface between a lane and its backend: operations in, tickets out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeAlias

from torch import Tensor

Operation: TypeAlias = tuple[bool, Sequence[Tensor], int, int]
"""One message: ``(sending, tensors, lane, epoch)``. A plain tuple, as one is made per message.

``tensors`` are contiguous and on the lane's device; ``lane`` is the lane's index among those of its communicator;
``epoch`` counts how often the lane's shapes were renewed: messages of different epochs never meet.
"""


class Ticket(Protocol):
    """A message that a backend has. Its methods raise RuntimeError where the backend failed."""

    def hold(self, timeout: timedelta) -> None:
        """Hold the host until the message is done; once, by one thread at a time."""

    def done(self) -> bool:
        """Whether the message is done. Over gloo only `hold` finds out."""

    def order(self) -> None:
        """Order the current stream after the message, or raise; where the mover is not ``streams``, after `hold`."""


class Mover(Protocol):
    """Moves the messages of one communicator."""

    streams: bool  # messages complete in stream order, so that a wait need not hold the host

    def start(self, operations: Sequence[Operation]) -> Sequence[Ticket]:
        """Start messages as one simultaneous batch; a ticket for each. RuntimeError where the connection is gone."""

    def start_one(self, sending: bool, tensors: Sequence[Tensor], lane: int, epoch: int, /) -> Ticket:
        """Start one message, given the parts of its `Operation`."""
        return self.start(((sending, tensors, lane, epoch),))[0]

    def starter(self, sending: bool, lane: int, epoch: int, /) -> Callable[[Sequence[Tensor]], Ticket]:
        """`start_one` for the messages of one way that have one tensor, with all that is the same in each."""
        return lambda tensors: self.start_one(sending, tensors, lane, epoch)

    def abort(self) -> None:
        """End all messages under way, as far as `Wire.cut` does not; may block until device kernels have ended."""
