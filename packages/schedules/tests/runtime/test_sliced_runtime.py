"""Slices on the runtime: a causal transformer's gradients are those of one process, and what it cannot run is named."""

from __future__ import annotations

import weakref

import pytest
import torch

from autograd_kit.gradients import assert_same_gradients
from pipegrid.bridges import VTPCommunicator, VTPTopology
from pipegrid.core.errors import StepArgumentError
from pipegrid.schedules import (
    CostsError,
    Recorder,
    Recording,
    lower,
    recorded_costs,
    recording_from_json,
    recording_to_json,
    seq1f1b,
    seq1f1b_interleaved,
    seq1f1b_zero_bubble,
    timeline,
)
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.runtime import Forwarded, PipelineError, PipelineRuntime
from pipegrid.transport import P2PConfig

from ..kit.sliced_transformer import TOKENS, again, batches, in_one_process, parts, sliced_stages
from ..kit.threads import in_threads


def run(plan, network, *, verb="step", options=None, **stage_options):
    stages = sliced_stages(plan, **stage_options)
    return stages, network.run(plan, stages, verb, **(options or {}))


def assert_gradients_of_one_process(plan, stages):
    models = parts(plan.num_stages)
    total = in_one_process(models, batches(plan.num_microbatches, TOKENS))
    assert sum(stages[-1].losses) == pytest.approx(total, rel=1e-12)
    assert_same_gradients([stage.model for stage in stages], models, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [seq1f1b, seq1f1b_interleaved, seq1f1b_zero_bubble])
@pytest.mark.parametrize(("p", "m", "k"), [(1, 2, 3), (2, 3, 2), (3, 2, 4), (4, 2, 3)])
def test_gradients_are_those_of_one_process(make, p, m, k, network):
    plan = lower(make(p, m, num_slices=k))
    stages, runtimes = run(plan, network)
    assert_gradients_of_one_process(plan, stages)
    for runtime in runtimes:
        for (runner,) in runtime._bound.runners.values():
            assert not runner.flight.kept
            assert not runner.flight.live


@pytest.mark.parametrize("make", [seq1f1b, seq1f1b_zero_bubble])
@pytest.mark.parametrize("options", [{"deallocate_outputs": True}, {"reuse_buffers": True}])
def test_options_of_memory_change_no_gradient(make, options, network):
    plan = lower(make(3, 3, num_slices=3))
    stages, _ = run(plan, network, options=options)
    assert_gradients_of_one_process(plan, stages)


def test_checkpointed_layers_read_the_same_past_again(network):
    plan = lower(seq1f1b(2, 2, num_slices=3))
    stages, _ = run(plan, network, run=again)
    assert_gradients_of_one_process(plan, stages)


def test_checkpointed_layers_are_named_where_backwards_run_in_halves():
    plan = lower(seq1f1b_zero_bubble(1, 1, num_slices=2))
    (stage,) = sliced_stages(plan, run=again)
    with pytest.raises(PipelineError, match=r"slice 0\.1 in halves would recompute them twice; seq1f1b has whole"):
        PipelineRuntime(plan, {0: stage}, None).step()


def test_an_evaluation_runs_slices_and_keeps_nothing(network):
    plan = lower(seq1f1b(2, 2, num_slices=4))
    stages, runtimes = run(plan, network, verb="eval")
    models = parts(2)
    total = in_one_process(models, batches(2, TOKENS))
    assert sum(stages[-1].losses) == pytest.approx(total, rel=1e-12)
    assert all(parameter.grad is None for stage in stages for parameter in stage.model.parameters())
    assert not any(runner.flight.kept for runtime in runtimes for (runner,) in runtime._bound.runners.values())


