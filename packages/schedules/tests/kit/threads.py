"""A pipeline in one process: every position in a thread, messages through queues; and a stage with one weight."""

from __future__ import annotations

import contextlib
import queue
import threading
from functools import partial

import torch
from attrs import define, field

from pipegrid.schedules.plan.plan import Plan
from pipegrid.schedules.runtime import Forwarded, PipelineRuntime
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
    """All lanes of a pipeline, each first in, first out; ``kind`` is the class of its ends."""

    kind: type = field(factory=lambda: MemoryCommunicator)
    lanes: dict[tuple[Edge, Direction], queue.Queue] = field(factory=dict)
    messages: int = 0
    lock: threading.Lock = field(factory=threading.Lock)

    def lane(self, edge, direction):
        with self.lock:
            return self.lanes.setdefault((edge, direction), queue.Queue())

    def communicator(self, total_stages, current_stage, *graph):
        """The end of one position of a chain; with a graph of modules and its stages of one of that graph."""
        return self.kind(self, total_stages, current_stage, *graph)

    def calls(self, function, models, **options):
        """What ``function`` returns on each rank of a chain, with ``model`` of that rank and a communicator."""
        count = len(models)
        return in_threads(
            [
                partial(function, model=model, p2p_communicator=self.communicator(count, rank), **options)
                for rank, model in enumerate(models)
            ]
        )

    def runtimes(self, plan, stages, *, hooks=None, **options):
        """One for each position, with ``hooks`` by position."""
        return [
            PipelineRuntime(
                plan,
                {stage: stages[stage] for stage in held},
                self.communicator(plan.num_stages, position),
                hooks=hooks[position] if hooks else (),
                **options,
            )
            for position, held in enumerate(plan.stages_at)
        ]

    def run(self, plan, stages, verb="step", **options):
        """The runtimes, after ``verb`` of each."""
        made = self.runtimes(plan, stages, **options)
        in_threads([getattr(runtime, verb) for runtime in made])
        return made


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


@define
class Scale:
    """A stage with one weight: the sum of what arrives (or the microbatch's number), times the weight.

    ``before`` is called first in each forward.
    """

    plan: Plan
    stage: int
    before: object = lambda microbatch: None
    weight: torch.Tensor = field()
    losses: list[float] = field(factory=list)

    @weight.default
    def _weight(self):
        return torch.tensor(0.5 + self.stage, dtype=torch.float64, requires_grad=True)

    def forward(self, microbatch, inputs):
        self.before(microbatch)
        x = sum(inputs.values()) if inputs else torch.full((2,), 1.0 + microbatch, dtype=torch.float64)
        y = x * self.weight
        outgoing = [edge for edge in self.plan.graph.stage_edges if edge.source == self.stage]
        if outgoing:
            return Forwarded(dict.fromkeys(outgoing, y))
        self.losses.append(y.sum().item())
        return Forwarded({}, y.sum())


def raising(error, at=1):
    """Something to do before forwards: raise, in that of one microbatch."""

    def before(microbatch):
        if microbatch == at:
            raise error

    return before


def scales(plan):
    return [Scale(plan, stage) for stage in range(plan.num_stages)]
