"""The runtime does what the plan says: hooks see it, recordings draw it, stages that do not fit are refused."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from attrs import define, evolve

from pipegrid.core.edge import Edge
from pipegrid.core.errors import StepArgumentError
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.generators import gpipe, interleaved_1f1b, multi_module_1f1b, one_f_one_b, zero_bubble_h1
from pipegrid.plans.generators.registry import SCHEDULES
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan.actions import parse_action
from pipegrid.plans.simulate.costs import Costs
from pipegrid.plans.verify import verify
from pipegrid.schedules.runtime import Forwarded, PipelineError, PipelineRuntime, ProfilerRanges
from pipegrid.search import greedy
from pipegrid.timeline.recorder import Recorder
from pipegrid.timeline.recording import Recording
from pipegrid.timeline.sources import timeline
from pipegrid.timeline.timeline import TimelineError
from pipegrid.transport import streams

from ..kit.of_job import OfJob
from ..kit.stages import Scale, expected_gradients, raising, scales
from ..kit.threads import MemoryCommunicator, in_threads

DIAMOND = ModuleGraph({"a": 1, "b": 2, "c": 1}, {"a": ["b", "c"], "b": ["c"]})
PLANS = {
    "gpipe": lower(gpipe(3, 4)),
    "1f1b": lower(one_f_one_b(3, 4)),
    "early receives": lower(one_f_one_b(4, 5), receives="early"),
    "one position": lower(multi_module_1f1b(DIAMOND, 3, placement=[0, 0, 0, 0])),
    **{
        f"{name}, 3 positions": lower(known.plan(3, 4))
        for name, known in SCHEDULES.items()
        if known.trains and not known.sliced
    },
    "uneven chunks": lower(interleaved_1f1b(3, 5, num_stages=5)),
    "greedy": lower(greedy(Costs(F=1, I=1.2, W=0.8), num_positions=3, num_microbatches=5)),
    "two stages on each of two positions": lower(multi_module_1f1b(DIAMOND, 3, placement=[0, 1, 0, 1])),
}


@pytest.mark.parametrize("name", PLANS)
def test_any_plan_gives_the_gradients_of_one_process(name, network):
    plan, stages = PLANS[name], scales(PLANS[name])
    network.run(plan, stages)
    for stage, expected in zip(stages, expected_gradients(plan), strict=True):
        assert torch.allclose(stage.weight.grad, expected, rtol=1e-14)


@pytest.mark.parametrize("name", PLANS)
def test_eval_runs_the_forwards_only(name, network):
    plan, stages = PLANS[name], scales(PLANS[name])
    network.run(plan, stages, "eval")
    assert len(stages[-1].losses) == plan.num_microbatches
    assert all(stage.weight.grad is None for stage in stages)
    assert all(lane.empty() for lane in network.lanes.values())


@pytest.mark.parametrize("name", PLANS)
def test_hooks_see_exactly_the_plans_actions_in_order(name, network):
    plan = PLANS[name]

    @define
    class Watch:
        seen: list

        def before(self, action):
            self.seen.append(action)

        def after(self, action):
            assert self.seen[-1] is action

    hooks = [[Watch([])] for _ in plan.positions]
    network.run(plan, scales(plan), hooks=hooks)
    for position, (watch,) in enumerate(hooks):
        assert watch.seen == list(plan.actions(position))


def test_a_recording_has_every_action_and_draws_arrows(network):
    plan = PLANS["1f1b"]
    recorders = [Recorder() for _ in plan.positions]
    for recorder in recorders:
        recorder.start()
        with recorder.aside("data"):
            pass
    network.run(plan, scales(plan), hooks=[[r] for r in recorders])
    tracks = [r.track(plan, rank=p, position=p) for p, r in enumerate(recorders)]
    for track in tracks:
        assert [entry.index for entry in track.actions] == list(range(sum(1 for _ in plan.actions(track.position))))
        assert all(entry.start <= entry.end for entry in track.actions)
        assert [aside.name for aside in track.asides] == ["data"]
    drawn = timeline(Recording(plan, tracks))
    sends = sum(a.kind.is_send for p in range(plan.num_positions) for a in plan.actions(p))
    assert len(drawn.flows) == sends == 2 * 2 * 4
    for recorder, busy in zip(recorders, drawn.busy, strict=True):
        assert recorder.computing == pytest.approx(busy)


def test_a_recording_of_another_plan_is_refused(network):
    recorder = Recorder()
    recorder.before(parse_action("0F0"))
    recorder.after(parse_action("0F0"))
    with pytest.raises(TimelineError, match="0F0 was recorded, and position 1 of the plan has no such action"):
        recorder.track(PLANS["1f1b"], rank=1, position=1)


def test_stages_must_be_those_of_one_position():
    plan = PLANS["1f1b"]
    with pytest.raises(StepArgumentError, match=r"has stages \[0, 1\], but the plan has position 0: \[0\], position 1"):
        PipelineRuntime(plan, dict(enumerate(scales(plan)[:2])), None)


def test_a_reduce_needs_its_reducer(network):
    plan = lower(one_f_one_b(2, 2), tied={"embedding": [0, 1]})
    with pytest.raises(StepArgumentError, match=r"reducers for \[\]; position 0 has a REDUCE for \['embedding'\]"):
        PipelineRuntime(plan, {0: scales(plan)[0]}, None)
    calls = []
    stages = scales(plan)
    in_threads(
        [
            PipelineRuntime(
                plan,
                {stage: stages[stage]},
                network.communicator(2, stage),
                reducers={"embedding": partial(calls.append, stage)},
            ).step
            for stage in range(2)
        ]
    )
    assert sorted(calls) == [0, 1]


def test_outputs_must_be_those_of_the_edges(network):
    plan = PLANS["1f1b"]

    class Wrong:
        def forward(self, microbatch, inputs):
            return Forwarded({})

    runtime = PipelineRuntime(plan, {0: Wrong()}, network.communicator(3, 0))
    with pytest.raises(
        PipelineError, match=r"outputs for \[\] for microbatch 0; .* \['0>1'\]\n  at position 0, step 1 of \d+: 0F0\n"
    ):
        runtime.step()


def test_a_plan_of_computes_alone_must_be_lowered():
    plan = one_f_one_b(2, 2)
    with pytest.raises(StepArgumentError, match=r"computes alone, but its 2 positions feed each other.* lower\(plan\)"):
        PipelineRuntime(plan, {0: scales(plan)[0]}, None)


def test_one_position_needs_no_messages():
    plan = gpipe(1, 2)
    stage = scales(plan)[0]
    PipelineRuntime(plan, {0: stage}, None).step()
    assert stage.weight.grad is not None


def test_a_collective_is_refused_where_the_communicator_has_none():
    plan = lower(one_f_one_b(2, 2), collectives={Edge(0, 1): "bridge"})
    with pytest.raises(StepArgumentError, match=r"0COLLECTIVE0>1@bridge, .* is None, without collective\(\)"):
        PipelineRuntime(plan, {0: scales(plan)[0]}, None)


def test_after_a_failed_step_the_runtime_says_that_it_must_be_rebuilt():
    plan = gpipe(1, 2)
    runtime = PipelineRuntime(plan, {0: Scale(plan, 0, raising(StopIteration()))}, None)
    with pytest.raises(
        PipelineError,
        match=r"microbatch 1: DataEndedError: .* microbatch 1 of 2 .*\n  at position 0, step 2 of 4: 0F1\n",
    ):
        runtime.step()
    for verb in (runtime.step, runtime.eval):
        with pytest.raises(PipelineError, match=r"failed before: stage 0, microbatch 1: DataEndedError.* [Rr]ebuild"):
            verb()


def test_eval_comes_before_the_first_step_as_well_as_after(network):
    plan = PLANS["zero_bubble_v, 3 positions"]
    stages = scales(plan)
    runtimes = network.runtimes(plan, stages)
    for verb in ("eval", "step", "eval"):
        in_threads([getattr(runtime, verb) for runtime in runtimes])
    losses = stages[-1].losses
    assert sorted(losses[:4]) == sorted(losses[4:8]) == sorted(losses[8:])
    for stage, expected in zip(stages, expected_gradients(plan), strict=True):
        assert torch.allclose(stage.weight.grad, expected, rtol=1e-14)


def test_a_profile_has_a_range_for_every_action():
    plan = lower(zero_bubble_h1(1, 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        PipelineRuntime(plan, {0: scales(plan)[0]}, None, hooks=[ProfilerRanges()]).step()
    names = {event.name for event in profile.events()}
    assert {str(action) for action in plan.actions(0)} <= names
    assert {"0F0", "0I0", "0W0"} <= names


def test_a_plan_of_forwards_alone_keeps_nothing(network):
    plan = lower(SCHEDULES["forward_only"].plan(3, 4))
    stages = scales(plan)
    network.run(plan, stages)
    assert len(stages[-1].losses) == 4
    assert all(stage.weight.grad is None for stage in stages)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupted_step_leaves_nothing_to_the_next(interrupt, network):
    """It goes out as it came, and what is left in the lanes is not taken for a message of another step."""
    plan = lower(gpipe(2, 3))
    told = []

    class Telling(MemoryCommunicator):
        def abort(self, reason):
            told.append(reason)

    runtime = PipelineRuntime(plan, {0: Scale(plan, 0, raising(interrupt()))}, Telling(network, 2, 0))
    with pytest.raises(interrupt) as found:
        runtime.step()
    assert found.value.__cause__ is None
    assert interrupt.__name__ in told[0]
    assert not runtime._bound.runners[0][0].flight.live
    for verb in (runtime.step, runtime.eval):
        with pytest.raises(PipelineError, match=rf"failed before: .*{interrupt.__name__}.* [Rr]ebuild"):
            verb()


def test_a_proof_is_taken_as_it_is_and_a_plan_is_proved_once():
    plan = lower(one_f_one_b(1, 2))
    proof = verify(plan)
    stage = SimpleNamespace(forward=lambda microbatch, inputs: Forwarded({}, torch.ones((), requires_grad=True) * 2))
    runtime = PipelineRuntime(proof, {0: stage}, None)
    assert runtime.proof is proof
    assert runtime.plan is plan
    runtime.step()
    assert PipelineRuntime(plan, {0: stage}, None).proof == proof


def test_a_proof_for_other_lanes_than_the_communicators_is_made_anew(network):
    proof = verify(lower(one_f_one_b(2, 2)))

    class Shared(MemoryCommunicator):
        @property
        def job(self):
            return evolve(super().job, lanes="shared")

    communicator = Shared(network, 2, 1)
    stage = SimpleNamespace(forward=lambda microbatch, inputs: Forwarded({}, inputs.popitem()[1].sum()))
    assert PipelineRuntime(proof, {1: stage}, communicator).proof.lanes == "shared"


class Device:
    """Streams of a device that finishes work only where the host waits for it; ``most`` is how far the host led."""

    def __init__(self):
        self.recorded, self.pending, self.most = 0, set(), 0

    def current_stream(self, device):
        return self

    def record_event(self, event=None):
        assert event is None, "computing needs no event of its own kind"
        self.recorded += 1
        event = SimpleNamespace(number=self.recorded)
        event.synchronize = lambda: self.pending.difference_update(range(event.number + 1))
        self.pending.add(event.number)
        self.most = max(self.most, len(self.pending))
        return event


@pytest.mark.parametrize("verb", ["step", "eval"])
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_v", "gpipe"])
def test_the_host_is_at_most_four_microbatches_ahead_of_a_device_with_streams(name, verb, monkeypatch):
    device = Device()
    monkeypatch.setattr(streams, "cuda", device)
    monkeypatch.setattr(streams, "types", {"cpu"})
    plan = lower(SCHEDULES[name].plan(1, 12))
    edges = plan.graph.stage_edges
    weight = torch.ones((), requires_grad=True)

    def forward(stage, microbatch, inputs):
        y = weight * (sum(inputs.values()) if inputs else 1.0)
        return Forwarded({edge: y for edge in edges if edge.source == stage}, y if stage == len(edges) else None)

    stages = {stage: SimpleNamespace(forward=partial(forward, stage)) for stage in range(plan.num_stages)}
    communicator = OfJob()
    communicator.device = torch.device("cpu")
    getattr(PipelineRuntime(plan, stages, communicator), verb)()
    assert device.recorded == 12, "one event per microbatch"
    assert device.most == 4