@pytest.mark.parametrize("make", [seq1f1b, seq1f1b_interleaved])
def test_as_many_slices_are_live_as_the_proof_counts(make, network):
    class Watch:
        def __init__(self):
            self.peak, self.runners = 0.0, {}

        def before(self, action):
            pass

        def after(self, action):
            live = sum(len(runner.flight.live) for (runner,) in self.runners.values())
            self.peak = max(self.peak, live / (plan.num_slices * plan.num_chunks))

    plan = lower(make(3, 4, num_slices=3))
    watches = [Watch() for _ in plan.positions]
    recorders = [Recorder() for _ in plan.positions]
    stages = sliced_stages(plan)
    runtimes = network.runtimes(plan, stages, hooks=list(zip(watches, recorders, strict=True)))
    for watch, runtime in zip(watches, runtimes, strict=True):
        watch.runners = runtime._bound.runners
    in_threads([runtime.step for runtime in runtimes])
    assert [watch.peak for watch in watches] == pytest.approx(runtimes[0].proof.peak_live)
    tracks = [recorder.track(plan, rank=p, position=p) for p, recorder in enumerate(recorders)]
    recording = recording_from_json(recording_to_json(Recording(plan, tracks)))
    assert recording.plan == plan
    assert "0F3.2" in {span.name for span in timeline(recording).spans}
    with pytest.raises(CostsError, match="microbatches cut into 3 slices; record whole ones"):
        recorded_costs(recording)


def test_what_a_slice_kept_is_freed_after_its_backward():
    kept, live = [], []

    class Probe:
        model = torch.nn.Linear(4, 4)

        def forward(self, microbatch, inputs, part):
            live.append(sum(leaf() is not None for leaf in kept))
            x = part.extend("x", self.model(torch.ones(1, 3, 4)))
            kept.extend(weakref.ref(leaf) for leaf in part.past("x"))
            return Forwarded({}, x.sum())

    PipelineRuntime(lower(seq1f1b(1, 4, num_slices=2)), {0: Probe()}, None).step()
    assert len(kept) == 4  # of the first slice of each microbatch
    assert not any(leaf() is not None for leaf in kept)
    assert max(live) == 1


def failing(forward, *, k=2, make=seq1f1b):
    class Stage:
        model = torch.nn.Linear(2, 2)

        def forward(self, microbatch, inputs, part):
            return forward(self.model, microbatch, part)

    PipelineRuntime(lower(make(1, 1, num_slices=k)), {0: Stage()}, None).step()


def test_a_stage_without_slices_is_named_before_the_step():
    class Whole:
        def forward(self, microbatch, inputs):
            return Forwarded({}, None)

    plan = lower(seq1f1b(1, 1, num_slices=2))
    with pytest.raises(StepArgumentError, match=r"stage 0 is .*forward\(microbatch, inputs, part\): too many"):
        PipelineRuntime(plan, {0: Whole()}, None)


def test_a_communicator_between_unequal_tensor_parallel_sizes_is_named():
    plan = lower(seq1f1b(2, 1, num_slices=2))
    stage, _ = sliced_stages(plan)
    unopened = VTPCommunicator.__new__(VTPCommunicator)
    unopened.topology, unopened.config, unopened.stage = VTPTopology([2, 1]), P2PConfig(), 0
    with pytest.raises(StepArgumentError, match="2 slices, and a VTPCommunicator moves whole ones"):
        PipelineRuntime(plan, {0: stage}, unopened)


def test_a_second_tensor_under_one_key_is_named():
    def forward(model, microbatch, part):
        x = model(torch.ones(1, 2))
        part.keep("k", x)
        part.keep("k", x)

    with pytest.raises(PipelineError, match="slice 0 keeps a second tensor under 'k'"):
        failing(forward)


def test_a_tensor_kept_without_a_graph_is_named():
    def forward(model, microbatch, part):
        with torch.no_grad():
            part.keep("k", model(torch.ones(1, 2)))

    with pytest.raises(PipelineError, match="made without a graph") as caught:
        failing(forward)
    assert isinstance(caught.value.__cause__, StageOutputError)


def test_errors_name_the_slice():
    def forward(model, microbatch, part):
        return Forwarded({}, model(torch.ones(1, 2)).sum() if part.is_first else torch.tensor(1.0))

    with pytest.raises(
        PipelineError, match=r"stage 0, microbatch 0, slice 1: .*the loss of stage 0 for microbatch 0\.1"
    ):
        failing(forward)
