"""A pipeline in one process: every position in a thread, messages through futures."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import torch
from attrs import define, field
from torch.utils._pytree import tree_map_only

from monitor_kit.threads import DEADLINE, in_threads
from pipegrid.core.edge import Direction, Edge
from pipegrid.schedules.runtime import PipelineRuntime
from pipegrid.transport import Communicator, JobTopology

SENT = SimpleNamespace(wait=lambda timeout=None: None, is_completed=lambda: True)
"""The handle of a message in a queue: there is nothing to wait for."""


@define
class Receiving:
    """One message of a lane."""

    message: Future
    deadline: float = DEADLINE

    def wait(self, timeout=None):
        self.message.result(timeout or self.deadline)  # a TimeoutError past it

    def is_completed(self):
        return self.message.done()

    def result(self):
        return self.message.result(self.deadline)


@define
class Lane:
    """Message n is that of the n-th send and of the n-th receive, in whichever order receives are waited for."""

    sent: deque = field(factory=deque)  # and not yet received, or the other way round
    awaited: deque = field(factory=deque)
    error: Exception | None = None  # of a lane that was ended
    lock: threading.Lock = field(factory=threading.Lock)

    def _message(self, ours, theirs):
        if theirs:
            return theirs.popleft()
        ours.append(Future())
        if self.error is not None:
            ours[-1].set_exception(self.error)
        return ours[-1]

    def put(self, payload):
        with self.lock:
            if self.error is None:
                self._message(self.sent, self.awaited).set_result(payload)

    def receive(self, deadline=DEADLINE):
        with self.lock:
            return Receiving(self._message(self.awaited, self.sent), deadline)

    def end(self, error):
        """Fail every receive whose message is not sent by now."""
        with self.lock:
            if self.error is None:
                self.error = error
                for message in self.awaited:
                    message.set_exception(error)

    def empty(self):
        return not self.sent and not self.awaited


def copied(payload):
    """What a receiver gets: fresh tensors, requiring grad where they are floating-point."""
    return tree_map_only(torch.Tensor, lambda x: x.clone().requires_grad_(x.is_floating_point()), payload)


@define
class Network:
    """All lanes of a pipeline, each first in, first out; ``kind`` is the class of its ends."""

    kind: type = field(factory=lambda: MemoryCommunicator)
    lanes: dict[tuple[Edge, Direction], Lane] = field(factory=dict)
    messages: int = 0
    error: Exception | None = None
    lock: threading.Lock = field(factory=threading.Lock)

    def lane(self, edge, direction):
        with self.lock:
            return self.lanes.setdefault((edge, direction), Lane(error=self.error))

    def end(self, error):
        """End all lanes, those not yet opened as well."""
        with self.lock:
            self.error = error
            for lane in self.lanes.values():
                lane.end(error)

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


@define(eq=False)
class MemoryCommunicator(Communicator):
    """One position's end of the network; with ``graph`` and ``stages`` it serves a graph of modules."""

    network: Network
    total_stages: int
    current_stage: int
    graph: object = None
    stages: tuple[int, ...] = ()
    virtual_pipeline_model_parallel_size: int | None = None

    @property
    def job(self):
        return JobTopology(
            total_stages=self.total_stages,
            current_stage=self.current_stage,
            graph=self.graph,
            stages=self.stages,
            num_chunks=self.virtual_pipeline_model_parallel_size,
        )

    def isend(self, payload, *, edge, direction):
        with self.network.lock:
            self.network.messages += 1
        self.network.lane(edge, direction).put(copied(payload))
        return SENT

    def irecv(self, *, edge, direction, shapes=None):
        del shapes
        return self.network.lane(edge, direction).receive()

    def batch(self):
        return contextlib.nullcontext()
