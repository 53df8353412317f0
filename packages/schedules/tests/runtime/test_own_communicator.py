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
from torch import nn
from torch.utils._pytree import tree_map

from pipegrid.schedules import (
    Forwarded,
    PipelineConfig,
    PipelineError,
    PipelineRuntime,
    get_forward_backward_func,
    lower,
    one_f_one_b,
)
from pipegrid.schedules.generators.registry import SCHEDULES
from pipegrid.transport import Communicator, Direction, JobTopology, P2PPeerError, Verbs


@define
class Sent:
    """A message that is in its future is sent."""

    def wait(self, timeout=None):
        del timeout

    def is_completed(self):
        return True


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
            message = way.message(way.sends)
            if not message.done():
                message.set_result(tree_map(fresh, payload))
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


class Stage:
    """A linear layer; the first stage reads a microbatch, the last one has the loss."""

    def __init__(self, plan, number, before=lambda microbatch: None):
        torch.manual_seed(number)
        self.model, self.before = nn.Linear(4, 4, dtype=torch.float64), before
        self.out = [edge for edge in plan.graph.stage_edges if edge.source == number]

    def forward(self, microbatch, inputs):
        self.before(microbatch)
        x = sum(inputs.values()) if inputs else torch.full((2, 4), 0.1 * microbatch, dtype=torch.float64)
        y = torch.tanh(self.model(x))
        return Forwarded(dict.fromkeys(self.out, y)) if self.out else Forwarded({}, y.square().mean())


def runtimes(plan, communicators, before=lambda microbatch: None):
    """The runtime of each position, and the stages of all."""
    stages = [Stage(plan, number, before) for number in range(plan.num_stages)]
    held = [{stage: stages[stage] for stage in own} for own in plan.stages_at]
    return [PipelineRuntime(plan, *one) for one in zip(held, communicators, strict=True)], stages


@pytest.mark.parametrize("name", [name for name, known in SCHEDULES.items() if known.trains])
def test_every_named_schedule_has_the_gradients_of_one_process(name, in_threads):
    plan = lower(SCHEDULES[name].plan(3, 6))
    made, stages = runtimes(plan, open_all(plan))
    in_threads([runtime.step for runtime in made])
    whole = [Stage(plan, number) for number in range(plan.num_stages)]
    for microbatch in range(6):
        forwarded = whole[0].forward(microbatch, {})
        for stage in whole[1:]:
            forwarded = stage.forward(microbatch, forwarded.outputs)
        forwarded.loss.backward()
    for stage, expected in zip(stages, whole, strict=True):
        torch.testing.assert_close(stage.model.weight.grad, expected.model.weight.grad, rtol=1e-12, atol=1e-15)


def outcomes(calls, in_threads):
    """What each call raises, side by side."""

    def caught(call):
        try:
            call()
        except PipelineError as error:
            return error
        return None

    return in_threads([partial(caught, call) for call in calls])


def test_the_failure_of_a_stage_is_known_to_all_positions(in_threads):
    plan = lower(one_f_one_b(3, 4))
    made, stages = runtimes(plan, open_all(plan))

    def fail(microbatch):
        if microbatch == 1:
            raise RuntimeError("injected failure 4711")

    stages[1].before = fail
    first, failing, last = outcomes([runtime.step for runtime in made], in_threads)
    assert "stage 1, microbatch 1: RuntimeError: injected failure 4711" in str(failing)
    for other in (first, last):
        assert isinstance(other.__cause__, P2PPeerError)
        assert "injected failure 4711" in str(other)


def test_a_message_that_never_comes_is_a_timeout_with_its_place_in_the_plan(in_threads):
    plan = lower(one_f_one_b(2, 2))
    made, _ = runtimes(plan, open_all(plan, deadline=0.5))
    (alone,) = outcomes([partial(made[1].step)], in_threads)
    assert isinstance(alone.__cause__, TimeoutError)
    assert "rank 1, stage 1, microbatch 0" in str(alone)
    assert "at position 1, step 2 of 7: 1F0" in str(alone)


def test_the_runtime_calls_the_port_itself(in_threads):
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
    made, _ = runtimes(plan, communicators)
    in_threads([runtime.step for runtime in made])
    assert seen
    for frames in seen:
        assert frames[frames.index("step") :] == ["step", "_run", "send", "isend"]


def test_a_step_function_takes_it(in_threads):
    plan = lower(one_f_one_b(2, 4))
    models = [Stage(plan, number).model for number in range(2)]

    class Part(nn.Module):
        config = PipelineConfig(pipeline_dtype=torch.float64)

        def __init__(self, layer):
            super().__init__()
            self.layer, self.received = layer, None

        def set_input_tensor(self, received):
            self.received = received[0] if isinstance(received, list) else received

        def forward(self, x):
            return torch.tanh(self.layer(x if self.received is None else self.received))

    def forward_step(batches, model):
        return model(next(batches)), lambda output: (output.square().mean(), {})

    def train(communicator, model):
        batches = iter([torch.full((2, 4), 0.1 * number, dtype=torch.float64) for number in range(4)])
        return get_forward_backward_func(communicator.job.total_stages)(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=Part(model),
            num_microbatches=4,
            seq_length=2,
            micro_batch_size=1,
            forward_only=False,
            p2p_communicator=communicator,
        )

    pairs = zip(open_all(plan), models, strict=True)
    in_threads([partial(train, communicator, model) for communicator, model in pairs])
    whole = [Stage(plan, number).model for number in range(2)]
    for number in range(4):
        x = torch.full((2, 4), 0.1 * number, dtype=torch.float64)
        (torch.tanh(whole[1](torch.tanh(whole[0](x)))).square().mean() / 4).backward()
    for model, expected in zip(models, whole, strict=True):
        torch.testing.assert_close(model.weight.grad, expected.weight.grad, rtol=1e-12, atol=1e-15)
