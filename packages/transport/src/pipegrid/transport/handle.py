"""Our own handles: the state of one transfer, whatever its backend's works can tell."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define
from torch import Tensor

from pipegrid.transport.config import LONGEST_SECONDS, is_seconds
from pipegrid.transport.errors import P2PUsageError

if TYPE_CHECKING:
    import torch

    from pipegrid.transport.lane import Lane
    from pipegrid.transport.message import Signature
    from pipegrid.transport.payload import ExpectedShape, ReceiveBuffers


class State(enum.Enum):
    """Where a transfer stands."""

    HELD = "held"  # not issued: inside batch()
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


# Members of an Enum are looked up slowly.
_PENDING, _DONE, _FAILED = State.PENDING, State.DONE, State.FAILED
_NEVER = math.inf


# A handle is made for every message, and its state is asked a dozen times: slots halve what that takes. An `__init__`
# for each kind, as attrs writes them, lets the interpreter specialise both; one that they share, it can for neither.
@define(eq=False, repr=False, weakref_slot=False)
class Transfer:
    """A message that goes out on a lane; the handle that its sender gets.

    Attributes:
        lane: which lane.
        sequence: its number on the lane, from 0; -1 until it is issued.
        error: why it failed.
    """

    lane: Lane
    sequence: int = -1
    state: State = _PENDING
    error: BaseException | None = None
    works: Sequence[Any] | None = None  # once the backend has it
    tensors: Sequence[Tensor] = ()  # kept while the backend may use them
    signature: Signature | None = None  # None: what stands on the lane
    start: Callable[[Any], None] | None = None  # how to issue it, if made the steady way inside a batch
    # Works of the headers that go before it: kept, or gloo would not deliver them. That they are done follows
    # from the end of the transfer itself, which the other side posts when it has read them.
    header_works: Sequence[Any] = ()
    stream: torch.cuda.Stream | None = None
    attended: bool = False  # the caller waits for it at once: no thread needs to look after it
    waited: bool = False  # somebody has waited for it
    due: float = _NEVER
    seconds: float = _NEVER
    posted_at: float = _NEVER
    callbacks: tuple[Callable[[Any], None], ...] = ()

    sending: ClassVar[bool] = True

    @property
    def is_ready(self) -> bool:
        """Whether the backend can have it."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer is done (on CUDA: when the current stream is ordered after it).

        May be called any number of times, from any thread.

        Args:
            timeout: seconds, above 0 and at most a year; None is the lane's deadline.

        Raises:
            P2PTimeoutError: not done by then. The lane is dead afterwards.
            P2PMismatchError: the two sides disagree about what travels.
            P2PPeerError: the other side died, or gave the lane up.
            P2PUsageError: called inside the batch() that the transfer is part of, or a timeout that is no time.
        """
        if timeout is not None:
            _require_time(timeout)
        self.lane.wait_for(self, timeout)

    def is_completed(self) -> bool:
        """Whether the transfer is done, or has failed: whether `wait` would return, or raise, at once.

        True is always true. Right after the end of a transfer that nobody waits for, False may still be told. The
        first question may take half a millisecond, over gloo: it hands the transfer to a thread.
        """
        return self.state is _DONE or self.state is _FAILED or self.lane.poll(self)

    def synchronize(self, timeout: float | None = None) -> None:
        """Like `wait`, and hold the host as well until the transfer is done."""
        if timeout is not None:
            _require_time(timeout)
        self.lane.synchronize(self, timeout)

    def on_done(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(handle)`` once when the transfer has ended, well or not, without anybody waiting.

        At once where it has ended before; otherwise from the thread that sees it end. A callback that raises ends
        the lane.
        """
        self.lane.call_back(self, callback)

    def __repr__(self) -> str:
        verb = "send" if self.sending else "receive"
        return f"<{verb} {self.sequence} of lane {self.lane.spec}: {self.state.value}>"


@define(eq=False, repr=False, weakref_slot=False)
class ReceiveTransfer(Transfer):
    """A message that comes in; the handle that its receiver gets."""

    expected: ExpectedShape | None = None  # what the caller expects, where it said so
    buffers: ReceiveBuffers | None = None  # how it becomes a payload, once that is known
    _payload: Any = None
    _built: bool = False
    _released: bool = False

    sending = False

    @property
    def is_ready(self) -> bool:
        """Whether the backend can have it: it cannot be posted before its shapes are known."""
        return self.buffers is not None

    @property
    def payload(self) -> Any:
        """The payload as it will be, once its buffers are known: without data until the transfer is done."""
        if not self._built:
            self.build()
        return self._payload

    @property
    def note(self) -> str:
        """The sender's note (see `Lane.isend`), once the header is known; empty before."""
        return "" if self.buffers is None else self.buffers.signature.note

    def build(self) -> None:
        """Make the payload, if its buffers are known; else it is made when it is first asked for."""
        if self.buffers is not None:
            self._built = True
            self._payload = self.buffers.payload(self.tensors)

    def result(self) -> Any:
        """Wait, then the payload: fresh tensors on the lane's device; those that can have gradients require them.

        The same objects each time.
        """
        self.lane.wait_for(self, None)
        if self._released:
            raise P2PUsageError(f"{self!r} was released, its buffers may hold another message; use it before release()")
        if not self._built:
            self.build()
        return self._payload

    def release(self) -> None:
        """Say that the payload is not needed any more, so that its buffers can take another message.

        Nothing checks that: a tensor of it that is still in use will change. Twice is harmless.
        """
        if self._released:
            return
        if self.state is not _DONE and not self.is_completed():
            raise P2PUsageError(f"{self!r} cannot be released before it is done; wait for it")
        self._released = self._built = True
        self.lane.tally.released += 1
        if self.buffers is not None and self.state is not _FAILED:
            self.buffers.free.append(self.tensors)
        self._payload = None
        self.tensors = ()


def _require_time(timeout: Any) -> None:
    if not is_seconds(timeout):
        raise P2PUsageError(
            f"the timeout of a wait is {timeout!r}; give seconds above 0 and of at most {LONGEST_SECONDS} (a year), "
            f"None for the lane's deadline, or ask is_completed()"
        )
