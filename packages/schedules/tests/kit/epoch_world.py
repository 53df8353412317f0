"""Ranks that agree over a simulated store: one operation at a time, in any order, with a crash at any of them.

Each rank has two actors, its program and its heartbeat, in threads of which one runs at a time. An actor stops before
each operation of the store until the scheduler picks it. The ranks call the code itself; only the clock is the world's.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from attrs import define, field

from pipegrid.schedules.monitor import Epochs, FencedError, JobFailedError
from pipegrid.schedules.monitor.epochs import epochs as module
from pipegrid.schedules.monitor.epochs import pulse as pulse_module
from pipegrid.schedules.monitor.epochs.ledger import LEFT

SMALL_STEP = 0.04


class Crashed(BaseException):
    """The end of a process."""


class WaitsForeverError(AssertionError):
    """A rank was not at its end after many fair turns."""


@define(eq=False)
class Actor:
    rank: int
    body: Callable[[Actor], None]
    go: threading.Semaphore = field(factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] = bool
    ended: bool = False
    error: BaseException | None = None


class DirectCalls:
    """In place of `BoundedCalls`: the world bounds every call."""

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
        said: (rank, epoch, key number) before the call of done.
        true: the same, after a done that was True.
        verdicts: (rank, epoch that ended, number of the key voted on, verdict).
        applied: by rank, the numbers of the keys that were done or committed, in order.
        ends: by rank: "finished", "fenced", "failed".
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
    retire: Callable[[frozenset[int]], set[int]] = lambda _: set()
    fair: int = 20000
    values: dict[str, str] = field(factory=dict)
    clock: float = 0.0
    crashed: set[int] = field(factory=set)
    died: set[int] = field(factory=set)  # before the end of their program
    operations: dict[int, int] = field(factory=dict)
    acting: Actor | None = None
    scheduling: bool = False
    back: threading.Semaphore = field(factory=lambda: threading.Semaphore(0))
    epochs: dict[int, Epochs] = field(factory=dict)
    said: set[tuple[int, int, int]] = field(factory=set)
    true: set[tuple[int, int, int]] = field(factory=set)
    verdicts: list[tuple[int, int, int, object]] = field(factory=list)
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
        here = actor.rank, self.operations.get(actor.rank, 0)
        self.operations[actor.rank] = here[1] + 1
        crash = self.crashes.get(here)
        if crash == "before":
            self.crash(actor.rank)
        result = verb()
        if crash == "after":
            self.crash(actor.rank)
        return result

    def crash(self, rank):
        self.crashed.add(rank)
        if rank not in self.ends:
            self.died.add(rank)
        raise Crashed

    def park(self, ready):
        actor = self.acting
        actor.ready = ready
        self.back.release()
        actor.go.acquire()
        if actor.rank in self.crashed:
            raise Crashed

    # Actors

    def program(self, actor):
        rank, number, turns = actor.rank, 0, 0
        epochs, self.applied[rank] = self.epochs[rank], []
        while number < self.keys:
            self.park(lambda: True)  # the work
            turns += 1
            if self.gives_up is not None and self.gives_up[0] == rank and turns > self.gives_up[1]:
                epochs.give_up("out of memory")
            here = rank, epochs.current.number, number
            failed = self.random.random() < (0.5 if self.crashed & set(epochs.current.members) else self.fails)
            if not failed:
                self.said.add(here)
                if epochs.done(f"key {number}"):
                    self.true.add(here)
                    absent = [each for each in epochs.current.members if (each, *here[1:]) not in self.said]
                    if absent:
                        self.faults.append(f"{here} is done by all, and ranks {absent} have not said so")
                    self.applied[rank].append(number)
                    number += 1
                    continue
            verdict = epochs.vote(f"key {number}", "it failed" if failed else "")
            self.verdicts.append((*here, verdict))
            if rank in verdict.retired:
                self.ends[rank] = "retired"
                return
            if verdict.committed:
                self.applied[rank].append(number)
                number += 1
        self.ends[rank] = "finished"

    def run_program(self, actor):
        try:
            self.program(actor)
        except FencedError:
            self.ends[actor.rank] = "fenced"
        except JobFailedError as error:
            self.ends[actor.rank] = f"failed: {error}"

    def run_heartbeat(self, actor):
        rank, pulse = actor.rank, self.epochs[actor.rank]._pulse
        while True:
            pulse.beat(self.clock)
            pulse.look()
            for dead in sorted(self.crashed):
                if self.random.random() < self.told:
                    pulse.lost(dead, "its connection closed")
            if self.scheduling and self.random.random() < self.accuse:
                other = self.random.randrange(self.ranks)
                self.accused.add(other)
                pulse.lost(other, "a mistake")
            if rank in self.ends:  # as `Epochs.close` does
                pulse.ledger.beats(rank, LEFT)
                return
            self.sleep(pulse.interval)

    # The scheduler

    def run(self):
        """Run all ranks to their ends, or raise."""
        saved = module.time, pulse_module.time, module.BoundedCalls, module._started
        module.time = pulse_module.time = self
        module.BoundedCalls, module._started = DirectCalls, lambda _: (threading.Event(), threading.current_thread())
        try:
            for rank in range(self.ranks):
                self.epochs[rank] = Epochs(
                    Store(self),
                    rank=rank,
                    ranks=range(self.ranks),
                    heartbeat=1.0,
                    deadline=self.deadline,
                    retire=self.retire,
                    on_alarm=lambda text, rank=rank: self.alarms.append((rank, text)),
                )
            self._run()
        finally:
            self.scheduling = False
            for epochs in self.epochs.values():
                epochs.close()
            module.time, pulse_module.time, module.BoundedCalls, module._started = saved

    def _run(self):
        bodies = (self.run_program, self.run_heartbeat)
        actors = [Actor(rank, body) for rank in range(self.ranks) for body in bodies]
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
                able = [actor for actor in actors if not actor.ended and (actor.rank in self.crashed or actor.ready())]
                if not able or turn > self.chaos + self.fair:
                    waiting = [actor.rank for actor in programs if not actor.ended]
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
            self.crashed.update(range(self.ranks))
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
        by_epoch = {}
        for rank, epoch, number, verdict in self.verdicts:
            seen = verdict.epoch, verdict.dead, verdict.retired, verdict.keys
            assert by_epoch.setdefault(epoch, seen) == seen, f"rank {rank} left epoch {epoch} with another verdict"
            assert rank not in verdict.dead
            if verdict.keys > number:  # committed: everyone that goes on has done it
                assert all((each, epoch, number) in self.said for each in verdict.epoch.members), (epoch, number)
        for rank, epoch, number in self.true:
            if epoch in by_epoch:
                assert by_epoch[epoch][3] > number, f"rank {rank} saw key {number} of epoch {epoch} done; it is redone"
        for rank, end in self.ends.items():
            if end == "finished":
                assert self.applied[rank] == list(range(self.keys))
            assert self.applied[rank] == list(range(len(self.applied[rank])))
