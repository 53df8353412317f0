"""An all-gather of up to 15 float64 numbers of each rank, over gloo, of which only the latency matters.

Each rank sends its numbers to every other one in a message, so no worker thread of gloo stands between a message and
the rank that waits for it, and the receives may be posted before the rank has anything to send. gloo moves a message
once its receive is posted; by then the thread of the sender may have to wait for a core. A rank starts 2 (n - 1)
messages in a group of n.
"""

from __future__ import annotations

import math
import time
from array import array
from datetime import timedelta
from typing import Any

import torch
from attrs import define, field
from torch.distributed import ProcessGroup

from pipegrid.topology.torch_compat import backend_of
from pipegrid.transport.collectives.waiting import host_collectives

MOST = 15
"""Numbers of a rank at most; behind them comes how many they are, which is not zero once they have come."""
_WIDTH = MOST + 1
_MOMENT = timedelta(seconds=1)
_EARLY_SECONDS = 2e-3  # gloo's wait for a transfer counts whole milliseconds, and may end before its time by one
_TAG = 2**29 + 1  # of no other message between ranks of a group
_CPU = torch.device("cpu")


@define(eq=False)
class SmallAllGather:
    """All-gathers over ``group``, one after the other; a work that a `Waiting` waits for.

    Every rank posts them in one order, and sends in that order.

    Attributes:
        single: its wait cannot be repeated: one that times out closes the connections of this rank.
        ended: whether the last one has, so that the next can be posted; or why it has failed.
    """

    group: ProcessGroup
    single: bool = field(default=True, init=False)
    _own: int = field(init=False)
    _memory: array[float] = field(init=False)  # by rank, `MOST` numbers and their count
    _row: list[torch.Tensor] = field(init=False)
    _peers: list[tuple[int, list[torch.Tensor]]] = field(init=False)
    _works: list[Any] = field(factory=list, init=False)  # that have not ended
    ended: bool | RuntimeError = field(default=True, init=False)

    def __attrs_post_init__(self) -> None:
        ranks, self._own = self.group.size(), self.group.rank()
        self._memory = array("d", bytes(8 * _WIDTH * ranks))
        rows = torch.frombuffer(self._memory, dtype=torch.float64).view(ranks, _WIDTH).unbind()
        self._row = [rows[self._own]]
        self._peers = [(peer, [row]) for peer, row in enumerate(rows) if peer != self._own]

    def post(self) -> None:
        """Post the receives of the next one."""
        for last in range(MOST, len(self._memory), _WIDTH):
            self._memory[last] = 0.0
        self.ended, self._works = False, []
        receive = backend_of(self.group, _CPU).recv
        try:
            for peer, row in self._peers:
                self._works.append(receive(row, peer, _TAG))
        except RuntimeError as error:  # a connection is gone: `wait` raises it
            self.ended = error

    def send(self, numbers: list[float]) -> None:
        """Send this rank's ``numbers``, 1 to `MOST`, to the others."""
        first, count = self._own * _WIDTH, len(numbers)
        self._memory[first : first + count] = array("d", numbers)
        self._memory[first + MOST] = count
        host_collectives.add(self, self.group)
        send = backend_of(self.group, _CPU).send
        try:
            for peer, _ in self._peers:
                self._works.append(send(self._row, peer, _TAG))
        except RuntimeError as error:  # likewise
            self.ended = error

    def here(self) -> list[list[float]]:
        """The numbers of the ranks from which they have come, and of this one. Looks at memory only."""
        memory, counts = self._memory, enumerate(self._memory[MOST::_WIDTH])
        return [memory[rank * _WIDTH : rank * _WIDTH + int(count)].tolist() for rank, count in counts if count >= 1]

    def missing(self) -> list[int]:
        """The ranks, of the group, whose numbers have not come."""
        return [rank for rank, count in enumerate(self._memory[MOST::_WIDTH]) if count < 1]

    def end(self) -> bool:
        """End if all numbers have come, as this rank's then have to the others; whether it has ended."""
        if self.ended is False and min(self._memory[MOST::_WIDTH]) >= 1:
            self.wait(_MOMENT)
            host_collectives.forget(self)
            return True
        return self.ended is True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all numbers have come, up to ``timeout`` or that of the group.

        Numbers that have come count, also of ranks that have closed their connections since: the next one fails.

        Raises:
            RuntimeError: a connection is gone; or the time has passed, and this rank's connections are closed.
        """
        if isinstance(self.ended, RuntimeError):
            raise self.ended
        end = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        try:
            while self._works:
                work = self._works[0]
                work.wait(*(() if timeout is None else (timedelta(seconds=max(end - time.monotonic(), 1e-3)),)))
                del self._works[0]  # a second wait for a message that has come would wait for another one
            self.ended = True
        except RuntimeError as error:
            late = time.monotonic() >= end - _EARLY_SECONDS
            self.ended = False if late and self.missing() else error
            if self.missing():
                raise
        return True

    def is_completed(self) -> bool:
        """Whether `wait` has ended, in time."""
        return self.ended is not False
