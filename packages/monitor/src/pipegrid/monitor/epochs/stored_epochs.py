"""The records of epochs in a control store: one function per record, each of a few calls of the store."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from attrs import frozen

from pipegrid.monitor.control import ControlStore, Failure
from pipegrid.monitor.epochs.records import Alarm, Ballot, DoneCount, VoteResult, alarm_of, result_of, result_to_text

LEFT = 1 << 40
"""The number that a rank which leaves adds to its heartbeat counter."""


class EpochStore(ControlStore, Protocol):
    """The part of a `torch.distributed.Store` that epochs need; ``clone()``, where it exists, gives a connection.

    Examples:
        >>> from torch.distributed import HashStore
        >>> store: EpochStore = HashStore()
        >>> epochs = Epochs(store, rank=0, ranks=[0])
        >>> epochs.current.members
        (0,)
        >>> epochs.close()
    """

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Return when all keys are there."""


@frozen
class StoredEpochs:
    """The epoch store: one method per record of the epochs in ``store``.

    ===============================  ===================================================================================
    ``incarnation/RANK``             a counter of the processes that were started for the rank
    ``heartbeats/RANK/INCARNATION``  a counter, which grows as long as that process lives
    ``asking``                       processes that ask to join, or have joined: the last one of each rank
    ``done/EPOCH/NUMBER``            a counter, to which each member adds once, see `DoneCount`
    ``over/EPOCH/NUMBER``            wakes those that wait for the counter: it is complete, or there is an alarm
    ``alarm/EPOCH``                  why the epoch ends; it grows, and is never taken back
    ``ballot/EPOCH/RANK``            written once, by the rank, which says done for nothing in this epoch after it
    ``result/EPOCH``                the vote result, written once, by the first to propose one
    ===============================  ===================================================================================
    """

    store: ControlStore

    def incarnation(self, rank: int) -> int:
        """The number of this process among those of its rank, from 1."""
        return self.store.add(f"incarnation/{rank}", 1)

    def heartbeats(self, rank: int, incarnation: int, amount: int = 0) -> int:
        """Add to the heartbeat counter of a process; the sum."""
        return self.store.add(f"heartbeats/{rank}/{incarnation}", amount)

    def asking(self) -> dict[int, int]:
        """The processes that ask to join: the last incarnation of each rank."""
        text = self._read("asking")
        return {} if text is None else dict(json.loads(text))

    def ask(self, rank: int, incarnation: int) -> None:
        """Ask for the place of a rank, for a process of it."""

        def grown(known: str) -> str:
            asking = dict(json.loads(known or "[]"))
            return json.dumps(sorted({**asking, rank: max(incarnation, asking.get(rank, 0))}.items()))

        self._grow("asking", grown)

    def say_done(self, epoch: int, number: int, amount: int) -> DoneCount:
        """Add to the counter of a key."""
        return DoneCount(self.store.add(f"done/{epoch}/{number}", amount))

    def over(self, epoch: int, number: int) -> str:
        """The key of the store that appears when a wait for the counter is over."""
        return f"over/{epoch}/{number}"

    def wake(self, epoch: int, number: int) -> None:
        """End all waits for the counter of a key."""
        self.store.set(self.over(epoch, number), "1")

    def forget(self, epoch: int, number: int) -> None:
        """Delete what is kept of a key, for which no member waits any more."""
        self.store.delete_key(f"done/{epoch}/{number}")
        self.store.delete_key(self.over(epoch, number))

    def alarm(self, epoch: int) -> Alarm | None:
        """The alarm of the epoch, if there is one."""
        text = self._read(f"alarm/{epoch}")
        return None if text is None else alarm_of(text)

    def raise_alarm(self, epoch: int, alarm: Alarm) -> Alarm:
        """Add to the reasons why the epoch ends; all that are known then."""
        together = alarm

        def grown(known: str) -> str:
            nonlocal together
            together = alarm_of(known).merged(alarm) if known else alarm
            return together.to_text()

        self._grow(f"alarm/{epoch}", grown)
        return together

    def vote(self, epoch: int, rank: int, ballot: Ballot) -> None:
        """Write the ballot of a rank."""
        self.store.set(f"ballot/{epoch}/{rank}", ballot.to_text())

    def ballot(self, epoch: int, rank: int) -> Ballot | None:
        """The ballot of a rank, if it has voted."""
        text = self._read(f"ballot/{epoch}/{rank}")
        return None if text is None else Ballot(*json.loads(text))

    def propose(self, epoch: int, outcome: VoteResult | Failure) -> VoteResult | Failure:
        """Propose an outcome; the first one that was."""
        return result_of(self.store.compare_set(f"result/{epoch}", "", result_to_text(outcome)).decode())

    def result(self, epoch: int) -> VoteResult | Failure | None:
        """The outcome of the vote at the end of an epoch, if there is one."""
        text = self._read(f"result/{epoch}")
        return None if text is None else result_of(text)

    def _grow(self, key: str, grown: Callable[[str], str]) -> None:
        """Write ``grown`` of what is there, which others may write as well."""
        known = self._read(key) or ""
        while (text := grown(known)) != known:
            found = self.store.compare_set(key, known, text).decode()
            if found == text:
                return
            known = found

    def _read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None
