"""A thread beside each rank: its heartbeat, the heartbeats of the next ranks, and alarms."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from attrs import define, field

from pipegrid.monitor.control import silent
from pipegrid.monitor.epochs.records import Alarm, Epoch, VoteResult
from pipegrid.monitor.epochs.stored_epochs import LEFT, StoredEpochs
from pipegrid.topology.bounded_calls import SilentStoreError

WATCHED = 8  # ranks that each rank watches: those of a host, which die together
_ALARM_SECONDS = 0.1  # between two looks for an alarm


@define(eq=False)
class Heartbeat:
    """The heartbeat thread of a rank: it counts its own up, reads those of other ranks, and looks for alarms.

    Each member watches the next ones in the ring of members. Where some are dead, the last living one before each gap
    watches into it, so every death is noticed by a member that lives.
    """

    stored: StoredEpochs  # the epoch store, over a connection of the thread's own
    rank: int
    incarnation: int  # number of this process among those of its rank, from 1
    epoch: Epoch  # the current one, as far as this rank knows
    limit: float  # seconds without a heartbeat after which a rank is lost
    deadline: float  # the same, of a rank without a first one
    on_alarm: Callable[[str], object]  # called once per epoch, with the reason
    number: int = 0  # of the key that this rank works on
    waiting: bool = False  # whether this rank waits for the others
    failure: str = ""  # why the thread has ended, if it has
    _alarm: tuple[int, Alarm] | None = field(default=None, init=False)
    # Of a process (rank, incarnation): heartbeats, and seconds without one.
    _seen: dict[tuple[int, int], tuple[int, float]] = field(factory=dict, init=False)
    _asking: dict[tuple[int, int], tuple[int, float]] = field(factory=dict, init=False)  # likewise, of those that ask
    _sent_at: float = field(factory=time.monotonic, init=False)

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats."""
        return min(0.5, self.limit / 10)

    @property
    def alarm(self) -> Alarm | None:
        """The alarm of the current epoch, if this rank has noticed one."""
        return self._alarm_of(self.epoch)

    def _alarm_of(self, epoch: Epoch) -> Alarm | None:
        known = self._alarm
        return known[1] if known is not None and known[0] == epoch.number else None

    def send(self, now: float) -> None:
        """Send a heartbeat, and read those of the ranks that this one watches.

        A rank is silent for as long as this one reads no new heartbeat of it: the time in which this thread, or the
        store, was held up does not count.
        """
        self.stored.heartbeats(self.rank, self.incarnation, 1)
        elapsed, self._sent_at = min(now - self._sent_at, 2 * self.interval), now
        asking = self.stored.asking()
        before = {one: self._asking.get(one, (self.stored.heartbeats(*one), self.limit)) for one in asking.items()}
        self._asking = {one: self._listen(one, before, elapsed) for one in before}
        epoch = self.epoch  # of the whole round: the rank's own thread may enter the next one meanwhile
        for rank in self._watched(epoch):
            one = rank, epoch.incarnations[rank]
            count, silent = self._seen[one] = self._listen(one, self._seen, elapsed)
            if count >= LEFT:
                if self.waiting:
                    self.lost(rank, "it has left, and others wait for it", epoch)
            elif silent >= (self.limit if count else self.deadline):
                why = f"nothing was heard of it for {silent:.3g} s" if count else "it has never come"
                self.lost(rank, why, epoch)

    def _listen(
        self, process: tuple[int, int], seen: dict[tuple[int, int], tuple[int, float]], elapsed: float
    ) -> tuple[int, float]:
        """Heartbeats of a process, and seconds without one."""
        known, silent = seen.get(process, (-1, 0.0))
        heartbeats = self.stored.heartbeats(*process)
        return heartbeats, silent + elapsed if heartbeats == known else 0.0

    @property
    def asking(self) -> dict[int, int]:
        """Processes that ask to join and have a recent heartbeat: incarnations by rank."""
        return {
            rank: incarnation
            for (rank, incarnation), (heartbeats, silent) in list(self._asking.items())
            if heartbeats < LEFT and silent <= 3 * self.interval
        }

    def _watched(self, epoch: Epoch) -> Iterator[int]:
        members = epoch.members
        if not epoch.has(self.rank, self.incarnation):
            return
        here, alarm, found = members.index(self.rank), self._alarm_of(epoch), 0
        for rank in (*members[here + 1 :], *members[:here]):
            if alarm is not None and rank in alarm.lost:
                continue
            yield rank
            found += self._seen[rank, epoch.incarnations[rank]][0] < LEFT
            if found == WATCHED:
                return

    def look(self) -> None:
        """Notice an alarm of this epoch, and end this rank's wait in it."""
        epoch = self.epoch
        known, alarm = self._alarm_of(epoch), self.stored.alarm(epoch.number)
        if alarm is not None and alarm != known:
            self._alarm = epoch.number, alarm
        if alarm is not None and known is None:
            # The order matters: a rank that sets its number and then finds no alarm waits for a key that is set here.
            self.stored.wake(epoch.number, self.number)
            self.on_alarm(str(alarm))

    def lost(self, rank: int, why: str, epoch: Epoch | None = None) -> None:
        """Record that the process of ``rank`` in ``epoch`` (None: the current one) is lost, there and in later epochs.

        A vote result that is not there after the alarm was raised is written, and read, by ranks that find the alarm.
        """
        epoch = epoch or self.epoch
        incarnation = epoch.incarnations.get(rank, 0)
        while epoch.has(rank, incarnation):
            self.stored.raise_alarm(epoch.number, Alarm({rank: why}))
            result = self.stored.result(epoch.number)
            if not isinstance(result, VoteResult):
                return
            epoch = result.epoch

    def fail(self, why: str) -> None:
        """Note that this thread, or the store, has failed."""
        if not self.failure:
            self.failure = why
            self.on_alarm(why)

    def run(self, stop: threading.Event) -> None:
        """Send heartbeats and look for alarms until ``stop``."""
        sent_at = 0.0
        while not stop.wait(min(_ALARM_SECONDS, self.interval)):
            try:
                now = time.monotonic()
                if now - sent_at >= self.interval:
                    sent_at = now
                    self.send(now)
                self.look()
            except SilentStoreError as error:
                self.fail(silent(error))
                return
            except Exception as error:  # noqa: BLE001 -- a thread that ends without a word leaves its rank to hang
                if not stop.is_set():
                    self.fail(f"the thread of the heartbeat has failed: {type(error).__name__}: {error}")
                return
