"""A few numbers of each rank, told to all ranks of a gloo group: of which only the delay matters.

Each row is a message of its own between two ranks, so no thread of gloo stands between it and the rank that waits, and
the receives may be posted before the rank has anything to tell. gloo moves a message once its receive is posted; by
then the sender's thread may have to wait for a core.
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
"""Numbers of a row; behind them comes how many they are."""
_WIDTH = MOST + 1
_MOMENT = timedelta(seconds=1)
_TAG = 2**29 + 1  # of no other message
_CPU = torch.device("cpu")


@define(eq=False)
class Rows:
    """The rows of a meeting of ``group``, and of later ones (`post`); a work that a `Waiting` waits for.

    Ranks post in one order, and send in that order.

    Attributes:
        single: a wait that is given up closes the connections, so there is one, of the whole time.
        ended: whether the last meeting has, so that the next can be posted; or why it has failed.
    """

    group: ProcessGroup
    single: bool = field(default=True, init=False)
    _own: int = field(init=False)
    _memory: array[float] = field(init=False)  # by rank, a row and how many numbers have come in it
    _row: list[torch.Tensor] = field(init=False)
    _peers: list[tuple[int, list[torch.Tensor]]] = field(init=False)
    _works: list[Any] = field(init=False)
    ended: bool | RuntimeError = field(default=True, init=False)

    def __attrs_post_init__(self) -> None:
        ranks, self._own = self.group.size(), self.group.rank()
        self._memory = array("d", bytes(8 * _WIDTH * ranks))
        rows = torch.frombuffer(self._memory, dtype=torch.float64).view(ranks, _WIDTH).unbind()
        self._row = [rows[self._own]]
        self._peers = [(peer, [row]) for peer, row in enumerate(rows) if peer != self._own]

    def post(self) -> None:
        """Post the receives of a meeting."""
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
        """Tell the others this rank's ``numbers``, `MOST` at most."""
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
        """The rows that have come, this rank's with them. Looks at memory only."""
        memory, counts = self._memory, enumerate(self._memory[MOST::_WIDTH])
        return [memory[rank * _WIDTH : rank * _WIDTH + int(count)].tolist() for rank, count in counts if count]

    def missing(self) -> list[int]:
        """The ranks, of the group, whose rows have not come."""
        return [rank for rank, count in enumerate(self._memory[MOST::_WIDTH]) if not count]

    def end(self) -> bool:
        """End the meeting if all rows have come, as this rank's then has to the others; whether it has ended.

        Rows that have come count, also of ranks that have closed their connections since: the next meeting fails.
        """
        if self.ended is not False or not all(self._memory[MOST::_WIDTH]):
            return self.ended is True
        try:
            for work in self._works:
                work.wait(_MOMENT)
            self.ended = True
            host_collectives.forget(self)
        except RuntimeError as error:
            self.ended = error
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all rows, up to ``timeout`` or that of the group.

        Raises:
            RuntimeError: a connection is gone; or the time has passed, and this rank's connections are closed.
        """
        if isinstance(self.ended, RuntimeError):
            raise self.ended
        end = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        try:
            for work in self._works:
                work.wait(*(() if timeout is None else (timedelta(seconds=max(end - time.monotonic(), 1e-3)),)))
            self.ended = True
        except RuntimeError as error:
            if self.missing():
                self.ended = error if time.monotonic() < end else False
                raise
            self.ended = error
        return True

    def is_completed(self) -> bool:
        """Whether `wait` has ended, in time."""
        return self.ended is not False
