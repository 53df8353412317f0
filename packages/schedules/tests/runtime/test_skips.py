"""Values that skip stages: each schedule has the gradients of one process, and each position one copy of a value."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from attrs import define, field
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from pipegrid.core.skips import Uses, values_by_edge
from pipegrid.plans import (
    SCHEDULES,
    Costs,
    interleaved_1f1b,
    lower,
    offload,
    one_f_one_b,
    simulate,
    verify,
    zero_bubble_v,
)
from pipegrid.schedules import PipelineConfig
from pipegrid.schedules.runtime import PipelineRuntime
from pipegrid.transport import P2PCommunicator

from ..kit import skipping as kit
from ..kit.skipping import expected, random_uses, run_stage, skipping, skipping_stages

TRAINING = [name for name, known in SCHEDULES.items() if known.trains and not known.sliced]
CHUNKED = [name for name in TRAINING if SCHEDULES[name].chunks is None]
CASES = [(name, None) for name in TRAINING if name not in CHUNKED] + [(n, c) for n in CHUNKED for c in (1, 2, 4)]
SLICED = [name for name, known in SCHEDULES.items() if known.sliced]


def assert_gradients(stages, models):
    for stage in stages:
        for own, whole in zip(stage.model.parameters(), models[stage.number].parameters(), strict=True):
            given = torch.zeros_like(own) if own.grad is None else own.grad
            wanted = torch.zeros_like(own) if whole.grad is None else whole.grad
            assert (given - wanted).abs().max() <= 1e-10 * max(1.0, wanted.abs().max().item())


def plan_of(name, positions, chunks, seed=0):
    plan = SCHEDULES[name].plan(positions, 4, chunks)
    uses = random_uses(plan.num_stages, seed)
    return (*skipping(plan, uses), uses)


@pytest.mark.parametrize(("name", "chunks"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_schedule_gives_the_gradients_of_one_process(name, chunks, seed, network):
    plan, values, uses = plan_of(name, 3, chunks, seed)
    stages = skipping_stages(plan, uses, values)
    network.run(lower(plan), stages)
    assert_gradients(stages, expected(plan.num_stages, uses, plan.num_microbatches))


@pytest.mark.parametrize("name", SLICED)
def test_slices_of_a_microbatch_skip_stages(name, network):
    plan = SCHEDULES[name].plan(3, 4, 2 if SCHEDULES[name].chunks is None else None, num_slices=2)
    uses = random_uses(plan.num_stages, 1)
    plan, values = skipping(plan, uses)
    stages = skipping_stages(plan, uses, values)
    network.run(lower(plan), stages)
    assert_gradients(stages, expected(plan.num_stages, uses, plan.num_pieces))


def test_what_a_stage_has_saved_goes_to_the_host_and_what_is_kept_stays(network):
    plan, values, uses = plan_of("interleaved_1f1b", 3, 2)
    stages = skipping_stages(plan, uses, values)
    network.run(offload(lower(plan), memory_limit=1.5), stages)
    assert_gradients(stages, expected(plan.num_stages, uses, plan.num_microbatches))


def test_activations_are_computed_again(network, monkeypatch):
    """The layers between use what has come from afar, in the forward and again in the backward."""
    plan, values, uses = plan_of("dualpipe_v", 3, None)
    models = expected(plan.num_stages, uses, plan.num_microbatches)
    whole = run_stage
    again = partial(checkpoint, whole, use_reentrant=False)
    monkeypatch.setattr(kit, "run_stage", again)
    stages = skipping_stages(plan, uses, values)
    network.run(lower(plan), stages)
    assert_gradients(stages, models)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zero_bubble_v"])
def test_steps_after_an_evaluation_and_outputs_that_are_freed(name, network):
    plan, values, uses = plan_of(name, 3, 2 if name in CHUNKED else None)
    stages = skipping_stages(plan, uses, values)
    network.run(lower(plan), stages, "eval")
    network.run(lower(plan), stages, deallocate_outputs=True, reuse_buffers=True)
    assert_gradients(stages, expected(plan.num_stages, uses, plan.num_microbatches))


def on_ranks(ranks, name, chunks, *, steps=2):
    """A runtime on gloo ranks has the gradients of one process, in each step."""
    plan, values, uses = plan_of(name, ranks.world_size, chunks)
    config = PipelineConfig(pipeline_dtype=torch.float64, variable_seq_lengths=True, strict=ranks.strict_sends)
    placement = [place for (place,) in plan.placement]
    communicator = P2PCommunicator(dist.group.WORLD, config, placement=placement, graph=plan.graph)
    every = skipping_stages(plan, uses, values)
    stages = {number: every[number] for number in plan.stages_at[ranks.rank]}
    runtime = PipelineRuntime(verify(lower(plan)), stages, communicator)
    models = expected(plan.num_stages, uses, plan.num_microbatches)
    for _ in range(steps):
        for stage in stages.values():
            stage.model.zero_grad()
        runtime.step()
        assert_gradients(stages.values(), models)
    communicator.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", None), ("interleaved_1f1b", 2), ("dualpipe_v", None)])
def test_on_ranks(ranks, name, chunks):
    on_ranks(ranks, name, chunks)


@pytest.mark.nightly
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_every_schedule_on_ranks(ranks, name, chunks):
    on_ranks(ranks, name, chunks)


@pytest.mark.parametrize("make", [zero_bubble_v, lambda p, m: interleaved_1f1b(p, m, num_chunks=3)])
def test_a_position_has_one_copy_of_a_value(make, network):
    """The stages of a position share the memory of what has come to the first of them, and send one gradient back."""
    plan = make(3, 4)
    uses = {0: Uses(0, tuple(range(1, plan.num_stages)))}
    plan, values = skipping(plan, uses)
    seen = [[] for _ in plan.positions]
    stages = skipping_stages(plan, uses, values)
    for stage in stages:
        _note(stage, seen[plan.placement[stage.number][0]])
    plan = lower(plan)
    network.run(plan, stages)
    for position, addresses in enumerate(seen):
        held = [stage for stage in plan.stages_at[position] if stage]
        assert len(addresses) == len(held) * plan.num_microbatches
        if position:  # memory that was freed may come again
            assert len(set(addresses)) <= plan.num_microbatches
    gradients = [
        action
        for position in range(plan.num_positions)
        for action in plan.actions(position)
        if action.kind == "SEND_B" and action.edge in values and action.edge.source == 0 and action.microbatch == 0
    ]
    assert len(gradients) == plan.num_positions - 1


@define
class Kept:
    """A hook: the most payloads that have come here past stages, by message, and are in memory after any action.

    A receive's buffer is there from its posting on; what a stage has taken, as long as its storage lives.
    """

    skips: frozenset
    posted: set = field(factory=set)
    taken: list = field(factory=list)
    most: int = 0

    def watch(self, stage):
        forward = stage.forward

        def watched(microbatch, inputs):
            for edge, payload in inputs.items():
                if (edge, microbatch) in self.posted:
                    self.posted.remove((edge, microbatch))
                    self.taken.append([StorageWeakRef(one.untyped_storage()) for one in payload])
            return forward(microbatch, inputs)

        stage.forward = watched

    def before(self, action):
        pass

    def after(self, action):
        if action.kind == "RECV_F" and action.edge in self.skips:
            self.posted.add((action.edge, action.microbatch))
        self.taken = [refs for refs in self.taken if not all(ref.expired() for ref in refs)]
        self.most = max(self.most, len(self.posted) + len(self.taken))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("name", "chunks"),
    [("gpipe", None), ("1f1b", None), ("interleaved_1f1b", 2), ("zero_bubble_v", None), ("dualpipe_v", None)],
)
def test_the_memory_of_what_is_kept_is_the_plans(ranks, name, chunks):
    plan = SCHEDULES[name].plan(ranks.world_size, 6, chunks)
    plan, values = skipping(plan, uses := {0: Uses(0, tuple(range(2, plan.num_stages)))})
    kept = Kept(frozenset(plan.graph.skips))
    placement = [place for (place,) in plan.placement]
    config = PipelineConfig(
        pipeline_dtype=torch.float64, variable_seq_lengths=True, strict=ranks.strict_sends, receives_ahead=0
    )
    communicator = P2PCommunicator(dist.group.WORLD, config, placement=placement, graph=plan.graph)
    every = skipping_stages(plan, uses, values)
    stages = {number: every[number] for number in plan.stages_at[ranks.rank]}
    for stage in stages.values():
        kept.watch(stage)
    proof = verify(lower(plan))
    runtime = PipelineRuntime(proof, stages, communicator, hooks=[kept])
    runtime.step()
    kept.most = 0
    runtime.step()
    assert kept.most == proof.peak_kept[ranks.rank]
    step = simulate(proof.plan, Costs(activation=0.0, kept=1.0))
    assert step.peaks() == proof.peak_kept
    assert max(proof.peak_kept) > 1
    assert_gradients(stages.values(), _twice(expected(plan.num_stages, uses, plan.num_microbatches)))
    communicator.close()


def _twice(models):
    for model in models:
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else 2 * parameter.grad
    return models


def _note(stage, addresses):
    forward = stage.forward

    def noting(microbatch, inputs):
        for edge, payload in inputs.items():
            addresses.extend(one.data_ptr() for one in payload[len(payload) - len(stage.values.get(edge, ())) :])
        return forward(microbatch, inputs)

    stage.forward = noting


def test_a_chain_has_no_skips_of_its_own():
    plan = one_f_one_b(3, 2)
    assert skipping(plan, {0: Uses(0, (1,))})[0] == plan
    assert values_by_edge({}, plan.placement) == {}
