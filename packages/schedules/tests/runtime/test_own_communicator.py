"""A communicator that somebody writes after the documentation: every position in a thread, messages through futures."""

from __future__ import annotations

import traceback
from functools import partial

import pytest
import torch

from autograd_kit.gradients import assert_same_gradients
from pipegrid.plans.generators.registry import SCHEDULES
from pipegrid.schedules import (
    PipelineConfig,
    PipelineError,
    get_forward_backward_func,
    lower,
    one_f_one_b,
)
from pipegrid.transport import Communicator, JobTopology, P2PPeerError, Verbs

from ..kit.models import Part, call, in_one_process, microbatch
from ..kit.stages import differentiate, raising, stages_of
from ..kit.threads import SENT, Network, copied, in_threads


class InThreads(Communicator):
    """One position of a chain in this process; the lanes of ``network`` are common to all of them."""

    def __init__(self, network, total_stages, current_stage, deadline=20.0):
        self.network, self.rank, self.deadline = network, current_stage, deadline
        self._job = JobTopology(total_stages=total_stages, current_stage=current_stage)

    @property
    def job(self):
        return self._job

    def port(self, edge, direction):
        lane = self.network.lane(edge, direction)

        def isend(payload):
            lane.put(copied(payload))
            return SENT

        return Verbs(isend, partial(lane.receive, self.deadline))

    def abort(self, reason):
        self.network.end(P2PPeerError(reason))


def stages(plan, **options):
    parts = [Part(number) for number in range(plan.num_stages)]
    return stages_of(plan.graph, parts, data=microbatch, loss=lambda output, _: output.square().mean(), **options)


def failure(runtime):
    """What a step of it raises."""
    with pytest.raises(PipelineError) as found:
        runtime.step()
    return found.value


@pytest.mark.parametrize("name", [name for name, known in SCHEDULES.items() if known.trains])
def test_every_named_schedule_has_the_gradients_of_one_process(name):
    plan = lower(SCHEDULES[name].plan(3, 6))
    every = stages(plan)
    Network(InThreads).run(plan, every)
    expected = differentiate(plan, stages(plan))
    assert_same_gradients([stage.model for stage in every], [stage.model for stage in expected])


def test_the_failure_of_a_stage_is_known_to_all_positions():
    plan = lower(one_f_one_b(3, 4))
    every = stages(plan)
    every[1] = stages(plan, before=raising(RuntimeError("injected failure 4711")))[1]
    runtimes = Network(InThreads).runtimes(plan, every)
    first, failing, last = in_threads([partial(failure, runtime) for runtime in runtimes])
    assert "stage 1, microbatch 1: RuntimeError: injected failure 4711" in str(failing)
    for other in (first, last):
        assert isinstance(other.__cause__, P2PPeerError)
        assert "injected failure 4711" in str(other)


def test_a_message_that_never_comes_is_a_timeout_with_its_place_in_the_plan():
    plan = lower(one_f_one_b(2, 2))
    alone = failure(Network(partial(InThreads, deadline=0.5)).runtimes(plan, stages(plan))[1])
    assert isinstance(alone.__cause__, TimeoutError)
    assert "rank 1, stage 1, microbatch 0" in str(alone)
    assert "at position 1, step 2 of 7: 1F0" in str(alone)


def test_the_runtime_calls_the_port_itself():
    plan = lower(one_f_one_b(2, 2))
    seen = []

    class Watched(InThreads):
        def port(self, edge, direction):
            port = super().port(edge, direction)

            def isend(payload):
                seen.append([frame.name for frame in traceback.extract_stack()])
                return port.isend(payload)

            return Verbs(isend, port.irecv)

    Network(Watched).run(plan, stages(plan))
    assert seen
    for frames in seen:
        assert frames[frames.index("step") :] == ["step", "_run", "send", "isend"]


def test_a_step_function_takes_it():
    models = [Part(number, PipelineConfig(pipeline_dtype=torch.float64)) for number in range(2)]
    Network(InThreads).calls(partial(call, get_forward_backward_func(2)), models)
    expected = [Part(number) for number in range(2)]
    in_one_process(expected, map(microbatch, range(4)), 4)
    assert_same_gradients(models, expected)
