"""Pairs of a forward and a backward on ranks: one after the other, by a function of the user, or taking turns."""

from __future__ import annotations

import contextlib
import contextvars
import threading

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from pipegrid.core.errors import StepArgumentError
from pipegrid.plans.generators import dualpipe_v, interleaved_1f1b, zero_bubble_v
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan import ActionKind, Actor, from_text
from pipegrid.plans.plan.parts import is_pair
from pipegrid.schedules.runtime import (
    Forwarded,
    PipelineError,
    PipelineRuntime,
    ProfilerRanges,
    TakeTurns,
    UnitTimes,
    exchange_tokens,
    hand_over,
)
from pipegrid.timeline import Recorder, Recording, recorded_costs

from ..kit.stages import Function, expected_gradients, scales
from ..kit.threads import in_threads

K = ActionKind
MADE = {
    "interleaved_1f1b": lambda: interleaved_1f1b(3, 7, overlap=True),
    "three chunks": lambda: interleaved_1f1b(2, 5, num_chunks=3, overlap=True),
    "1f1b": lambda: interleaved_1f1b(3, 6, num_chunks=1, overlap=True),
    "dualpipe_v": lambda: dualpipe_v(3, 8, overlap=True),
    "zero_bubble_v": lambda: zero_bubble_v(3, 7, overlap=True),
}
ALONE = from_text("0: 0F0 (0F1;0B0) (0F2;0B1) 0B2")
"""One stage, two pairs."""


def in_turn(pair, forward, backward):
    forward()
    backward()


def backward_first(pair, forward, backward):
    backward()
    forward()


