"""Long waits in collectives without a monitor, in a control store: so an error can name the ranks that are missing.

No backend tells who has joined a collective. A rank that waits for one longer than a moment writes the collective's
name to a control store; the ranks of the group that have written no name, or another one, have not joined it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from attrs import define, field

from pipegrid.topology import control_store
from pipegrid.topology.bounded_calls import bounded
from pipegrid.transport.collectives.differences import listed

if TYPE_CHECKING:
    from pipegrid.monitor.control import ControlStore

_T = TypeVar("_T")
_SECONDS = 0.5  # for a call of the store
_AGAIN = 10.0  # until one that was silent is asked again


@define(eq=False)
class LongWaits:
    """One rank's access to the records of long waits; the store is connected at the first one."""

    rank: int
    _store: ControlStore | None = None
    _said: bool = field(default=False, init=False)
    _silent_until: float = field(default=0.0, init=False)

    def begin(self, what: str) -> None:
        """Record that this rank waits for ``what``."""
        self._said = True
        self._ask(self._write, json.dumps(what))

    def end(self) -> None:
        """Record that the wait has ended."""
        if self._said:
            self._said = False
            self._ask(self._write, "")

    def absent(self, what: str, ranks: Sequence[int]) -> str:
        """The ``ranks`` that have not joined ``what``, in words; empty where the store does not know."""
        said = self._ask(self._read, ranks) or {}
        apart: dict[str, list[int]] = {}
        for rank in ranks:
            other = said.get(rank, "")
            if rank != self.rank and said and other != what:
                apart.setdefault(other, []).append(rank)
        texts = [
            f"{listed(those)} {'has' if len(those) == 1 else 'have'} not joined it"
            + (f", and {'waits' if len(those) == 1 else 'wait'} for {other}" if other else "")
            for other, those in apart.items()
        ]
        return "; ".join(texts)

    def _ask(self, function: Callable[..., _T], *arguments: Any) -> _T | None:
        if time.monotonic() < self._silent_until:
            return None
        try:
            return bounded(function, *arguments, seconds=_SECONDS, name="pipegrid-waits", patience=0.0)
        except RuntimeError:  # the store is silent, or gone with its process: the error of the wait says less
            self._silent_until = time.monotonic() + _AGAIN
            return None

    def _connected(self) -> ControlStore:
        if self._store is None:
            self._store = control_store("long waits")
        return self._store

    def _write(self, text: str) -> None:
        self._connected().set(f"wait/{self.rank}", text)

    def _read(self, ranks: Sequence[int]) -> dict[int, str]:
        store = self._connected()
        found = {rank: store.get(key).decode() for rank in ranks if store.check([key := f"wait/{rank}"])}
        return {rank: str(json.loads(text)) for rank, text in found.items() if text}


_of_job: WeakKeyDictionary[Any, LongWaits] = WeakKeyDictionary()


def long_waits() -> LongWaits:
    """The `LongWaits` of this process, which has a default process group."""
    import torch.distributed as dist

    world = dist.group.WORLD
    if world not in _of_job:
        _of_job[world] = LongWaits(dist.get_rank())
    return _of_job[world]
