"""Handles: the state of one transfer, independent of what its backend's works can tell."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from attrs import define
from torch import Tensor

from pipegrid.transport.config import LONGEST_SECONDS
from pipegrid.transport.errors import P2PUsageError

if TYPE_CHECKING:
    import torch

    from pipegrid.core.lanes import LaneSpec
    from pipegrid.transport.messages.message import Signature
    from pipegrid.transport.messages.payload import ExpectedShape
    from pipegrid.transport.messages.slot import Slot


class State(enum.Enum):
    """The states of a transfer: in an open `batch()`, started, or ended."""

    PENDING = "pending"
    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"


# Module names: members of an Enum are looked up slowly.
_PENDING, _ACTIVE, _DONE, _FAILED = State.PENDING, State.ACTIVE, State.DONE, State.FAILED
_UNBUILT = object()  # placeholder of a payload that has not been made from its buffers
_RELEASED = object()  # placeholder of a payload whose buffers were given back


class Limit(NamedTuple):
    """Deadline of a transfer: ``seconds`` after ``since``, the `time.monotonic` of its wait or of the first sweep."""

    since: float
    seconds: float


class _Waiter(Protocol):
    """The part of `LaneTransfers` that handles use."""

    def wait_for(self, transfer: Transfer, timeout: float | None) -> None: ...
    def synchronize(self, transfer: Transfer, timeout: float | None) -> None: ...
    def poll(self, transfer: Transfer) -> bool: ...
    def call_back(self, transfer: Transfer, callback: Callable[[Any], None]) -> None: ...
    def provide(self, transfer: ReceiveTransfer) -> Any: ...
    def take_back(self, transfer: ReceiveTransfer) -> None: ...


class _Buffers(Protocol):
    """The part of `ReceiveBuffers` that handles use."""

    @property
    def signature(self) -> Signature: ...
    def payload(self, tensors: Sequence[Tensor]) -> Any: ...
    def release(self, tensors: Sequence[Tensor], events: Sequence[Any]) -> None: ...


class TransferLane(Protocol):
    """The part of a lane that handles use: its name for errors, and its waiter."""

    @property
    def spec(self) -> LaneSpec:
        """The lane's name."""

    @property
    def transfers(self) -> _Waiter:
        """The lane's waits."""


