"""Transfers of a bridge under way: many lanes' handles behind one handle."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from pipegrid.bridges.bridge.shape_exchange import Passage
from pipegrid.bridges.checks import as_integers
from pipegrid.bridges.errors import ShapeError
from pipegrid.bridges.reshard import ReshardPlan
from pipegrid.bridges.steps import Completing, unpack
from pipegrid.transport.protocol import Handle, ReceiveHandle
from pipegrid.transport.streams import current_stream, follow, mark, used_here


def remaining(timeout: float | None) -> Callable[[], float | None]:
    """A countdown: how much of ``timeout`` is left, at least a millisecond."""
    if timeout is None:
        return lambda: None
    end = time.monotonic() + timeout
    return lambda: max(end - time.monotonic(), 1e-3)


class BridgeSend:
    """A bridge's send under way. `wait` may be called any number of times."""

    def __init__(self, handles: Iterable[Handle] = ()) -> None:
        self._handles = tuple(handles)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every lane; ``timeout`` in seconds for all of them together."""
        left = remaining(timeout)
        for handle in self._handles:
            handle.wait(left())

    def is_completed(self) -> bool:
        """Whether every lane is done."""
        return all(handle.is_completed() for handle in self._handles)


class Receiver(Protocol):
    """What a receive under way needs of its bridge."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        ...

    def announced(self, texts: Mapping[int, str]) -> Passage:
        """What these announcements, by source rank, mean; a copy without a lane is told by its leader."""
        ...

    @property
    def asks_its_leader(self) -> bool:
        """Whether `announced` still has to talk to other ranks, and so may block."""
        ...

    def complete(self, plan: ReshardPlan, out: torch.Tensor, dtype: torch.dtype) -> list[Completing]:
        """Start the completions of this rank."""
        ...


class BridgeReceive:
    """A bridge's receive under way; ``result()`` is the tensor.

    It lands when every lane has delivered; then its completion among copies starts, which is a collective. So
    that all copies start theirs in one order, landing happens in the order of posting, whoever is asked first.
    One thread makes the receives of a bridge, waits for them and asks after them; on CUDA it may do so on one
    stream and use the tensor on another.
    """

    def __init__(
        self,
        bridge: Receiver,
        queue: deque[BridgeReceive],
        post: Callable[[], Mapping[int, ReceiveHandle] | None],
        *,
        backward: bool,
        passage: Passage | None = None,
        requires_grad: bool = False,
        expected: Sequence[int] | None = None,
    ) -> None:
        self._bridge, self._queue, self._post = bridge, queue, post
        self._backward, self._passage, self._requires_grad = backward, passage, requires_grad
        self._expected = None if expected is None else as_integers(expected, "the expected shape", error=ShapeError)
        self._handles: Mapping[int, ReceiveHandle] | None = None
        self._out: torch.Tensor | None = None
        self._completing: list[Completing] | None = None
        self._done = False
        # Where the landing's copies stand on their stream, for a caller who waits on another one.
        self._landed: Sequence[Any] = ()
        self._landed_on: torch.cuda.Stream | None = None
        queue.append(self)
        self.try_post()

    def try_post(self) -> bool:
        """Post the receives on the lanes; False where it is not known yet which lanes will carry something."""
        if self._handles is None:
            self._handles = self._post()
        return self._handles is not None

    def known(self) -> Passage:
        """The sizes; lands if that is what it takes."""
        if self._passage is None:
            self._land_in_turn(lambda: None)
        assert self._passage is not None
        return self._passage

    # -- landing ------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the tensor is whole. ``timeout`` counts for what comes over the lanes, in seconds."""
        if self._done:
            return
        self._land_in_turn(remaining(timeout))
        follow(self._landed, self._bridge.device)
        for step in self._completing or ():
            step.finish()
            used_here([step.buffer], self._landed_on)
        self._completing = []
        assert self._out is not None
        used_here([self._out], self._landed_on)
        if self._requires_grad and (self._out.dtype.is_floating_point or self._out.dtype.is_complex):
            self._out.requires_grad_()
        self._done = True

    def result(self) -> torch.Tensor:
        """Wait, then the tensor; the same object each time."""
        self.wait()
        assert self._out is not None
        return self._out

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Lets what has landed start its completion.

        With strategy "leader", False on the copies of a set until somebody waits there, as long as they still have
        to tell each other of the sizes, since that blocks.
        """
        if self._done:
            return True
        while self._completing is None and self._queue[0]._has_arrived():  # noqa: SLF001 -- same class
            self._queue[0]._land(lambda: None)  # noqa: SLF001
        if self._completing is None or not all(step.is_completed() for step in self._completing):
            return False
        self.wait()
        return True

    def _has_arrived(self) -> bool:
        if not self._backward and self._bridge.asks_its_leader:
            return False
        return self.try_post() and all(handle.is_completed() for handle in (self._handles or {}).values())

    def _land_in_turn(self, left: Callable[[], float | None]) -> None:
        while self._completing is None:
            self._queue[0]._land(left)  # noqa: SLF001

    def _land(self, left: Callable[[], float | None]) -> None:
        """Wait for the lanes, put everything in its place, start the completion; leave the queue."""
        posted = self.try_post()
        assert posted, "the first receive of an edge lands before any other"
        handles = self._handles or {}
        for handle in handles.values():
            handle.wait(left())
        payloads = {peer: handle.result() for peer, handle in handles.items()}
        if not self._backward:
            texts = {peer: next(iter(payload)) for peer, payload in payloads.items()}
            self._passage = self._bridge.announced(texts)
            payloads = {peer: payload[texts[peer]] for peer, payload in payloads.items()}
        assert self._passage is not None
        plan = self._passage.backward if self._backward else self._passage.forward
        shape = plan.destination_shape(self._bridge.rank)
        if self._expected not in {None, shape}:
            raise ShapeError(
                f"{self._bridge}: rank {self._bridge.rank} expects shape {self._expected}, but {shape} comes; the "
                f"source's tensors and the sides' data lanes decide"
            )
        out = torch.empty(shape, dtype=self._passage.dtype, device=self._bridge.device)
        for peer, messages in plan.receives(self._bridge.rank).items():
            unpack(payloads[peer].detach(), [m.destination_box for m in messages], out)
        self._out = out
        self._completing = self._bridge.complete(plan, out, self._passage.wire_dtype)
        self._landed, self._landed_on = mark(self._bridge.device), current_stream(self._bridge.device)
        self._handles = {}
        self._queue.popleft()
        for waiting in self._queue:
            if not waiting.try_post():
                break
