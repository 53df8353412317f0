"""The wire between two hosts: its delay, loss and rate, and the loop that carries packets."""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import random
import select
import time
from collections.abc import Callable

from attrs import define, field, frozen

_PACKET = 1 << 16
_BUFFER_SECONDS = 0.2  # of packets that a link with a rate holds; further ones are lost
_AT_ONCE = 64  # packets of one end before the other has its turn


@frozen
class Wire:
    """The settings of the wire between two hosts.

    Attributes:
        delay: seconds that a packet takes, one way.
        loss: share of the packets that are lost, each way: 0.02 is 2 %.
        rate: bits a second, each way; infinite is as fast as it goes.
        to_a: whether packets reach host a.
        to_b: whether packets reach host b.

    Raises:
        ValueError: a delay below 0, a loss outside of [0, 1), or a rate that is not above 0.

    Examples:
        >>> Wire(delay=0.050, loss=0.02).to_a
        True
    """

    delay: float = 0.0
    loss: float = 0.0
    rate: float = math.inf
    to_a: bool = True
    to_b: bool = True

    def __attrs_post_init__(self) -> None:
        if not (0 <= self.delay < math.inf and 0 <= self.loss < 1 and self.rate > 0):
            raise ValueError(f"{self!r}: delay is at least 0, loss is a share in [0, 1), rate is above 0")


CUT = Wire(to_a=False, to_b=False)
"""Nothing passes."""


@define(eq=False)
class Carrier:
    """The loop that carries packets between the TUN devices of host a and host b (descriptors) as ``wire`` now says."""

    ends: tuple[int, int]
    wire: Wire
    _under_way: list[tuple[float, int, int, bytes]] = field(factory=list, init=False)  # arrival, number, end, packet
    _free: list[float] = field(factory=lambda: [0.0, 0.0], init=False)  # when each direction has sent what it has
    _planned: list[tuple[float, int, Wire]] = field(factory=list, init=False)
    _count: int = field(default=0, init=False)

    def plan(self, wire: Wire, after: float) -> None:
        """Apply the settings ``wire``, ``after`` seconds from now."""
        self._count += 1
        heapq.heappush(self._planned, (time.monotonic() + after, self._count, wire))
        self._change()

    def carry(self, changes: int, take: Callable[[], object]) -> None:
        """Carry packets for ever; ``take`` is called when the descriptor ``changes`` is readable."""
        while True:
            due = [each[0][0] for each in (self._under_way, self._planned) if each]
            seconds = max(0.0, min(due) - time.monotonic()) if due else None
            readable, _, _ = select.select([changes, *self.ends], [], [], seconds)
            self._change()
            for end in (0, 1):
                if self.ends[end] in readable:
                    self._receive(end)
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(self._under_way)
                with contextlib.suppress(OSError):  # the device's queue is full: a lost packet, as on any wire
                    os.write(self.ends[to], packet)
            if changes in readable:
                take()

    def _change(self) -> None:
        while self._planned and self._planned[0][0] <= time.monotonic():
            self.wire = heapq.heappop(self._planned)[2]

    def _receive(self, end: int) -> None:
        to, wire = 1 - end, self.wire
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self.ends[end], _PACKET)
            except BlockingIOError:
                return
            now = time.monotonic()
            reaches = (wire.to_a, wire.to_b)[to] and random.random() >= wire.loss  # noqa: S311 (no secret)
            if not reaches or self._free[to] - now > _BUFFER_SECONDS:
                continue
            self._free[to] = max(now, self._free[to]) + 8 * len(packet) / wire.rate
            self._count += 1
            heapq.heappush(self._under_way, (self._free[to] + wire.delay, self._count, to, packet))
