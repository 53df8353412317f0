"""A few numbers of each rank, told to all ranks of a gloo group: of which only the delay matters.

Each row is a message of its own between two ranks, so no thread of gloo stands between it and the rank that waits, and
the receives may be posted before the rank has anything to tell. gloo moves a message once its receive is posted; by
then the sender's thread may have to wait for a core.
"""

from __future__ import annotations

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
_TAG = 2**29 + 1  # of no other message
_CPU = torch.device("cpu")


@define(eq=False)
class Rows:
    """The rows of one meeting of ``group``; a work that a `Waiting` waits for. The receives are posted as it is made.

    Ranks make them in one order, and send in that order.
    """

    group: ProcessGroup
    single: bool = field(default=True, init=False)
    """A wait that is given up closes the connections: there is one, of the whole time."""
    _memory: array[float] = field(init=False)
    _rows: list[torch.Tensor] = field(init=False)
    _works: list[Any] = field(init=False)
    _ended: bool | RuntimeError = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        ranks, own = self.group.size(), self.group.rank()
        self._memory = array("d", bytes(8 * (MOST + 1) * ranks))
        self._rows = list(torch.frombuffer(self._memory, dtype=torch.float64).view(ranks, MOST + 1).unbind())
        receive = backend_of(self.group, _CPU).recv
        self._works = [receive([row], peer, _TAG) for peer, row in enumerate(self._rows) if peer != own]

    def send(self, numbers: list[float]) -> None:
        """Tell the others this rank's ``numbers``, `MOST` at most."""
        own = self.group.rank()
        first = own * (MOST + 1)
        self._memory[first : first + len(numbers)] = array("d", numbers)
        self._memory[first + MOST] = len(numbers)
        send, row = backend_of(self.group, _CPU).send, [self._rows[own]]
        host_collectives.add(self, self.group)
        self._works += [send(row, peer, _TAG) for peer in range(len(self._rows)) if peer != own]

    def here(self) -> list[list[float]]:
        """The rows that have come, this rank's with them. Looks at memory only."""
        every = [self._memory[first : first + MOST + 1] for first in range(0, len(self._memory), MOST + 1)]
        return [list(row[: int(row[MOST])]) for row in every if row[MOST]]

    def missing(self) -> list[int]:
        """The ranks, of the group, whose rows have not come."""
        return [rank for rank in range(len(self._rows)) if not self._memory[rank * (MOST + 1) + MOST]]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all rows, up to ``timeout`` or that of the group.

        Raises:
            RuntimeError: a connection is gone; or the time has passed, and all connections of the group are closed.
        """
        if isinstance(self._ended, RuntimeError):
            raise self._ended
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        try:
            for work in self._works:
                work.wait(*(() if end is None else (timedelta(seconds=max(end - time.monotonic(), 1e-3)),)))
        except RuntimeError as error:
            if end is None or time.monotonic() < end:
                self._ended = error
            raise
        self._ended = True
        return True

    def is_completed(self) -> bool:
        """Whether `wait` has ended, in time."""
        return self._ended is not False
