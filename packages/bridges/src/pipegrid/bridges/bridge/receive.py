"""Receives of an edge: the messages of several lanes, and the completion among copies, behind one handle.

The states of a `BridgeReceive`, and what moves it on::

    HELD ------ sizes known ------> POSTED ------ its messages arrived, ----> FILLED ------ completions done ----> WHOLE
     |   post, by the receive         |   its turn in the queue: fill           |   finish, by the thread that
     |   before it                    |                                         |   waits
     |                                +-- a message or `fill` fails ------------+-- a copy fails --> the error, for
     |                                                                              each thread that waits
     +-- only with strategy "auto": which lanes carry something follows from the first message

`HELD` has no handles; `POSTED` has one per message; `FILLED` has tensors and completions under way; `WHOLE` has the
value. Whose turn it is, and which thread takes it, is the `ReceiveQueue`'s. A tensor that is all of one message needs
none of this: `WholeReceive`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from attrs import Factory, define, frozen

from pipegrid.bridges.collectives import CollectiveWaits
from pipegrid.bridges.steps import Completing
from pipegrid.transport.protocol import Handle, ReceiveHandle
from pipegrid.transport.streams import current_stream, follow, has_streams, mark, used_here, working_on

_LATE_SECONDS = 1.0  # of a completion whose messages took the whole deadline

PostedReceives: TypeAlias = Mapping[int, ReceiveHandle]
"""The receives of one tensor on the lanes, by the sending rank."""


@frozen
class Filled:
    """A microbatch: ``tensors`` with its messages, completions of the rest, and what then builds the result."""

    tensors: Sequence[torch.Tensor]
    completing: Sequence[Completing]
    build: Callable[[], Any]


def remaining(timeout: float | None, *, least: float = 1e-3) -> Callable[[], float | None]:
    """A countdown: the rest of ``timeout`` in seconds, at least ``least``."""
    if timeout is None:
        return _no_limit
    end = time.monotonic() + timeout
    return lambda: max(end - time.monotonic(), least)


def _no_limit() -> float | None:
    return None


class BridgeSend:
    """A send over several lanes, with a handle for each. `wait` may be called any number of times."""

    __slots__ = ("handles",)

    def __init__(self, handles: Iterable[Handle] = ()) -> None:
        self.handles = tuple(handles)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every lane; ``timeout`` in seconds for all of them together."""
        if timeout is None:
            for handle in self.handles:
                handle.wait()
            return
        left = remaining(timeout)
        for handle in self.handles:
            handle.wait(left())

    def is_completed(self) -> bool:
        """Whether every lane is done."""
        return all(handle.is_completed() for handle in self.handles)


@define(eq=False)
class ReceiveQueue:
    """The receives of one edge and direction that are not filled, in the order of posting.

    Filling puts the messages in their places and starts the completion among copies. Completions are collectives, so
    every copy starts them in one order: that of the receives, whichever is waited for first.

    Where a wait holds the host (gloo), a receive that is completed among copies is filled when its last message
    arrives, on the thread that sees it, so that a copy that is slow to ask does not hold up the others. On a device,
    receives are filled when they are posted, on a stream of their own: one thread launches the kernels of all
    communicators, in the plan's order. Other receives are filled by the thread that asks.

    Attributes:
        copies: the ranks that complete each other; empty where there is nothing to complete.
        unasked: receives are filled without a wait.
        stream: of the filling, beside the stream that computes; None is the current one.
    """

    device: torch.device
    waits: CollectiveWaits
    copies: Sequence[int] = ()
    unasked: bool = False
    stream: torch.Stream | None = None
    waiting: deque[BridgeReceive] = Factory(deque)
    lock: threading.RLock = Factory(threading.RLock)

    def fill_arrived(self, *, asked: bool) -> None:
        """Fill receives whose messages have arrived, up to the first that lacks one; if ``asked``, this may block."""
        with self.lock:
            while self.waiting and self.waiting[0].has_arrived(asked=asked):
                self.waiting.popleft().fill()
                if not self.unasked and self.stream is None:
                    return  # kernels are launched by the plan, not by what happens to have arrived

    def fill_posted(self) -> None:
        """Fill the receives that the backend has, up to the first that it has not, in stream order."""
        with self.lock:
            while self.waiting and self.waiting[0].is_posted():
                self.waiting.popleft().fill_in_order()


