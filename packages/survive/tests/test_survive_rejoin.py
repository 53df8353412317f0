"""Survivors, Epochs and the state together, in threads of one process: their connections are queues and barriers."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import nn

from pipegrid.survive import Survivors, handover

RANKS, STEPS = 3, 12
here = threading.local()  # rank


@frozen(eq=False)
class Peers:
    """A group in place of torch's."""

    world: Room
    members: tuple[int, ...]


@define(eq=False)
class Room:
    """The world of one epoch: what its ranks, which are threads, share."""

    number: int
    members: tuple[int, ...]
    barrier: threading.Barrier
    said: dict[int, torch.Tensor] = field(factory=dict)
    queues: dict[tuple[int, int], queue.Queue] = field(factory=dict)

    @property
    def peers(self):
        return Peers(self, self.members)

    def sum(self, value):
        self.said[here.rank] = value
        self.barrier.wait(20)
        total = torch.stack([self.said[rank] for rank in self.members]).sum(0)
        self.barrier.wait(20)
        return total

    def between(self, source, destination):
        return self.queues.setdefault((source, destination), queue.Queue())

    def abort(self, cause):
        self.barrier.abort()  # its waiters have a RuntimeError

    def close(self):
        pass


class Ring:
    """In place of `Neighbours`: deaths are heard of by silence."""

    def __init__(self, *_, **__):
        pass

    def close(self):
        pass


class Died(BaseException):
    """The end of a process."""


def send(wire, tensor):
    here.script.reach("send")
    wire.group.world.between(here.rank, wire.group.members[wire.other]).put(tensor.clone())


def receive(wire, shape, dtype):
    here.script.reach("receive")
    found = wire.group.world.between(wire.group.members[wire.other], here.rank)
    while True:
        try:
            tensor = found.get(timeout=0.05)
        except queue.Empty:
            if wire.group.world.barrier.broken:
                raise RuntimeError("Connection closed by peer") from None
        else:
            assert (tuple(tensor.shape), tensor.dtype) == (tuple(shape), dtype)
            return tensor


@define(eq=False)
class Script:
    """A training script; ``deaths``: by (rank, process) the step in which it dies, or the
    message of the state."""

    store: dist.Store
    deaths: dict[tuple[int, int], object]
    pool: ThreadPoolExecutor
    rooms: dict[int, Room] = field(factory=dict)
    lock: threading.Lock = field(factory=threading.Lock)
    results: dict[tuple[int, int], object] = field(factory=dict)
    futures: list = field(factory=list)
    dead: list = field(factory=list)

    def world(self, epoch):
        with self.lock:
            barrier = threading.Barrier(len(epoch.members))
            return self.rooms.setdefault(epoch.number, Room(epoch.number, epoch.members, barrier))

    def start(self, rank, process=0):
        self.futures.append(self.pool.submit(self.run, rank, process))

    def die(self, rank, process):
        """Without a word; the next process of the rank starts."""
        _, _, (_, stop, *_), _ = here.survivors.epochs._close.detach()
        stop.set()
        self.dead.append(here.survivors)
        self.start(rank, process + 1)

    def reach(self, place):
        here.counts[place] = here.counts.get(place, 0) + 1
        if self.deaths.get((here.rank, here.process)) == (place, here.counts[place]):
            self.die(here.rank, here.process)
            raise Died

    def run(self, rank, process):
        here.rank, here.process, here.script, here.counts = rank, process, self, {}
        with contextlib.suppress(Died):
            self.train(rank, process)

    def train(self, rank, process):
        model = made()
        if process:
            nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        survivors = Survivors(
            self.store,
            self.world,
            modules=model,
            state={"optimizer": optimizer},
            heartbeat=1.0,
            on_event=lambda _: None,
        )
        here.survivors = survivors
        survivors.__enter__()
        done = []
        for step in survivors.steps(range(STEPS)):
            if self.deaths.get((rank, process)) == step:  # without a word
                self.die(rank, process)
                return
            if step in (5, 9) and rank == survivors.epochs.current.members[0]:
                while len(survivors.epochs.current.members) < RANKS and not survivors.epochs.asking:
                    # A process whose thread has failed does not ask to come in: the wait would not end.
                    assert not any(one.done() and one.exception() for one in self.futures)
                    time.sleep(0.02)
            members = []

            def gradient(world, step=step, members=members):
                members[:] = world.members
                own = [part(step, n) for n in range(6) if world.members[n % len(world.members)] == rank]
                return world.sum(torch.stack(own).sum(0))

            model.weight.grad = survivors.run(f"step {step}", gradient)
            norm = survivors.run(f"norm {step}", lambda world: world.sum(torch.ones(())))
            assert norm <= RANKS
            optimizer.step()
            optimizer.zero_grad()
            done.append((step, tuple(members)))
        survivors.__exit__(None, None, None)
        self.results[rank, process] = model.weight.detach(), done


def part(step, number):
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + number))


def made():
    model = nn.Linear(3, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(part(STEPS, 0))
    return model


def alone():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        model.weight.grad = torch.stack([part(step, number) for number in range(6)]).sum(0)
        optimizer.step()
    return model.weight.detach()


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.setattr("pipegrid.survive.survivors.require_default_group", lambda: (here.rank, RANKS))
    monkeypatch.setattr("pipegrid.survive.survivors.require_no_watchdog", lambda: None)
    monkeypatch.setattr("pipegrid.survive.survivors.Neighbours", Ring)
    monkeypatch.setattr(dist, "get_rank", lambda *_: here.rank)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(group.members))
    monkeypatch.setattr(handover._Wire, "send", send)
    monkeypatch.setattr(handover._Wire, "receive", receive)


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param({(1, 0): 2}, marks=pytest.mark.nightly),
        pytest.param({(0, 0): 2, (0, 1): 7}, marks=pytest.mark.nightly),
        pytest.param({(0, 0): 1, (2, 0): 2}, marks=pytest.mark.nightly),
        {(0, 0): 2, (1, 0): ("send", 4)},
        {(2, 0): 2, (2, 1): ("receive", 4)},
    ],
    ids=["once", "the lowest, twice", "two", "the peer that sends", "as it receives"],
)
def test_new_processes_train_on_with_the_weights_of_an_undisturbed_run(threads, deaths):
    with ThreadPoolExecutor(RANKS + len(deaths)) as pool:
        script = Script(dist.HashStore(), deaths, pool)
        for rank in range(RANKS):
            script.start(rank)
        while len(done := [one for one in script.futures if one.done()]) < RANKS + len(deaths):
            for one in done:
                one.result()
            time.sleep(0.05)
    last = {rank: max(process for one, process in script.results if one == rank) for rank in range(RANKS)}
    assert last == {rank: sum(one == rank for one, _ in deaths) for rank in range(RANKS)}
    wanted = alone()
    for (rank, process), (weight, done) in script.results.items():
        torch.testing.assert_close(weight, wanted, rtol=0, atol=1e-12)
        steps = [step for step, _ in done]
        assert steps == list(range(steps[0], STEPS))
        assert (steps[0] == 0) == (process == 0), (rank, process)
        assert done[-1][1] == tuple(range(RANKS))
