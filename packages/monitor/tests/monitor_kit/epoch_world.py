"""Ranks that agree over a simulated store: one operation at a time, in any order, with a crash at any of them.

Each rank has two actors, its program and its heartbeat, in threads of which one runs at a time. An actor stops before
each operation of the store until the scheduler picks it. The ranks call the code itself; only the clock is the world's.

A process is a number: its rank, and `LATER` more for each process of that rank before it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

from attrs import define, field

from pipegrid.monitor import Epochs, FencedError, JobFailedError
from pipegrid.monitor.epochs import epochs as module
from pipegrid.monitor.epochs import heartbeat as heartbeat_module
from pipegrid.monitor.epochs.stored_epochs import LEFT

SMALL_STEP = 0.04
LATER = 100
EDGE = 2  # new processes come in before each key of a number that this divides


class Crashed(BaseException):
    """The end of a process."""


class WaitsForeverError(AssertionError):
    """A rank was not at its end after many fair turns."""


def closed_gate():
    """One release lets one acquire go on: a lock, which takes a fraction of a semaphore's time."""
    gate = threading.Lock()
    gate.acquire()
    return gate


@define(eq=False)
class Actor:
    process: int
    body: Callable[[Actor], None]
    go: threading.Lock = field(factory=closed_gate)
    ready: Callable[[], bool] = bool
    ended: bool = False
    error: BaseException | None = None


class DirectCalls:
    """In place of `BoundedCalls`: the world bounds every call."""

    stuck = False

    def __init__(self, *_):
        pass

    def run(self, function, *arguments, seconds, given_up=None):
        del seconds, given_up
        return function(*arguments)

    def close(self):
        pass


@define(eq=False)
class Store:
    """The store of an actor, as torch's behave; ``world.acting`` is the actor that runs."""

    world: World

    def _do(self, verb, ready=lambda: True):
        return self.world.operation(verb, ready)

    def set(self, key, value):
        self._do(lambda: self.world.values.__setitem__(key, value))

    def get(self, key):
        return self._do(lambda: self.world.values[key].encode())

    def check(self, keys):
        return self._do(lambda: all(key in self.world.values for key in keys))

    def delete_key(self, key):
        return self._do(lambda: self.world.values.pop(key, None) is not None)

    def wait(self, keys, timeout):
        del timeout
        self._do(lambda: None, lambda: all(key in self.world.values for key in keys))

    def add(self, key, amount):
        def verb():
            self.world.values[key] = str(int(self.world.values.get(key, "0")) + amount)
            return int(self.world.values[key])

        return self._do(verb)

    def compare_set(self, key, expected, desired):
        def verb():
            found = self.world.values.get(key, "")
            if found == expected:
                self.world.values[key] = desired
            return self.world.values.get(key, expected).encode()

        return self._do(verb)