class WholeReceive:
    """A tensor that arrives whole in one message: the receive of its lane, with gradients as the edge has them."""

    __slots__ = ("_handle", "_requires_grad", "_tensor", "is_completed", "wait")

    def __init__(self, handle: ReceiveHandle, *, requires_grad: bool) -> None:
        self._handle, self._requires_grad = handle, requires_grad
        self._tensor: torch.Tensor | None = None
        self.wait, self.is_completed = handle.wait, handle.is_completed

    def result(self) -> torch.Tensor:
        """Wait, then the tensor; the same object each time."""
        if self._tensor is None:
            tensor: torch.Tensor = self._handle.result()
            if self._requires_grad:
                self._tensor = with_gradient(tensor)
            else:
                self._tensor = tensor.detach() if tensor.requires_grad else tensor
        return self._tensor


def with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with ``requires_grad`` set where its dtype allows it."""
    can = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.requires_grad_() if can else tensor


class BridgeReceive:
    """The receive of a tensor, or a payload: messages of several lanes, then the completion among copies.

    Where there is nothing to complete, a receive keeps no order with others and is filled when it is waited for.
    One thread makes the receives of a queue; any may wait for them. On CUDA the thread that waits may do so on one
    stream and use the tensor on another.

    Args:
        post: posts the receives on the lanes, by peer; None where the lanes to use are not known yet.
        fill: puts the messages that have arrived in their places.
        into: the tensor to receive into, where it is known; see ``value``.
        blocks: filling may have to wait for other ranks.

    Attributes:
        value: the result of `result`; before that, ``into``, without data.
    """

    __slots__ = (
        "_allocated",
        "_alone",
        "_blocks",
        "_done",
        "_error",
        "_fill",
        "_filled",
        "_filled_on",
        "_finishing",
        "_handles",
        "_is_filled",
        "_marks",
        "_missing",
        "_post",
        "_queue",
        "value",
    )

    def __init__(
        self,
        queue: ReceiveQueue,
        post: Callable[[], PostedReceives | None],
        fill: Callable[[PostedReceives], Filled],
        *,
        into: torch.Tensor | None = None,
        blocks: Callable[[], bool] | None = None,
    ) -> None:
        self._queue, self._post, self._fill, self._blocks = queue, post, fill, blocks
        self.value: Any = into
        self._filled: Filled | None = None
        self._error: BaseException | None = None
        self._is_filled = self._done = False
        self._finishing = threading.Lock()
        # On CUDA the buffer may be memory that the caller's stream still uses, and filling has a stream of its own.
        self._allocated = mark(queue.device) if queue.stream is not None else ()
        self._marks: Sequence[Any] = ()
        self._filled_on: torch.Stream | None = None
        # Without the lock: in strict mode this blocks, while another thread may be filling an earlier receive.
        self._handles: PostedReceives | None = post()
        self._missing = 0
        self._alone = not queue.copies and self._handles is not None and not queue.waiting
        if not self._alone:
            with queue.lock:
                queue.waiting.append(self)
            self._watch()

    def post(self) -> bool:
        """Post the receives on the lanes, unless they are posted; returns whether they are."""
        if self._handles is None:
            self._handles = self._post()
            self._watch()
        return self._handles is not None

    def _watch(self) -> None:
        if self._queue.unasked and self._handles is not None:
            self._missing = len(self._handles)
            for handle in self._handles.values():
                handle.on_done(self._one_arrived)  # type: ignore[attr-defined]  # lanes' own handles

    def _one_arrived(self, _: object) -> None:
        with self._queue.lock:
            self._missing -= 1
            self._queue.fill_arrived(asked=False)

    def wait(self, timeout: float | None = None) -> None:
        """Return when the tensor is whole (on CUDA: when the current stream is ordered after it).

        May be called any number of times, from any thread. ``timeout`` is in seconds, for lanes and completion
        together; None is the deadline, and a second more for a completion whose messages arrived at its very end.

        `P2PError`: as of the lanes. `ShapeError`: the messages are not what was expected. `CollectiveFailedError`: the
        copies did not complete each other.
        """
        if self._done:
            return
        if timeout is None and self._alone and not self._is_filled:
            for handle in (self._handles or {}).values():
                handle.wait()
            left = of_completion = _no_limit
        else:
            left = of_completion = remaining(timeout)
            if timeout is None:
                deadline = self._queue.waits.deadline
                of_completion = remaining(deadline, least=min(deadline, _LATE_SECONDS))
            while not self._is_filled and not self._alone:
                self._ask_first(left)
            if self._alone:
                self._wait_for_messages(left)
        with self._finishing:
            if not self._done:
                if not self._is_filled:
                    self.fill()
                self._finish(of_completion)

    def result(self) -> Any:
        """Wait, then the tensor or the payload; the same object each time."""
        self.wait()
        return self.value

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once. Starts the completion of messages that have arrived.

        With strategy "leader", False on the copies of a set until one of them waits, as long as they still have to
        tell each other of the sizes, since that blocks.
        """
        if self._done:
            return True
        if self._alone:
            return self._is_filled or all(handle.is_completed() for handle in (self._handles or {}).values())
        self._queue.fill_arrived(asked=False)
        filled = self._filled  # None after an error, and once it is whole
        return self._is_filled and (filled is None or all(step.is_completed() for step in filled.completing))

    def wait_filled(self) -> None:
        """Wait until the messages are in their places."""
        if self._alone:
            self.wait()
        while not self._is_filled:
            self._ask_first(_no_limit)
        if self._error is not None:
            raise self._error

    def fill_posted(self) -> None:
        """Fill this receive and those before it on a device, as far as the backend has their messages."""
        if not self._alone:
            self._queue.fill_posted()
        elif self.is_posted():
            self.fill_in_order()

    def is_posted(self) -> bool:
        """Whether the backend has all messages, so that filling from them does not hold the host."""
        if self._is_filled or not self.post() or (self._blocks is not None and self._blocks()):
            return False
        handles: Iterable[Any] = (self._handles or {}).values()  # lanes' own
        return all(handle.ticket is not None for handle in handles)

    def fill_in_order(self) -> None:
        """Fill on the queue's stream, behind the messages. Their error is kept for the waiting thread."""
        try:
            self._wait_for_messages(_no_limit)
        except Exception as error:  # noqa: BLE001 -- the thread that posts goes on, and the one that waits raises it
            self._error = error
            self._drop_messages()
        else:
            self.fill()

    def _ask_first(self, left: Callable[[], float | None]) -> None:
        """Wait for the messages of the first receive of the queue, and fill it."""
        queue = self._queue
        with queue.lock:
            first = queue.waiting[0] if queue.waiting else self
        first._wait_for_messages(left)  # noqa: SLF001 -- same class
        queue.fill_arrived(asked=True)

    def _wait_for_messages(self, left: Callable[[], float | None]) -> None:
        with working_on(self._queue.stream):
            for handle in (self._handles or {}).values():
                handle.wait(left())

    def has_arrived(self, *, asked: bool) -> bool:
        """Whether all messages are there, and filling from them does not block (where it is not ``asked`` for)."""
        if not self.post() or (not asked and self._blocks is not None and self._blocks()):
            return False
        if asked and not self._queue.unasked:  # streams order themselves, once the backend has the receives
            handles: Iterable[Any] = (self._handles or {}).values()  # lanes' own
            return all(handle.ticket is not None for handle in handles)
        if self._queue.unasked and not asked:
            return not self._missing
        return all(handle.is_completed() for handle in (self._handles or {}).values())

    def fill(self) -> None:
        """Put the messages in their places and start the completion. An error is kept for the waiting thread."""
        queue, handles = self._queue, self._handles or {}
        try:
            with torch.no_grad():
                if not has_streams(queue.device):
                    self._filled = self._fill(handles)
                else:
                    with working_on(queue.stream):
                        follow(self._allocated, queue.device)
                        self._filled = self._fill(handles)
                        used_here(self._filled.tensors, queue.stream)
                        self._marks, self._filled_on = mark(queue.device), current_stream(queue.device)
        except Exception as error:  # noqa: BLE001 -- this may be a lane's thread: the thread that waits raises it
            self._error = error
        finally:
            self._drop_messages()
            if queue.waiting:  # receives that were held back until sizes are known
                with queue.lock:
                    for later in queue.waiting:
                        if not later.post():
                            break

    def _drop_messages(self) -> None:
        """Drop references that would keep this receive, and its tensor, until the next garbage collection."""
        self._handles, self._is_filled = {}, True
        del self._post, self._fill, self._blocks

    def _finish(self, left: Callable[[], float | None]) -> None:
        if self._error is not None:
            raise self._error
        queue, filled = self._queue, self._filled
        assert filled is not None
        follow(self._marks, queue.device)
        if filled.completing:
            seconds = left()
            end = time.monotonic() + (queue.waits.deadline if seconds is None else seconds)
            for step in filled.completing:
                queue.waits.wait(step.work, queue.copies, step.group, end=end)
                with torch.no_grad():
                    step.write()
            used_here([tensor for step in filled.completing for tensor in step.memory], self._filled_on)
        used_here(filled.tensors, self._filled_on)
        self.value = filled.build()
        self._filled = None
        self._done = True
