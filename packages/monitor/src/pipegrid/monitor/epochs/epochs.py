"""Agreement of ranks on what is done and, after a death, on who is left: one consensus per epoch, in a control store.

Epochs follow each other; the members of one do keys (steps, norms) in the same order. What is decided is a record that
is written once, by ``compare_set``, so all who read it read the same:

1. A member adds once to the counter of a key, when it has done it. `Epochs.done` is True only if all members have, and
   that stays so. So a member at a key knows that all have done the one before, and members are at one key or at two
   successive ones.
2. An alarm (a lost member, a call for a vote) ends the epoch. It is never taken back, and members that find it vote. A
   ballot has the member's key and whether it has done it; after it, the member adds to no counter of this epoch.
3. Each living member waits for the vote result. The lowest of them, as far as it knows, collects ballots until each
   member has voted or is lost, and proposes the result. Others may do so at the same time: the first proposal holds.
   So no two results of an epoch differ, and the next epoch has the same members for all.
4. If one member saw a key as done by all, each ballot is of that key, done, or of the next one: the result commits the
   key. If the result says redo, some member that goes on voted "not done", never says otherwise, and the counter is
   never complete: no rank, not even one that sleeps through the vote, sees the key as done.
5. A rank that the result counts as dead, and that lives, is fenced: it can neither complete a counter of a later epoch
   nor vote there. A failure of the job is a result too: either all leave a vote, or none does.
6. A new process of a dead rank asks to join, and a vote result names it as a member. A member says who asks before its
   ballot, and who proposes reads that when it has all ballots. The next key is one that the process may begin with, and
   the state before that key is on members that were there before. The processes of a rank have numbers, incarnations,
   and a member is a rank with its incarnation. So an old process of the rank that wakes up is in no epoch of a later
   one, and writes nothing there.
7. A loss that is recorded while a result is proposed without it is found either by its recorder, which sees the
   result and records it in the next epoch, or by the members, which read the alarm again after the result.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from threading import Event, Thread, current_thread
from typing import Any

from attrs import evolve

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Index, Seconds, checked
from pipegrid.monitor.control import DisagreementError, Failure, bounded_store, silent
from pipegrid.monitor.epochs.errors import FencedError, RankLostError
from pipegrid.monitor.epochs.heartbeat import WATCHED, Heartbeat
from pipegrid.monitor.epochs.records import Alarm, Ballot, DoneCount, Epoch, Retire, VoteResult, admissible, decide
from pipegrid.monitor.epochs.stored_epochs import LEFT, EpochStore, StoredEpochs
from pipegrid.monitor.monitor import JobFailedError
from pipegrid.topology.bounded_calls import BoundedCalls
from pipegrid.transport.collectives.differences import listed

_OUTSIDE = Epoch(-1, ())  # of a process that has not joined yet
_STUCK_SECONDS = 0.05  # of a call of the store behind one that was given up: a silent store is waited for once
_AGAIN = timedelta(minutes=20)  # of a wait in the store, which this rank's heartbeat thread ends; then it looks again


class Epochs:
    """One rank's end of the agreement. Every rank makes one, with a store that lives on none of them.

    `done` and `vote` are called by one thread, for the same keys in the same order on all members. The first process of
    a rank is a member from the start; a later one calls `join` first.

    Args:
        store: for this attempt of the job alone; reached in a process that outlives the ranks.
        rank: this rank.
        ranks: all of them: the members of epoch 0.
        heartbeat: seconds of silence after which a rank is lost. Heartbeats need an interpreter that runs threads: a
            call that holds the interpreter's lock for longer looks like a death.
        deadline: seconds in which a vote ends, or the job fails; for a call of the store, and for ranks to arrive.
        retire: the living ranks that leave with the given dead, such as their tensor-parallel peers; the same on all
            ranks.
        on_alarm: called with the reason, in a thread, once for each epoch that ends by an alarm: ends this rank's
            transfers, which may wait for ranks that never join them.

    Raises:
        StepArgumentError: a rank that is not among ``ranks``, or seconds that are not positive.

    Attributes:
        incarnation: the number of this process among those of its rank, from 1.
        current: the epoch that this rank is in.
        ready: whether this rank has the state of the job; the caller says so of a process that has joined.

    Examples:
        >>> from torch.distributed import HashStore
        >>> epochs = Epochs(HashStore(), rank=0, ranks=[0])
        >>> epochs.done("step 0"), epochs.vote("step 1").epoch.members
        (True, (0,))
        >>> epochs.close()
    """

    def __init__(
        self,
        store: EpochStore,
        *,
        rank: int,
        ranks: Sequence[int],
        heartbeat: float = 5.0,
        deadline: float = 60.0,
        retire: Retire = lambda _: (),
        on_alarm: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.rank = checked(rank, Index, "rank", StepArgumentError)
        members: tuple[int, ...] = tuple(sorted(checked(ranks, tuple[Index, ...], "ranks", StepArgumentError)))
        if rank not in members or len(set(members)) < len(members):
            raise StepArgumentError(f"rank is {rank} and ranks are {list(ranks)}: give all ranks of the job, each once")
        heartbeat = checked(heartbeat, Seconds, "heartbeat", StepArgumentError)
        self._deadline = checked(deadline, Seconds, "deadline", StepArgumentError)
        self._first = Epoch(0, members)
        self._retire = retire
        self._number, self._said, self._voted = 0, -1, -1  # keys done; the last that was said; the last epoch voted in
        self._failed, self._outside = "", False
        self._store = store
        self._calls = BoundedCalls("pipegrid-epochs")
        self._stored = StoredEpochs(bounded_store(store, self._calls, self._deadline, stuck=_STUCK_SECONDS))
        beside: EpochStore = store.clone() if hasattr(store, "clone") else store
        calls = BoundedCalls("pipegrid-heartbeat")
        stored = StoredEpochs(bounded_store(beside, calls, self._deadline, stuck=_STUCK_SECONDS))
        self._heartbeat = Heartbeat(stored, rank, 0, _OUTSIDE, heartbeat, self._deadline, on_alarm)
        with self._answering("the first heartbeat"):
            self._heartbeat.incarnation = self.incarnation = stored.incarnation(rank)
            stored.heartbeats(rank, self.incarnation, 1)
        self.ready = self.incarnation == 1
        self.current = self._heartbeat.epoch = self._first if self.ready else _OUTSIDE
        self._close = weakref.finalize(self, _end, self._heartbeat, *_started(self._heartbeat), self._calls, calls)

    def join(self) -> VoteResult:
        """Ask for the place of this rank, whose earlier process has ended, and wait until the members take this one in.

        They do so in a vote before a key with ``edge``. Before this rank has done its first key, it gets the state of
        the job from a member that is not ``joining``, and sets `ready`.

        Raises:
            FencedError: an earlier process of the rank lives, or a later one has started.
            JobFailedError: the job has ended, no member has a heartbeat, or the store does not answer.
        """
        with self._answering("join()"):
            outcome = _admission(self._stored, self._heartbeat, self._first, self._deadline)
        if isinstance(outcome, Failure):
            raise self._ended(outcome)
        self._enter(outcome)
        return outcome

    @property
    def asking(self) -> dict[int, int]:
        """New processes that ask to join and can, as far as this rank knows: incarnations by rank. Local."""
        asking, alarm = self._heartbeat.asking, self._heartbeat.alarm
        if not asking:
            return {}
        living = [rank for rank in self.current.members if alarm is None or rank not in alarm.lost]
        return admissible(self.current, asking, living, self._retire)

    def done(self, key: str) -> bool:
        """Say that this rank has done ``key`` in the current epoch, and wait for the other members.

        Returns:
            True when all members have said so; False once the epoch ends by a loss or a vote instead. Then `vote`.

        Raises:
            JobFailedError: a rank has given up, or the store does not answer.
            FencedError: the others go on without this rank.
            DisagreementError: members do different keys.
        """
        self._require_member()
        epoch, number, size = self.current.number, self._number, len(self.current.members)
        amount, self._said = 0 if self._said == number else DoneCount.of(key).sum, number
        with self._answering(f"done({key!r})"), self._waiting():
            tally = self._stored.say_done(epoch, number, amount)
            last, woken = tally.count == size and amount > 0, False
            while tally.count < size and tally.is_of(key):
                if (woken or self._heartbeat.alarm is not None) and self._alarmed():
                    return False
                self._wait_over(epoch, number)
                woken, tally = True, self._stored.say_done(epoch, number, 0)
            if not tally.is_of(key):
                text = f"rank {self.rank} has done {key!r} as its key number {number}, and another rank another key"
                self.give_up(text)
                raise DisagreementError(f"{text}. Do the same keys in the same order on all ranks")
            if last:
                self._stored.wake(epoch, number)
                self._stored.forget(epoch, number - 1)  # all are at this key, so none waits for the last one
        self._number = self._heartbeat.number = number + 1
        return True

    def lost(self, rank: int, why: str, epoch: Epoch | None = None) -> None:
        """Record for all that the process of ``rank`` in ``epoch`` (None: the current one) has ended. From any thread.

        A rank that lives and closes a lane, after a failure of its own, is not lost.
        """
        try:
            self._heartbeat.lost(rank, why, epoch)
        except RuntimeError as error:
            self._heartbeat.fail(silent(error))

    def vote(
        self, key: str, why: str = "", *, edge: bool = False, asking: Mapping[int, int] | None = None
    ) -> VoteResult:
        """Agree with the living members on who is lost and on what is done; the next epoch begins.

        Every member votes once per epoch that ends. ``dead`` of the result is empty if all of them did, unless a new
        process leaves that has not got ready.

        Args:
            key: that this rank works on: the last one given to `done`, if that was not True, or the one after it.
            why: the reason of this rank, for the others.
            edge: whether new processes may begin with this key; the same on all ranks.
            asking: incarnations, by rank, of the new processes for which this rank has skipped the key. They are
                admitted even if they have been silent since.

        Raises:
            JobFailedError: the vote did not end in time, a rank has given up, or the store does not answer; for all.
            FencedError: the others go on without this rank.
        """
        self._require_member()
        epoch, number = self.current, self._number
        self._voted = epoch.number
        with self._answering(f"the vote on {key!r}"), self._waiting():
            said = f"rank {self.rank} has called for a vote: {why or key}"
            asking = {**(asking or {}), **self.asking} if edge else {}
            self._stored.raise_alarm(epoch.number, Alarm(why=said, asking=asking))  # before the ballot: see 6
            self._stored.vote(epoch.number, self.rank, Ballot(number, key, self._said == number, edge, self.ready))
            outcome = self._outcome(epoch, key)
            if isinstance(outcome, Failure):
                raise self._ended(outcome)
            if self.rank in outcome.dead:
                raise self._fenced(outcome.dead[self.rank])
            alarm = self._stored.alarm(epoch.number)
            self._enter(outcome)
            for rank, reason in () if alarm is None else alarm.lost.items():
                self._heartbeat.lost(rank, reason, epoch)  # no effect unless its process is a member of the new epoch
        return evolve(outcome, committed=outcome.keys > number)

    def give_up(self, error: str) -> None:
        """Fail the job: `done` and `vote` of all members raise a JobFailedError with ``error``. From any thread.

        No effect where the others go on without this rank.
        """
        self._failed = self._failed or error
        epoch = self.current
        try:
            while not self._outside and epoch.has(self.rank, self.incarnation):
                outcome = self._heartbeat.stored.propose(epoch.number, Failure(self.rank, error))
                self._heartbeat.stored.raise_alarm(epoch.number, Alarm(why=f"rank {self.rank} has given up: {error}"))
                if isinstance(outcome, Failure):
                    return
                epoch = outcome.epoch
        except RuntimeError as failure:
            self._heartbeat.fail(silent(failure))

    def check(self, where: str) -> None:
        """Raise if this rank has noticed that the epoch ends. Local.

        Raises:
            RankLostError: a member is lost, or has called for a vote.
            JobFailedError: this rank's heartbeat has ended.
        """
        if self._failed or self._heartbeat.failure:
            raise JobFailedError(f"{where}: {self._failed or self._heartbeat.failure}")
        if self._heartbeat.alarm is not None:
            raise RankLostError(self._heartbeat.alarm.lost, where, self._heartbeat.alarm.why)

    def close(self) -> None:
        """Leave: others do not take this rank for lost, unless they wait for it. Idempotent."""
        self._close()

    def _require_member(self) -> None:
        if self._failed or self._heartbeat.failure:
            raise JobFailedError(self._failed or self._heartbeat.failure)
        if not self.current.has(self.rank, self.incarnation):
            raise self._fenced("it has retired" if self.current.members else "join() has not returned")
        if self._voted == self.current.number:
            raise JobFailedError("a vote was interrupted on this rank, which can neither vote nor say done again")

    def _enter(self, result: VoteResult) -> None:
        """Go on in the epoch that a vote has begun."""
        self.current, self._number, self._said = result.epoch, result.keys, -1
        self._heartbeat.epoch, self._heartbeat.number = self.current, self._number

    def _alarmed(self) -> bool:
        """Whether the epoch ends, by the store."""
        epoch = self.current.number
        if (alarm := self._stored.alarm(epoch)) is None:
            return False
        outcome = self._stored.result(epoch)
        if isinstance(outcome, Failure):
            raise self._ended(outcome)
        if self.rank in alarm.lost:
            raise self._fenced(alarm.lost[self.rank])
        return True

    def _outcome(self, epoch: Epoch, key: str) -> VoteResult | Failure:
        """The vote result of ``epoch``, after waiting for it, or proposing it."""
        began = time.monotonic()
        while (outcome := self._stored.result(epoch.number)) is None:
            alarm = self._stored.alarm(epoch.number)
            dead = {} if alarm is None else alarm.lost
            if self.rank in dead:
                raise self._fenced(dead[self.rank])
            living = [member for member in epoch.members if member not in dead]
            waited = time.monotonic() - began
            if self.rank == living[0] or waited > self._deadline:
                ballots = {member: self._stored.ballot(epoch.number, member) for member in living}
                voted = {member: ballot for member, ballot in ballots.items() if ballot is not None}
                if not (silent := [member for member in living if member not in voted]):
                    alarm = self._stored.alarm(epoch.number)  # with who asks, as each knew before it voted
                    decided = decide(epoch, voted, alarm or Alarm(), self._retire, rank=self.rank)
                    return self._stored.propose(epoch.number, decided)
                if waited > self._deadline:
                    text = f"{listed(silent)} lived and did not vote on {key!r} in {self._deadline:.3g} s"
                    return self._stored.propose(epoch.number, Failure(self.rank, text))
            if self._heartbeat.failure:
                raise JobFailedError(self._heartbeat.failure)
            time.sleep(min(0.1, max(0.002, waited / 10)))
        return outcome

    def _wait_over(self, epoch: int, number: int) -> None:
        """Wait for the others to have done a key, or for an alarm."""
        wait, began = partial(self._store.wait, [self._stored.over(epoch, number)], _AGAIN), time.monotonic()
        seconds = _AGAIN.total_seconds()
        try:
            self._calls.run(wait, seconds=seconds + self._deadline, given_up=lambda: self._heartbeat.failure)
        except RuntimeError:
            if self._heartbeat.failure or time.monotonic() - began < seconds:  # else the wait has only lasted
                raise

    def _ended(self, failure: Failure) -> JobFailedError:
        self._failed = f"rank {failure.rank} has ended the job: {failure.text}"
        return JobFailedError(self._failed)

    def _fenced(self, why: str) -> FencedError:
        self._outside = True
        self._failed = f"rank {self.rank} is outside of the job, and the others go on without it: {why}"
        return FencedError(self._failed)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._heartbeat.waiting = True
        try:
            yield
        finally:
            self._heartbeat.waiting = False

    @contextlib.contextmanager
    def _answering(self, what: str) -> Iterator[None]:
        """Errors of the store as failures of the job."""
        try:
            yield
        except JobFailedError:
            raise
        except RuntimeError as error:
            raise JobFailedError(f"{what}: {self._heartbeat.failure or silent(error)}") from error


def _admission(stored: StoredEpochs, heartbeat: Heartbeat, epoch: Epoch, deadline: float) -> VoteResult | Failure:
    """Ask to join, and wait for the vote result by which this process is a member, or that the job has failed.

    It may take as long as a step, or until other new processes, with which this one computes, have asked. ``deadline``:
    seconds in which some member's heartbeat is seen, or an earlier process of the rank is voted out.
    """
    rank, own, began = heartbeat.rank, heartbeat.incarnation, time.monotonic()
    stored.ask(rank, own)
    known, seen = dict[int, int](), began
    while True:
        outcome = stored.result(epoch.number)
        if isinstance(outcome, Failure) or (outcome is not None and outcome.epoch.has(rank, own)):
            return outcome
        if heartbeat.failure:
            raise JobFailedError(heartbeat.failure)
        if outcome is not None:
            epoch = outcome.epoch
            continue
        if stored.asking()[rank] > own or epoch.incarnations[rank] > own:
            raise FencedError(f"another process of rank {rank} has come after this one")
        others = [member for member in epoch.members if member != rank][:WATCHED]
        heartbeats = {member: stored.heartbeats(member, epoch.incarnations[member]) for member in others}
        now = time.monotonic()
        if all(count >= LEFT for count in heartbeats.values()):
            raise JobFailedError("the job has ended: its ranks have left")
        known, seen = heartbeats, seen if heartbeats == known else now
        if now - seen > deadline:
            raise JobFailedError(
                f"ranks {[*heartbeats]} have been silent for {deadline:.3g} s: the job has ended, or the store is that "
                "of another attempt"
            )
        if rank in epoch.members and now - began > deadline:
            raise FencedError(f"a process of rank {rank} is in the job and lives: end it before another one starts")
        time.sleep(min(0.1, heartbeat.interval))


def _started(heartbeat: Heartbeat) -> tuple[Event, Thread]:
    stop = Event()
    thread = Thread(target=heartbeat.run, args=(stop,), name="pipegrid-heartbeat", daemon=True)
    thread.start()
    return stop, thread


def _end(heartbeat: Heartbeat, stop: Event, thread: Thread, *calls: Any) -> None:
    stop.set()
    if thread is not current_thread():
        thread.join()
    with contextlib.suppress(RuntimeError):  # the store may have ended before this rank
        heartbeat.stored.heartbeats(heartbeat.rank, heartbeat.incarnation, LEFT)
    for each in calls:
        each.close()
