"""The first failure of a job without a monitor: one key of a control store, which only ranks that fail write and read.

A rank that fails on a lane learns the cause over it. One that fails in a reduction, on a clip or at a deadline has no
lane to the rank that failed, and learns it here.

The key outlives a failure, and ranks may go on in the same processes with rebuilt communicators. So each writes its
failure in place of the one that it saw last: the first to fail again replaces it, and the others find that one. A rank
numbers its records, since one that is equal to the last would be replaced by the next rank. One that it has not seen
may still be of an earlier attempt, which failed on other ranks alone: a record has the attempt of its communicator.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from attrs import define, field

from pipegrid.topology import control_store
from pipegrid.topology.bounded_calls import bounded

if TYPE_CHECKING:
    from pipegrid.monitor.control import ControlStore

_SECONDS = 0.5
_KEY = "failure"
_LONGEST = 2000


@define(eq=False)
class FirstFailure:
    """One rank's access to the key of the first failure; the store is connected at the first failure."""

    rank: int
    _store: ControlStore | None = None
    _seen: str = field(default="", init=False)
    _count: int = field(default=0, init=False)

    def record(self, text: str, attempt: int = 0) -> str:
        """Record ``text`` as this rank's failure in the communicator's ``attempt``; return the text that was first.

        ``text`` where the store does not answer within half a second, or its process has ended.
        """
        try:
            return bounded(self._record, text, attempt, seconds=_SECONDS, name="pipegrid-failure", patience=0.0)
        except RuntimeError:
            return text

    def _record(self, text: str, attempt: int) -> str:
        if self._store is None:
            self._store = control_store("first failure")
        self._count += 1
        mine = json.dumps([self.rank, text[:_LONGEST], self._count, attempt])
        self._seen = self._store.compare_set(_KEY, self._seen, mine).decode()
        if json.loads(self._seen)[-1] < attempt:
            self._seen = self._store.compare_set(_KEY, self._seen, mine).decode()
        return text if self._seen == mine else str(json.loads(self._seen)[1])


# By default process group: what this rank saw of an earlier failure must outlive the runtime that failed.
_of_job: WeakKeyDictionary[Any, FirstFailure] = WeakKeyDictionary()


def first_failure(text: str, attempt: int = 0) -> str:
    """Record ``text`` as this rank's failure, and return the first of the attempt; ``text`` in a job of one rank.

    Examples:
        >>> first_failure("the data has ended")
        'the data has ended'
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    world = dist.group.WORLD
    if world not in _of_job:
        _of_job[world] = FirstFailure(dist.get_rank())
    return _of_job[world].record(text, attempt)
