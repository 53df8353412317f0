"""An emulated slow link between edge and cloud: what crosses it leaves as late as it would arrive."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen

from pipegrid.transport import Communicator, Direction, Edge, Handle, ReceiveHandle


@frozen
class Link:
    """A link, each way: ``delay`` seconds from end to end, and ``bandwidth`` bytes per second one after another."""

    delay: float
    bandwidth: float

    def __attrs_post_init__(self) -> None:
        if self.delay < 0 or self.bandwidth <= 0:
            raise ValueError(f"a link has a delay of at least 0 and a bandwidth above 0, got {self}")

    def seconds(self, nbytes: int) -> float:
        """How long a message of ``nbytes`` takes when nothing is before it."""
        return self.delay + nbytes / self.bandwidth


class Delivery:
    """A message on its way over the link; the handle that its sender gets."""

    def __init__(self) -> None:
        self._left = threading.Event()
        self._handle: Handle | None = None
        self._error: BaseException | None = None

    def hand_over(self, send: Callable[[], Handle]) -> None:
        """It has crossed the link: send it, or keep the error for who waits."""
        try:
            self._handle = send()
        except Exception as error:  # noqa: BLE001 -- the link's thread: whoever waits raises it
            self._error = error
        finally:
            self._left.set()

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is through.

        Raises:
            TimeoutError: it did not leave in time.
        """
        if not self._left.wait(timeout):
            raise TimeoutError(f"a message did not cross the link in {timeout} s")
        if self._error is not None:
            raise self._error
        if self._handle is not None:
            self._handle.wait(timeout)

    def is_completed(self) -> bool:
        """Whether it is through."""
        return self._left.is_set() and (self._handle is None or self._handle.is_completed())


class SlowLink(Communicator):
    """A communicator behind a slow link: every message of this rank crosses it, first in, first out.

    The ranks of a side share the link. Each sends its share of a tensor, and all shares together take as long as the
    tensor; so each rank holds its share back for that long.
    """

    def __init__(self, communicator: Any, link: Link | None) -> None:
        self._communicator = communicator
        self.link = link
        self._free = 0.0  # when the link has put everything before on its way
        self._waiting: queue.SimpleQueue[tuple[float, Delivery, Callable[[], Handle]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, name="edge-cloud-link", daemon=True)
        self._thread.start()

    def isend(self, payload: torch.Tensor, *, edge: Edge, direction: Direction) -> Handle:
        """Put a tensor on the link; without one, send it at once."""
        if self.link is None:
            handle: Handle = self._communicator.isend(payload, edge=edge, direction=direction)
            return handle
        self._free = max(self._free, time.perf_counter()) + payload.nbytes / self.link.bandwidth
        delivery = Delivery()
        self._waiting.put(
            (
                self._free + self.link.delay,
                delivery,
                lambda: self._communicator.isend(payload, edge=edge, direction=direction),
            )
        )
        return delivery

    def _deliver(self) -> None:
        while (item := self._waiting.get()) is not None:
            arrives, delivery, send = item
            time.sleep(max(0.0, arrives - time.perf_counter()))
            delivery.hand_over(send)

    def irecv(self, *, edge: Edge, direction: Direction, shapes: Any = None) -> ReceiveHandle:
        """Start receiving what comes over the link."""
        handle: ReceiveHandle = self._communicator.irecv(edge=edge, direction=direction, shapes=shapes)
        return handle

    def abort(self, reason: str) -> None:
        """End all lanes at once."""
        self._communicator.abort(reason)

    def close(self) -> None:
        """End the link's thread, when everything has left."""
        self._waiting.put(None)
        self._thread.join()
