"""Each rank watches the next one over a connection of its own, which closes when the process ends, whatever it did.

A monitor knows of a rank that is lost in a step, by its lanes, and of one that is late, by its deadline. Between steps
and before the first one no transfer is under way, and ranks that wait for a dead one would wait for a timeout.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from pipegrid.topology import GroupSpec, create_groups, destroy_groups
from pipegrid.transport.backends.wire import FOREVER, cut_connection

_WORD_BYTES: Final = 512
_SOON: Final = timedelta(seconds=2)


class Neighbours:
    """Ranks in a ring: each waits, in a thread, for the last word of the next one.

    Every member makes one, together. Groups are of two ranks, so a rank has two connections in a job of any size. Of
    members that die together, only those after a living one are noticed; `Epochs` finds the others by their silence.

    Args:
        lost: called once in the thread, with the next rank and why it left, unless it has left in good order; such as
            `Epochs.lost`.
        members: of the ring; None: the ranks of the default group.
        name: of the ring: another one after each change of members, such as ``"epoch 1"``.
        timeout: for ranks to connect; None is the default process group's.
    """

    def __init__(
        self,
        lost: Callable[[int, str], object],
        *,
        members: Iterable[int] | None = None,
        name: str = "",
        timeout: timedelta | None = None,
    ) -> None:
        ring = list(range(dist.get_world_size())) if members is None else sorted(members)
        self._rank, size = dist.get_rank(), len(ring)
        here = ring.index(self._rank)
        before, self._next = ring[here - 1], ring[(here + 1) % size]
        self._lost = lost
        self._gone, self._leaving = threading.Event(), False
        self._groups: list[Any] = []  # shared with the next rank, and with the one before
        if size == 1:
            return
        specs = [_edge(self._rank, self._next, name), _edge(before, self._rank, name)]
        made = create_groups(specs, backend="gloo", timeout=timeout)
        self._groups = [made[spec] for spec in specs]
        word = torch.zeros(_WORD_BYTES, dtype=torch.uint8)
        heard = self._groups[0].recv([word], self._other(0), 0)
        self._thread = threading.Thread(target=self._watch, args=(heard, word), name="pipegrid-neighbours", daemon=True)
        self._thread.start()

    def is_lost(self, *, seconds: float) -> bool:
        """Whether the next rank has left by a failure, after waiting up to ``seconds`` for its message."""
        return self._gone.wait(seconds)

    def close(self, *, failure: str = "") -> None:
        """Leave the ring; a ``failure`` is sent to the rank before this one, where it ends the wait."""
        if not self._groups:
            return
        self._leaving = True
        data = failure.encode(errors="backslashreplace")[:_WORD_BYTES].ljust(_WORD_BYTES, b"\0")
        word = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):  # the rank before this one may have left already
            self._groups[1].send([word], self._other(1), 0).wait(_SOON)
        for number in (1, 0):
            cut_connection(self._groups[number], self._other(number))
        self._thread.join()
        groups, self._groups = self._groups, []
        destroy_groups(groups)

    def _other(self, number: int) -> int:
        return 1 - dist.get_rank(self._groups[number])

    def _watch(self, work: Any, word: torch.Tensor) -> None:
        try:
            work.wait(FOREVER)
            failure = bytes(word.tolist()).rstrip(b"\0").decode(errors="ignore")
        except RuntimeError:
            failure = f"rank {self._rank} lost rank {self._next}: its process has ended without a word"
        if failure and not self._leaving:
            self._gone.set()
            self._lost(self._next, failure)


def _edge(watcher: int, watched: int, name: str) -> GroupSpec:
    return GroupSpec(tuple(sorted((watcher, watched))), f"watch of rank {watcher} {name}".rstrip(), shared=False)
