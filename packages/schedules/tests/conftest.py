"""A pipeline in one process: every position in a thread, messages through queues."""

from __future__ import annotations

import contextlib
import queue
import threading

import pytest
import torch
from attrs import define, field

from pipegrid.transport.edge import Direction, Edge

DEADLINE = 20.0


@define
class Sent:
    """A message in a queue is sent; there is nothing to wait for."""

    def wait(self, timeout=None):
        del timeout

    def is_completed(self):
        return True


@define
class Receiving:
    """Takes the next message of a lane, once."""

    lane: queue.Queue
    payload: object = None
    taken: bool = False

    def wait(self, timeout=None):
        if not self.taken:
            self.payload = self.lane.get(timeout=timeout or DEADLINE)
            self.taken = True

    def is_completed(self):
        return self.taken or not self.lane.empty()

    def result(self):
        self.wait()
        return self.payload


def copied(payload):
    """What a receiver gets: fresh tensors, requiring grad where they are floating-point."""
    if isinstance(payload, dict):
        return {key: copied(item) for key, item in payload.items()}
    if isinstance(payload, (list, tuple)):
        return type(payload)(map(copied, payload))
    if payload is None:
        return None
    return payload.clone().requires_grad_(payload.is_floating_point())


@define
class Network:
    """All lanes of a pipeline; each is first in, first out."""

    lanes: dict[tuple[Edge, Direction], queue.Queue] = field(factory=dict)
    messages: int = 0
    lock: threading.Lock = field(factory=threading.Lock)

    def lane(self, edge, direction):
        with self.lock:
            return self.lanes.setdefault((edge, direction), queue.Queue())


@define
class MemoryCommunicator:
    """One position's end of the network; with ``graph`` and ``stages`` it serves a graph of modules."""

    network: Network
    total_stages: int
    current_stage: int
    graph: object = None
    stages: tuple[int, ...] = ()
    virtual_pipeline_model_parallel_size: int | None = None

    def isend(self, payload, *, edge, direction):
        with self.network.lock:
            self.network.messages += 1
        self.network.lane(edge, direction).put(copied(payload))
        return Sent()

    def irecv(self, *, edge, direction, shapes=None):
        del shapes
        return Receiving(self.network.lane(edge, direction))

    def batch(self):
        return contextlib.nullcontext()


def in_threads(functions):
    """Run the functions side by side; their results in order, or the first failure."""
    results = [None] * len(functions)
    failures = []

    def call(index, function):
        try:
            results[index] = function()
        except Exception as error:  # noqa: BLE001 -- raised again below, in the test's thread
            failures.append(error)

    threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a position did not end"
    return results


@pytest.fixture
def network():
    return Network()


@pytest.fixture
def memory_communicator():
    return MemoryCommunicator


@pytest.fixture(name="in_threads")
def _in_threads():
    return in_threads


@pytest.fixture
def threads(network):
    """Runs all positions of a plan in this process; see `InThreads`."""
    from .kit.threads import InThreads

    return InThreads(network, MemoryCommunicator, in_threads)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
