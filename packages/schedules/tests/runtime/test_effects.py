"""Functions that are registered for a kind of action: around its effect, or in the place of a reduction."""

from __future__ import annotations

import pytest
import torch

from pipegrid.core.errors import StepArgumentError
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators import one_f_one_b, zero_bubble_h1
from pipegrid.plans.generators.registry import SCHEDULES
from pipegrid.plans.passes.lowering import lower, with_reduce
from pipegrid.plans.plan import ActionKind
from pipegrid.schedules.runtime import PipelineError, PipelineRuntime
from pipegrid.schedules.runtime.actions import EFFECTS

from ..kit.stages import expected_gradients, scales
from ..kit.threads import in_threads

K = ActionKind


def alone(plan, **options):
    stages = scales(plan)
    return stages, PipelineRuntime(plan, dict(enumerate(stages)), None, **options)


def test_every_kind_of_action_has_an_effect():
    assert set(EFFECTS) == set(ActionKind)


@pytest.mark.parametrize("name", [name for name, known in SCHEDULES.items() if known.trains and not known.sliced])
def test_a_registered_function_sees_every_action_of_its_kind_and_changes_nothing(name, network):
    plan = lower(SCHEDULES[name].plan(3, 4))
    stages = scales(plan)
    runtimes = network.runtimes(plan, stages)
    seen = [[] for _ in runtimes]
    for mine, runtime in zip(seen, runtimes, strict=True):

        def note(action, run, mine=mine):
            mine.append(action)
            run()

        for kind in ActionKind:
            runtime.register(kind, note)
    in_threads([runtime.step for runtime in runtimes])
    assert seen == [list(plan.actions(position)) for position in range(plan.num_positions)]
    for stage, expected in zip(stages, expected_gradients(plan), strict=True):
        assert torch.allclose(stage.weight.grad, expected, rtol=1e-14)


def test_inputs_have_arrived_when_a_registered_function_is_called(network):
    plan = lower(one_f_one_b(2, 3))
    runtimes = network.runtimes(plan, scales(plan))
    arrived = []
    (queue,) = (queue for queue in runtimes[1]._bound.receives.values())

    def look(action, run):
        arrived.append(queue._arrived.keys() >= {action.microbatch})
        run()

    runtimes[1].register(K.F, look)
    in_threads([runtime.step for runtime in runtimes])
    assert arrived == [True, True, True]


def test_a_later_function_is_called_around_an_earlier_one():
    plan = lower(one_f_one_b(1, 1))
    _, runtime = alone(plan)
    calls = []

    def named(name):
        def function(action, run):
            calls.append(f"{name} before {action}")
            run()
            calls.append(f"{name} after {action}")

        return function

    runtime.register(K.B, named("inner"))
    runtime.step()
    assert calls == ["inner before 0B0", "inner after 0B0"]
    calls.clear()
    runtime.register(K.B, named("outer"))
    runtime.step()
    assert calls == ["outer before 0B0", "inner before 0B0", "inner after 0B0", "outer after 0B0"]


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_reduction_may_be_left_out_or_repeated(times):
    plan = with_reduce(lower(one_f_one_b(1, 2)), {"tied": [0]})
    reduced = []
    _, runtime = alone(plan, reducers={"tied": lambda: reduced.append(1)})
    runtime.register(K.REDUCE, lambda action, run: [run() for _ in range(times)])
    runtime.step()
    assert len(reduced) == times


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("kind", [K.F, K.I, K.W])
def test_any_other_action_runs_once(kind, times):
    plan = lower(zero_bubble_h1(1, 2))
    _, runtime = alone(plan)
    runtime.register(kind, lambda action, run: [run() for _ in range(times)])
    with pytest.raises(PipelineError, match=rf"registered for {kind} called run\(\) {times} times at 0{kind}0"):
        runtime.step()


def test_an_error_of_a_registered_function_is_the_failure_of_the_step():
    _, runtime = alone(lower(one_f_one_b(1, 2)))

    def fail(action, run):
        raise ArithmeticError(str(action))

    runtime.register(K.B, fail)
    with pytest.raises(PipelineError, match=r"stage 0, microbatch 0: ArithmeticError: 0B0"):
        runtime.step()


def test_evaluations_call_it_too(network):
    plan = lower(one_f_one_b(2, 3))
    runtimes = network.runtimes(plan, scales(plan))
    seen = []

    def note(action, run):
        seen.append(str(action))
        run()

    runtimes[0].register(K.SEND_F, note)
    in_threads([runtime.eval for runtime in runtimes])
    assert seen == ["0SEND_F0>1", "0SEND_F1>1", "0SEND_F2>1"]


def test_what_cannot_be_registered():
    _, runtime = alone(lower(one_f_one_b(1, 1)))
    with pytest.raises(PlanError, match="SEND"):
        runtime.register("SEND", print)
    with pytest.raises(StepArgumentError, match="function"):
        runtime.register(K.F, 3)


def test_nothing_is_registered_inside_of_a_step():
    _, runtime = alone(lower(one_f_one_b(1, 1)))
    runtime.register(K.F, lambda action, run: runtime.register(K.B, print))
    with pytest.raises(PipelineError, match=r"register\(\) inside a step"):
        runtime.step()


def test_the_patience_of_a_first_step_is_kept():
    _, runtime = alone(lower(one_f_one_b(1, 1)))
    runtime.register(K.F, lambda action, run: run())
    assert runtime._cold == {True, False}
    runtime.step()
    assert runtime._cold == {False}
    runtime.register(K.F, lambda action, run: run())
    assert runtime._cold == {False}