class Step(torch.autograd.Function):
    """Passes its input on, with a point in the forward and one in the backward."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.point = name
        hand_over(name)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        hand_over(ctx.point)
        return gradient.clone(), None


class Layers(Function):
    """Three layers of one weight each, with a point after each; notes what runs."""

    def __init__(self, plan, stage, seen=None):
        super().__init__(plan.graph, stage, self.compute)
        self.weights = [torch.tensor(0.9 + 0.1 * n, dtype=torch.float64, requires_grad=True) for n in range(3)]
        self.seen = [] if seen is None else seen

    def compute(self, microbatch, *arrived):
        x = arrived[0] if arrived else torch.full((2,), 1.0 + microbatch, dtype=torch.float64)
        for number, weight in enumerate(self.weights):
            self.seen.append(f"F{microbatch} layer {number}")
            x = Step.apply(x * weight, f"point {number}")
            x.register_hook(lambda gradient, number=number: self.seen.append(f"B{microbatch} layer {number}"))
        return x if self.outgoing else x.sum()


@pytest.mark.parametrize("function", [None, in_turn, backward_first, "turns"])
@pytest.mark.parametrize("name", MADE)
def test_gradients_are_those_without_a_pipeline(name, function, network):
    plan = lower(MADE[name]())
    stages = scales(plan)
    runtimes = network.runtimes(plan, stages)
    for runtime in runtimes:
        if function is not None:
            runtime.register(K.F_B, TakeTurns() if function == "turns" else function)
    for _ in range(2):
        for stage in stages:
            stage.weight.grad = None
        in_threads([runtime.step for runtime in runtimes])
    for stage, expected in zip(stages, expected_gradients(plan), strict=True):
        assert torch.allclose(stage.weight.grad, expected, rtol=1e-14)


@pytest.mark.parametrize("name", MADE)
def test_a_function_for_pairs_sees_each_of_them_and_those_of_their_kinds_run_inside(name, network):
    plan = lower(MADE[name]())
    runtimes = network.runtimes(plan, scales(plan))
    seen = [[] for _ in runtimes]
    for mine, runtime in zip(seen, runtimes, strict=True):

        def both(pair, forward, backward, mine=mine):
            mine.append(pair)
            backward()
            forward()

        def one(action, run, mine=mine):
            mine.append(action)
            run()

        runtime.register(K.F_B, both)
        for kind in (K.F, K.B, K.I):
            runtime.register(kind, one)
    in_threads([runtime.step for runtime in runtimes])
    for mine, steps in zip(seen, plan.positions, strict=True):
        expected = []
        for step in steps:
            if is_pair(step):
                expected += [step, step[1], step[0]]
            elif not isinstance(step, tuple) and step.kind in (K.F, K.B, K.I):
                expected.append(step)
        assert mine == expected
        assert any(isinstance(one, tuple) for one in mine)


def test_inputs_of_both_have_arrived_when_the_function_is_called(network):
    plan = lower(dualpipe_v(2, 4, overlap=True))
    runtimes = network.runtimes(plan, scales(plan))
    bound, arrived = runtimes[0]._bound, []

    def look(pair, forward, backward):
        queues = [*bound.runner(pair[0]).arriving, *bound.runner(pair[1]).gradients_in]
        pieces = [pair[0].microbatch] * len(bound.runner(pair[0]).arriving)
        pieces += [pair[1].microbatch] * len(bound.runner(pair[1]).gradients_in)
        arrived.extend(piece in queue._arrived for queue, piece in zip(queues, pieces, strict=True) if not queue.local)
        in_turn(pair, forward, backward)

    runtimes[0].register(K.F_B, look)
    in_threads([runtime.step for runtime in runtimes])
    assert arrived
    assert all(arrived)


def test_evaluations_run_the_forwards_of_pairs(network):
    plan = lower(dualpipe_v(2, 4, overlap=True))
    stages = scales(plan)
    runtimes = network.runtimes(plan, stages)
    for runtime in runtimes:
        runtime.register(K.F_B, TakeTurns())
    in_threads([runtime.eval for runtime in runtimes])
    assert len(stages[-1].losses) == 4


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda pair, forward, backward: forward(), r"forward\(\) 1 times and backward\(\) 0 times at \(0F1;0B0\)"),
        (lambda pair, forward, backward: [backward(), backward(), forward()], r"backward\(\) 2 times"),
        (lambda pair, forward, backward: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_function_for_pairs_calls_each_half_once(function, said):
    runtime = PipelineRuntime(lower(ALONE), {0: scales(ALONE)[0]}, None)
    runtime.register("F_B", function)
    with pytest.raises(PipelineError, match=said):
        runtime.step()


def test_halves_hand_over_at_each_point_the_backward_first():
    stage = Layers(ALONE, 0)
    runtime = PipelineRuntime(lower(ALONE), {0: stage}, None)
    runtime.register(K.F_B, TakeTurns())
    runtime.step()
    first = stage.seen.index("B0 layer 2")
    assert stage.seen[first : first + 6] == [
        *("B0 layer 2", "F1 layer 0", "B0 layer 1", "F1 layer 1", "B0 layer 0", "F1 layer 2"),
    ]
    want = Layers(ALONE, 0)
    for microbatch in range(3):
        want.compute(microbatch).backward()
    assert [w.grad for w in stage.weights] == [w.grad for w in want.weights]


def test_pairs_of_several_pipelines_in_one_process_take_turns_apart(network):
    plan = lower(dualpipe_v(3, 8, overlap=True))
    stages = [Layers(plan, number) for number in range(plan.num_stages)]
    runtimes = network.runtimes(plan, stages)
    for runtime in runtimes:
        runtime.register(K.F_B, TakeTurns())
    in_threads([runtime.step for runtime in runtimes])
    want = [Layers(plan, number) for number in range(plan.num_stages)]
    for microbatch in range(8):
        x = want[0].compute(microbatch)
        for stage in want[1:]:
            x = stage.compute(microbatch, x)
        x.backward()
    for mine, theirs in zip(stages, want, strict=True):
        assert all(
            torch.allclose(a.grad, b.grad, rtol=1e-14) for a, b in zip(mine.weights, theirs.weights, strict=True)
        )


@pytest.mark.parametrize("half", ["F1", "B0"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_half_that_fails_ends_the_other_at_its_next_point(half, layer):
    class Failing(Layers):
        def compute(self, microbatch, *arrived):
            class Seen(list):
                def append(self, text):
                    super().append(text)
                    if text == f"{half} layer {layer}":
                        raise ArithmeticError(text)

            if not isinstance(self.seen, Seen):
                self.seen = Seen()
            return super().compute(microbatch, *arrived)

    runtime = PipelineRuntime(lower(ALONE), {0: Failing(ALONE, 0)}, None)
    runtime.register(K.F_B, TakeTurns())
    with pytest.raises(PipelineError, match=f"ArithmeticError: {half} layer {layer}"):
        runtime.step()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pipegrid-pair") and _busy(thread)]


def _busy(thread):
    """Whether a helping thread is inside of a pair."""
    from pipegrid.schedules.runtime import turns

    return thread.ident in turns._here


def test_random_numbers_of_a_recomputed_backward_are_those_of_its_forward():
    """A checkpoint sets the generator back while it recomputes, and the forward that runs meanwhile draws from it."""
    masks = {}

    class Dropping(Function):
        def __init__(self, plan):
            super().__init__(plan.graph, 0, self.compute)
            self.weight = torch.ones(4, dtype=torch.float64, requires_grad=True)

        def compute(self, microbatch):
            def dropped(weight, x):
                for part in range(2):
                    mask = torch.rand(4, dtype=torch.float64)
                    masks.setdefault((microbatch, part), []).append(mask)
                    x = Step.apply(x * mask * weight, "point")
                return x

            x = torch.full((4,), 1.0 + microbatch, dtype=torch.float64)
            return checkpoint(dropped, self.weight, x, use_reentrant=False).sum()

    def run(function):
        masks.clear()
        torch.manual_seed(0)
        stage = Dropping(ALONE)
        runtime = PipelineRuntime(lower(ALONE), {0: stage}, None)
        if function is not None:
            runtime.register(K.F_B, function)
        runtime.step()
        for key, (drawn, again) in masks.items():
            assert torch.equal(drawn, again), key
        firsts = [tuple(drawn.tolist()) for drawn, _ in masks.values()]
        assert len(set(firsts)) == 6, "no two parts draw the same numbers"
        return stage.weight.grad, torch.rand(1)

    (alone, after), (turns, later) = run(None), run(TakeTurns())
    assert torch.equal(alone, turns)
    assert torch.equal(after, later)


def test_a_backward_runs_in_the_state_of_the_step():
    mode = contextvars.ContextVar("mode", default="none")
    seen = set()

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.add((mode.get(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return gradient

    weight = torch.ones(2, requires_grad=True)
    stage = Function(ALONE.graph, 0, lambda microbatch: Looks.apply(weight).sum())
    runtime = PipelineRuntime(lower(ALONE), {0: stage}, None)
    runtime.register(K.F_B, TakeTurns())
    mode.set("mine")
    with torch.autocast("cpu", dtype=torch.float16):
        runtime.step()
    assert seen == {("mine", True, torch.float16)}


def test_hooks_see_a_pair_as_two_computes_that_overlap():
    plan = lower(ALONE)
    recorder, times = Recorder(), UnitTimes(Actor(0, 0), steps=1)
    runtime = PipelineRuntime(plan, {0: Layers(plan, 0)}, None, hooks=[recorder, times, ProfilerRanges()])
    runtime.register(K.F_B, TakeTurns(aside=recorder.aside))
    recorder.start()
    runtime.step()
    times.end_step()
    track = recorder.track(plan, rank=0, position=0)
    by_name = {str(action): track.actions[n] for n, action in enumerate(plan.actions(0))}
    assert by_name["0F1"].start < by_name["0B0"].end
    assert by_name["0B0"].start < by_name["0F1"].end
    assert [aside.name for aside in track.asides].count("point 1 of F") == 2
    assert [aside.name for aside in track.asides].count("point 1 of B") == 2
    assert times.seconds()[0] > 0
    costs = recorded_costs(Recording(plan, [track]))
    assert costs.F[0] == pytest.approx(by_name["0F0"].end - by_name["0F0"].start), "those of pairs are not counted"


def test_outside_of_a_pair_a_point_only_waits(process_group):
    class Waited:
        count = 0

        def wait(self):
            self.count += 1

    work = Waited()
    hand_over("dispatch", work)
    hand_over("dispatch")
    assert work.count == 1
    tokens = torch.arange(6.0).view(3, 2).requires_grad_()
    there = exchange_tokens(tokens, None, sends=[3], receives=[3], point="dispatch")
    (there * torch.tensor([[1.0, 2.0]])).sum().backward()
    assert torch.equal(there, tokens)
    assert torch.equal(tokens.grad, torch.tensor([[1.0, 2.0]]).expand(3, 2))


def test_a_stage_that_frees_its_own_parameters_is_not_interleaved(process_group):
    model = nn.Linear(2, 2)
    fully_shard(model)

    class Sharded:
        def __init__(self):
            self.model = model

        def forward(self, microbatch, inputs):
            return Forwarded({}, model(torch.ones(1, 2)).sum())

    runtime = PipelineRuntime(lower(ALONE), {0: Sharded()}, None)
    with pytest.raises(StepArgumentError, match=r"\(0F1;0B0\): stage 0 is sharded by fully_shard"):
        runtime.register(K.F_B, TakeTurns())
    runtime.step()


def test_a_context_without_synchronization_is_left_for_the_last_backward_alone():
    from pipegrid.schedules.megatron.no_sync import _Suspended

    inside, seen = [], []

    @contextlib.contextmanager
    def no_sync():
        inside.append(1)
        yield
        inside.pop()

    forward, backward = ALONE.positions[0][2]
    with contextlib.ExitStack() as outside:
        hook = _Suspended(no_sync, {backward}, outside)
        for call, action in ((hook.before, backward), (hook.before, forward), (hook.after, forward)):
            call(action)
            seen.append(len(inside))
        hook.after(backward)
    assert seen == [0, 0, 0]
