"""A communicator that somebody writes after the documentation: every position in a thread, messages through futures."""

from __future__ import annotations

import itertools
import threading
import traceback
from collections import defaultdict
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from attrs import define, field
from torch.utils._pytree import tree_map

from pipegrid.schedules import (
    PipelineConfig,
    PipelineError,
    PipelineRuntime,
    get_forward_backward_func,
    lower,
    one_f_one_b,
)
from pipegrid.schedules.generators.registry import SCHEDULES
from pipegrid.transport import Communicator, Direction, JobTopology, P2PPeerError, Verbs

from ..kit.gradients import assert_same_gradients
from ..kit.models import WIDTH, Part, call, forward_step, in_one_process
from ..kit.stages import differentiate, raising, stages_of
from ..kit.threads import Sent, in_threads


@define
class Receiving:
    """The future of one message."""

    message: Future
    deadline: float

    def wait(self, timeout=None):
        self.message.result(timeout or self.deadline)  # a TimeoutError past it

    def is_completed(self):
        return self.message.done()

    def result(self):
        self.wait()
        return self.message.result()


def fresh(value):
    return value.detach().clone().requires_grad_(value.is_floating_point()) if torch.is_tensor(value) else value


@define
class Way:
    """One direction of an edge: message n is that of the n-th send and of the n-th receive."""

    messages: defaultdict = field(factory=lambda: defaultdict(Future))
    sends: itertools.count = field(factory=itertools.count)
    receives: itertools.count = field(factory=itertools.count)
    lock: threading.Lock = field(factory=threading.Lock)

    def message(self, numbers):
        with self.lock:
            return self.messages[next(numbers)]

    def end(self, error):
        with self.lock:
            self.messages.default_factory = partial(failed, error)
            for message in self.messages.values():
                if not message.done():
                    message.set_exception(error)


def failed(error):
    message = Future()
    message.set_exception(error)
    return message


class InThreads(Communicator):
    """Positions of one process; ``ways`` is common to all of them."""

    def __init__(self, ways, place, job, deadline=20.0):
        self.ways, self.rank, self._job, self.deadline = ways, place, job, deadline

    @property
    def job(self):
        return self._job

    def port(self, edge, direction):
        way = self.ways[edge, direction]

        def isend(payload):
            message, copied = way.message(way.sends), tree_map(fresh, payload)
            with way.lock:  # `end` may come from another thread
                if not message.done():
                    message.set_result(copied)
            return Sent()

        return Verbs(isend, lambda: Receiving(way.message(way.receives), self.deadline))

    def abort(self, reason):
        for way in list(self.ways.values()):
            way.end(P2PPeerError(reason))


def open_all(plan, **options):
    """A communicator for each position."""
    ways = {(edge, d): Way() for edge in plan.graph.stage_edges for d in Direction}
    number = plan.num_positions
    return [InThreads(ways, p, JobTopology(total_stages=number, current_stage=p), **options) for p in range(number)]


def data(microbatch):
    return torch.full((2, WIDTH), 0.1 * microbatch, dtype=torch.float64)


def stages(plan, **options):
    parts = [Part(number) for number in range(plan.num_stages)]
    return stages_of(plan.graph, parts, data=data, loss=lambda output, _: output.square().mean(), **options)


def runtimes(plan, communicators, every):
    """That of each position."""
    held = [{stage: every[stage] for stage in own} for own in plan.stages_at]
    return [PipelineRuntime(plan, *one) for one in zip(held, communicators, strict=True)]


@pytest.mark.parametrize("name", [name for name, known in SCHEDULES.items() if known.trains])
def test_every_named_schedule_has_the_gradients_of_one_process(name):
    plan = lower(SCHEDULES[name].plan(3, 6))
    every = stages(plan)
    in_threads([runtime.step for runtime in runtimes(plan, open_all(plan), every)])
    expected = differentiate(plan, stages(plan))
    assert_same_gradients([stage.model for stage in every], [stage.model for stage in expected])


def outcomes(calls):
    """What each call raises, side by side."""

    def caught(call):
        try:
            call()
        except PipelineError as error:
            return error
        return None

    return in_threads([partial(caught, call) for call in calls])


def test_the_failure_of_a_stage_is_known_to_all_positions():
    plan = lower(one_f_one_b(3, 4))
    every = stages(plan)
    every[1] = stages(plan, before=raising(RuntimeError("injected failure 4711")))[1]
    made = runtimes(plan, open_all(plan), every)
    first, failing, last = outcomes([runtime.step for runtime in made])
    assert "stage 1, microbatch 1: RuntimeError: injected failure 4711" in str(failing)
    for other in (first, last):
        assert isinstance(other.__cause__, P2PPeerError)
        assert "injected failure 4711" in str(other)


def test_a_message_that_never_comes_is_a_timeout_with_its_place_in_the_plan():
    plan = lower(one_f_one_b(2, 2))
    made = runtimes(plan, open_all(plan, deadline=0.5), stages(plan))
    (alone,) = outcomes([made[1].step])
    assert isinstance(alone.__cause__, TimeoutError)
    assert "rank 1, stage 1, microbatch 0" in str(alone)
    assert "at position 1, step 2 of 7: 1F0" in str(alone)


def test_the_runtime_calls_the_port_itself():
    plan = lower(one_f_one_b(2, 2))
    communicators = open_all(plan)
    seen = []

    class Watched(InThreads):
        def port(self, edge, direction):
            port = super().port(edge, direction)

            def isend(payload):
                seen.append([frame.name for frame in traceback.extract_stack()])
                return port.isend(payload)

            return Verbs(isend, port.irecv)

    communicators = [Watched(one.ways, one.rank, one.job) for one in communicators]
    in_threads([runtime.step for runtime in runtimes(plan, communicators, stages(plan))])
    assert seen
    for frames in seen:
        assert frames[frames.index("step") :] == ["step", "_run", "send", "isend"]


def test_a_step_function_takes_it():
    plan = lower(one_f_one_b(2, 4))
    models = [Part(number, PipelineConfig(pipeline_dtype=torch.float64)) for number in range(2)]

    def train(communicator, model):
        return call(
            get_forward_backward_func(communicator.job.total_stages),
            model=model,
            forward_step_func=partial(forward_step, data=data),
            p2p_communicator=communicator,
        )

    in_threads(
        [partial(train, communicator, model) for communicator, model in zip(open_all(plan), models, strict=True)]
    )
    expected = [Part(number) for number in range(2)]
    in_one_process(expected, map(data, range(4)), 4)
    assert_same_gradients(models, expected)