# A handle is made per message, and its state is read a dozen times: slots halve the cost. Each class has an `__init__`
# of its own (by attrs), which the interpreter can specialise.
@define(eq=False, repr=False, weakref_slot=False)
class Transfer:
    """A message that is sent on a lane: the handle of its sender."""

    lane: TransferLane
    sequence: int = -1  # the message's number on the lane, from 0; -1 until it is started
    ticket: Any = None  # the mover's, once it has the transfer
    tensors: Sequence[Tensor] = ()  # kept while the backend may use them
    state: State = _ACTIVE
    error: BaseException | None = None  # why it failed
    signature: Signature | None = None  # None: the one that stands on the lane
    # Works of the headers before it: gloo would not deliver headers whose works are dropped. The other side posts the
    # receive after reading them, so over gloo they are done when the transfer is; over NCCL the lane keeps them.
    header_works: Sequence[Any] = ()
    beside_header: bool = False  # a send to the receive that was posted beside that of its header
    stream: torch.Stream | None = None  # that it was posted under; inside a batch, that of the call
    waited: bool = False  # a caller has waited for it
    limit: Limit | None = None
    callbacks: tuple[Callable[[Any], None], ...] = ()

    sending: ClassVar[bool] = True

    @property
    def is_ready(self) -> bool:
        """Whether the backend can have it."""
        return True

    @property
    def due(self) -> float:
        """Deadline as a `time.monotonic` value; infinity before its wait or the first sweep that sees it."""
        return math.inf if self.limit is None else self.limit.since + self.limit.seconds

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer is done (on CUDA: when the current stream is ordered after it).

        May be called any number of times, from any thread.

        Args:
            timeout: seconds, above 0 and at most a year; None is the lane's deadline.

        Raises:
            P2PTimeoutError: not done by then. The lane is dead afterwards.
            P2PMismatchError: the two sides disagree about the message.
            P2PPeerError: the peer died, or ended the lane.
            P2PUsageError: called inside the batch() that the transfer is part of, or an invalid timeout.
        """
        if timeout is not None and not 0 < timeout <= LONGEST_SECONDS:
            raise _no_timeout(timeout)
        self.lane.transfers.wait_for(self, timeout)

    def is_completed(self) -> bool:
        """Whether the transfer is done or has failed: whether `wait` would return, or raise, at once.

        True is always right; right after the end of a transfer without a waiting thread, False is possible. Over gloo
        the first question hands the transfer to a thread and may take half a millisecond.
        """
        return self.state is _DONE or self.state is _FAILED or self.lane.transfers.poll(self)

    def synchronize(self, timeout: float | None = None) -> None:
        """Like `wait`, and hold the host until the transfer is done."""
        if timeout is not None and not 0 < timeout <= LONGEST_SECONDS:
            raise _no_timeout(timeout)
        self.lane.transfers.synchronize(self, timeout)

    def on_done(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(handle)`` once when the transfer has ended, in success or failure, with or without a `wait`.

        At once if it has ended before, else on the thread that sees the end. A callback that raises ends the lane. Over
        NCCL a callback must not start transfers (see `pipegrid.transport.backends.nccl`).
        """
        self.lane.transfers.call_back(self, callback)

    def __repr__(self) -> str:
        verb = "send" if self.sending else "receive"
        return f"<{verb} {self.sequence} of lane {self.lane.spec}: {self.state.value}>"


@define(eq=False, repr=False, weakref_slot=False)
class ReceiveTransfer(Transfer):
    """A message that is received on a lane: the handle of its receiver."""

    expected: ExpectedShape | None = None  # by the caller, where given
    buffers: _Buffers | None = None  # once the shapes are known
    _payload: Any = _UNBUILT
    slot: Slot | None = None  # where it is to arrive, if not in memory of the lane
    blocking: bool = False  # the caller waits at once and reads the header itself, not the lane's thread

    sending = False

    @property
    def is_ready(self) -> bool:
        """Whether the backend can have it: it cannot be posted before its shapes are known."""
        return self.buffers is not None

    @property
    def payload(self) -> Any:
        """The payload once its buffers are known, until it is released: without data until the transfer is done."""
        payload = self._payload
        if payload is _UNBUILT:
            return self.build()
        return None if payload is _RELEASED else payload

    @property
    def note(self) -> str:
        """The note of the sender, once the header is known; empty before."""
        return "" if self.buffers is None else self.buffers.signature.note

    def build(self) -> Any:
        """Make the payload, if its buffers are known; else None, and it is made when it is next asked for."""
        if self.buffers is None:
            return None
        self._payload = self.buffers.payload(self.tensors)
        return self._payload

    def result(self) -> Any:
        """Wait, then the payload: fresh tensors on the lane's device; those that can have gradients require them.

        The same objects each time.
        """
        self.lane.transfers.wait_for(self, None)
        payload = self._payload
        if payload is _RELEASED:
            raise P2PUsageError(f"{self!r} was released: its buffers may hold another message")
        return self.build() if payload is _UNBUILT else payload

    def release(self) -> None:
        """Declare that the payload is not needed any more: its buffers may take another message.

        Legal once the transfer was waited for; on CUDA the next message comes after the work that is queued on the
        current stream now. A tensor of the payload that is used later changes. A second call does nothing.
        """
        if self._payload is _RELEASED:
            return
        self.lane.transfers.take_back(self)
        self._payload = _RELEASED
        self.tensors = ()


def _no_timeout(timeout: float) -> P2PUsageError:
    return P2PUsageError(f"the timeout of a wait is {timeout}; it must be above 0 and at most a year")