@define(eq=False)
class World:
    """Ranks, their store, the clock and the scheduler.

    Attributes:
        said: (process, epoch, key number) before the call of done.
        true: the same, after a done that was True.
        results: (process, epoch that ended, number of the key voted on, whether the process had the state, result).
        joins: (process, result) of those that came in.
        applied: by process, the numbers of the keys that were done or committed, in order; also those of the
            state that a process got when it came in.
        ends: by process: "finished", "fenced", "failed".
    """

    ranks: int
    keys: int
    random: random.Random
    crashes: dict[tuple[int, int], str] = field(factory=dict)  # by rank and operation: "before" or "after" it
    chaos: int = 400  # turns before they are fair
    fails: float = 0.1  # of attempts at a key, beside those that a death ends
    told: float = 0.3  # of the looks of a heartbeat at a rank that is dead: its connection has closed
    accuse: float = 0.0  # of the looks of a heartbeat: a rank that lives is said to be lost
    gives_up: tuple[int, int] | None = None  # rank and turn of its program
    deadline: float = 1e6
    patience: float = 10.0  # the deadline of those that come later
    retire: Callable[[frozenset[int]], set[int]] = lambda _: set()
    comers: Sequence[int] = ()  # processes that are started when the one of their rank before them has crashed
    faulty: Sequence[int] = ()  # of these, those that never get the state
    early: float = 0.0  # of the looks at whether it has: the process is started all the same
    fair: int = 20000
    values: dict[str, str] = field(factory=dict)
    clock: float = 0.0
    crashed: set[int] = field(factory=set)
    died: set[int] = field(factory=set)  # before the end of their program
    operations: dict[int, int] = field(factory=dict)
    acting: Actor | None = None
    scheduling: bool = False
    back: threading.Lock = field(factory=closed_gate)
    epochs: dict[int, Epochs] = field(factory=dict)
    said: set[tuple[int, int, int]] = field(factory=set)
    true: set[tuple[int, int, int]] = field(factory=set)
    results: list[tuple[int, int, int, bool, object]] = field(factory=list)
    joins: list[tuple[int, object]] = field(factory=list)
    applied: dict[int, list[int]] = field(factory=dict)
    ends: dict[int, str] = field(factory=dict)
    faults: list[str] = field(factory=list)
    accused: set[int] = field(factory=set)
    alarms: list[tuple[int, str]] = field(factory=list)

    # For the code that runs

    def monotonic(self):
        return self.clock

    def sleep(self, seconds):
        self.park(lambda: True)
        self.clock += min(seconds, SMALL_STEP)

    def operation(self, verb, ready):
        if not self.scheduling:
            return verb()
        self.park(ready)
        actor = self.acting
        here = actor.process, self.operations.get(actor.process, 0)
        self.operations[actor.process] = here[1] + 1
        crash = self.crashes.get(here)
        if crash == "before":
            self.crash(actor.process)
        result = verb()
        if crash == "after":
            self.crash(actor.process)
        return result

    def crash(self, process):
        self.crashed.add(process)
        if process not in self.ends:
            self.died.add(process)
        raise Crashed

    def park(self, ready):
        actor = self.acting
        actor.ready = ready
        self.back.release()
        actor.go.acquire()
        if actor.process in self.crashed:
            raise Crashed

    # Actors

    def program(self, actor):
        process = actor.process
        if process >= LATER:
            self.come(process)
        epochs, self.applied[process] = self.epochs[process], []
        number, turns = 0, 0
        if process >= LATER:
            result = epochs.join()
            self.joins.append((process, result))
            number = result.keys
        while number < self.keys:
            self.park(lambda: True)  # the work
            turns += 1
            if self.gives_up is not None and self.gives_up[0] == process and turns > self.gives_up[1]:
                epochs.give_up("out of memory")
            here, edge = (process, epochs.current.number, number), number % EDGE == 0
            dead = any(self.is_member(one, epochs.current) for one in self.crashed)
            asking = epochs.asking if edge else {}
            failed = self.random.random() < (0.5 if dead else self.fails) or bool(asking)
            failed = failed or (process in self.faulty and not epochs.ready)
            if not failed and not epochs.ready:
                self.get_state(process, number)
            if not failed:
                self.said.add(here)
                if epochs.done(f"key {number}"):
                    self.true.add(here)
                    absent = [
                        one
                        for one in self.epochs
                        if self.is_member(one, epochs.current) and (one, *here[1:]) not in self.said
                    ]
                    if absent:
                        self.faults.append(f"{here} is done by all, and ranks {absent} have not said so")
                    self.applied[process].append(number)
                    number += 1
                    continue
            result = epochs.vote(f"key {number}", "it failed" if failed else "", edge=edge, asking=asking)
            if asking and not result.dead and not result.joined:
                self.faults.append(f"{here} was skipped for the new processes {asking}, and the result admits none")
            self.results.append((*here, epochs.ready, result))
            if process % LATER in result.retired:
                self.ends[process] = "retired"
                return
            if result.committed:
                self.applied[process].append(number)
                number += 1
        self.ends[process] = "finished"

    def come(self, process):
        """The start of a later process of a rank."""

        def due():
            over = all(one in self.ends or one in self.crashed for one in range(self.ranks))
            gone = process - LATER in self.crashed or self.ends.get(process - LATER) in ("fenced", "retired")
            return gone or over or self.random.random() < self.early

        self.park(due)
        self.make(process)

    def get_state(self, process, number):
        """From a member that has it, which may die meanwhile."""
        epochs = self.epochs[process]
        epoch, self.applied[process] = epochs.current, list(range(number))
        if not set(epoch.members) - set(epoch.joining):
            self.faults.append(f"{process} finds the state of the job on no member of {epoch}")
        self.park(lambda: True)
        epochs.ready = True

    def is_member(self, process, epoch):
        epochs = self.epochs.get(process)
        return epochs is not None and epoch.has(process % LATER, epochs.incarnation)

    def run_program(self, actor):
        try:
            self.program(actor)
        except FencedError as error:
            self.ends[actor.process] = "fenced"
            if actor.process in self.epochs:
                self.epochs[actor.process].give_up(str(error))  # as a script does that ends by an error
        except JobFailedError as error:
            self.ends[actor.process] = f"failed: {error}"

    def run_heartbeat(self, actor):
        process = actor.process
        self.park(lambda: process in self.epochs or process in self.ends)
        heartbeat = self.epochs[process]._heartbeat if process in self.epochs else None
        while heartbeat is not None:
            heartbeat.send(self.clock)
            heartbeat.look()
            for dead in sorted(self.crashed):
                epoch = heartbeat.epoch
                if self.is_member(dead, epoch) and self.random.random() < self.told:
                    self.park(lambda: True)  # the news may be late
                    heartbeat.lost(dead % LATER, "its connection closed", epoch)
            if self.scheduling and self.random.random() < self.accuse:
                other = self.random.randrange(self.ranks)
                self.accused.add(other)
                heartbeat.lost(other, "a mistake")
            late = 0.9 if self.ends.get(process) == "fenced" and self.crashed else 0.0
            if process in self.ends and self.random.random() >= late:  # as `Epochs.close` does
                heartbeat.stored.heartbeats(process % LATER, heartbeat.incarnation, LEFT)
                return
            self.sleep(heartbeat.interval)

    def make(self, process):
        epochs = Epochs(
            Store(self),
            rank=process % LATER,
            ranks=range(self.ranks),
            heartbeat=1.0,
            deadline=self.deadline if process < LATER else self.patience,
            retire=self.retire,
            on_alarm=lambda text: self.alarms.append((process, text)),
        )
        self.epochs[process] = epochs

    # The scheduler

    def run(self):
        """Run all ranks to their ends, or raise."""
        clocked = module, heartbeat_module
        saved = module.BoundedCalls, module._started
        module.BoundedCalls, module._started = DirectCalls, lambda _: (threading.Event(), threading.current_thread())
        for each in clocked:
            each.time = self
        try:
            for rank in range(self.ranks):
                self.make(rank)
            self._run()
        finally:
            self.scheduling = False
            for epochs in self.epochs.values():
                epochs.close()
            module.BoundedCalls, module._started = saved
            for each in clocked:
                each.time = time

    def _run(self):
        bodies = (self.run_program, self.run_heartbeat)
        actors = [Actor(one, body) for one in (*range(self.ranks), *self.comers) for body in bodies]
        threads = [threading.Thread(target=self._act, args=(actor,), daemon=True) for actor in actors]
        self.scheduling = True
        for actor, thread in zip(actors, threads, strict=True):
            self.acting = actor
            thread.start()
            self.back.acquire()
        programs = actors[::2]
        try:
            # A schedule by priorities that change at random turns finds rare orders sooner than one by coins
            # (Burckhardt et al. 2010).
            weights = {actor: self.random.random() for actor in actors}
            coins, turn = self.random.random() < 0.5, 0
            while not all(actor.ended for actor in programs):
                able = [
                    actor for actor in actors if not actor.ended and (actor.process in self.crashed or actor.ready())
                ]
                if not able or turn > self.chaos + self.fair:
                    waiting = [actor.process for actor in programs if not actor.ended]
                    raise WaitsForeverError(f"ranks {waiting} wait; {self.values}")
                if turn >= self.chaos:
                    actor = able[turn % len(able)]
                elif coins:
                    actor = self.random.choice(able)
                else:
                    actor = max(able, key=weights.__getitem__)
                    if self.random.random() < 0.15:
                        weights[actor] = self.random.random() - 1
                self._turn(actor)
                turn += 1
        finally:
            self.crashed.update([*range(self.ranks), *self.comers])
            for actor in actors:
                while not actor.ended:
                    self._turn(actor)
        for actor in actors:
            if actor.error is not None and not isinstance(actor.error, Crashed):
                raise actor.error

    def _turn(self, actor):
        self.acting = actor
        actor.go.release()
        self.back.acquire()

    def _act(self, actor):
        try:
            self.park(lambda: True)
            actor.body(actor)
        except BaseException as error:  # noqa: BLE001 -- raised again by the scheduler
            actor.error = error
        actor.ended = True
        self.back.release()

    # What must hold

    def check(self):
        """Agreement, commitment and progress."""
        assert not self.faults, self.faults
        by_epoch, acting = {}, {}
        for process, epoch, number, ready, result in self.results:
            seen = result.epoch, result.dead, result.retired, result.keys, result.joined
            assert by_epoch.setdefault(epoch, seen) == seen, f"{process} left epoch {epoch} with another result"
            rank = process % LATER
            assert rank not in result.dead
            if self.is_member(process, result.epoch):
                assert (rank in result.epoch.joining) == (not ready), (process, result)
            if result.keys > number:  # committed: every process that goes on has done it
                going_on = [one for one in self.epochs if self.is_member(one, result.epoch)]
                old = [one for one in going_on if one % LATER not in result.joined]
                assert all((one, epoch, number) in self.said for one in old), (epoch, number)
            assert not result.joined or result.keys % EDGE == 0
        for process, result in self.joins:
            if result.epoch.number - 1 in by_epoch:
                assert by_epoch[result.epoch.number - 1][3:] == (result.keys, result.joined)
            assert self.is_member(process, result.epoch)
        for process, epoch, *_ in (*self.said, *self.true, *self.results):
            one = acting.setdefault((process % LATER, epoch), process)
            assert one == process, f"processes {one} and {process} are both in epoch {epoch}"
        for process, epoch, number in self.true:
            if epoch in by_epoch:
                assert by_epoch[epoch][3] > number, f"{process} saw key {number} of epoch {epoch} done; it is redone"
        for process, end in self.ends.items():
            applied = self.applied.get(process, [])
            if end == "finished":
                assert applied == list(range(self.keys))
            assert applied == list(range(len(applied)))
