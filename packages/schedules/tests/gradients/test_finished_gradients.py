"""After a step's reductions the gradients are those of one process: every schedule, tied copies, weighed tokens.

On real ranks, because the sums are: over the copies of a tied weight, over replicas, and of tokens over the job.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autograd_kit.gradients import difference, gradients_of
from pipegrid.gradients.reduction.reduce import reduce_gradients
from pipegrid.gradients.reduction.tied import tie_parameters, tied_stages
from pipegrid.plans.generators.registry import SCHEDULES
from pipegrid.plans.passes.lowering import lower
from pipegrid.schedules.megatron.config import PipelineConfig
from pipegrid.schedules.megatron.step_functions import get_forward_backward_func
from pipegrid.schedules.runtime import PipelineRuntime
from pipegrid.transport import P2PCommunicator
from plan_kit.groups import Groups

from ..kit.models import call, in_one_process
from ..kit.stages import stage_of
from ..kit.words import WORDS, WordStage, word_stages

NAMES = [name for name, schedule in SCHEDULES.items() if schedule.trains and not schedule.sliced]


def words(microbatch, lane):
    """Microbatches and lanes have unequal numbers of them."""
    generator = torch.Generator().manual_seed(10 * microbatch + lane)
    return torch.randint(WORDS, (2 + (3 * microbatch + lane) % 4,), generator=generator)


def weights_of(x):
    """Of tokens; their sum is not whole."""
    return 0.2 + 0.3 * (x % 4).double()


def loss_of(x, output, *, per_token=True):
    """The weighted sum over tokens and the sum of the weights; or the mean."""
    losses = nn.functional.cross_entropy(output, x.roll(1), reduction="none")
    weights = weights_of(x)
    return ((losses * weights).sum(), weights.sum(), {}) if per_token else (losses.mean(), None, {})


def one_process(num_stages, microbatches, lanes, *, per_token):
    parts = word_stages(num_stages)
    data = [words(microbatch, lane) for microbatch in range(microbatches) for lane in range(lanes)]
    total = sum(weights_of(x).sum() for x in data) if per_token else len(data)
    for x in data:
        in_one_process(parts, [x], total, partial(loss_of, x, per_token=per_token))
    return parts


def apart(parts, expected):
    """The measure of the docs, of the parts by stage."""
    wanted = gradients_of([expected[stage] for stage in parts])
    return difference(gradients_of(parts.values()), wanted, among=gradients_of(expected))


def tied_word(parts, first_and_last, group):
    """The copies of the word table that this rank holds, of the first and of the last stage, tied over ``group``."""
    copies = {stage: parts[stage].word for stage in first_and_last if stage in parts}
    return tie_parameters("word", copies, stages=first_and_last, group=group if copies else None)


def check(ranks, name, positions, microbatches, *, per_token):
    """A step of a schedule whose first and last stage hold copies of one weight; ranks beyond are replicas."""
    lanes = ranks.world_size // positions
    lane, position = divmod(ranks.rank, positions)
    computes = SCHEDULES[name].plan(positions, microbatches)
    first_and_last = (0, computes.num_stages - 1)
    holders = sorted({place for stage in first_and_last for place in computes.placement[stage]})
    pipelines = [dist.new_group([each * positions + place for place in range(positions)]) for each in range(lanes)]
    beside = [dist.new_group([each * positions + place for each in range(lanes)]) for place in range(positions)]
    embeddings = [dist.new_group([each * positions + place for place in holders]) for each in range(lanes)]

    config = PipelineConfig(
        pipeline_dtype=torch.float64, strict=ranks.strict_sends, variable_seq_lengths=True, deadline=60
    )
    parts = {stage: WordStage(stage, computes.num_stages, config) for stage in computes.stages_at[position]}
    tied = tied_word(parts, first_and_last, embeddings[lane])
    plan = lower(computes, tied=dict(tied_stages([tied])))
    counted = []

    def loss(output, microbatch):
        scalar, weight, _ = loss_of(words(microbatch, lane), output, per_token=per_token)
        counted.append(weight)
        return scalar if per_token else scalar / microbatches

    data = partial(words, lane=lane)
    stages = {stage: stage_of(plan.graph, stage, part, data=data, loss=loss) for stage, part in parts.items()}
    placement = [only for (only,) in plan.placement]
    communicator = P2PCommunicator(pipelines[lane], config, placement=placement)
    PipelineRuntime(plan, stages, communicator, reducers={"word": tied.reduce}).step()
    reduce_gradients(
        nn.ModuleList(parts.values()),
        Groups(dp=beside[position]),
        num_tokens=sum(counted) if per_token else None,
    )
    assert apart(parts, one_process(plan.num_stages, microbatches, lanes, per_token=per_token)) < 1e-10, name
    communicator.close()
    dist.barrier()


@pytest.mark.ranks(2)
def test_with_a_tied_weight_and_weighed_tokens_every_schedule_is_one_process(ranks):
    for name in NAMES:
        check(ranks, name, 2, 5, per_token=True)


@pytest.mark.ranks(4)
def test_so_it_is_on_two_replicas_with_halves_of_backwards_and_a_mean_loss(ranks):
    check(ranks, "zero_bubble_v", 2, 3, per_token=False)


@pytest.mark.nightly
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "tokens"])
def test_three_positions_of_every_schedule_are_one_process(ranks, name, per_token):
    for microbatches in (1, 3, 7, 9):
        check(ranks, name, 3, microbatches, per_token=per_token)


@pytest.mark.nightly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "tokens"])
@pytest.mark.parametrize("positions", [2, 4])
def test_four_ranks_as_lanes_or_positions_of_every_schedule_are_one_process(ranks, name, per_token, positions):
    for microbatches in (1, positions, 2 * positions + 1, 3 * positions):
        check(ranks, name, positions, microbatches, per_token=per_token)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("chunks", [1, 2], ids=["1f1b", "interleaved"])
def test_the_step_functions_finish_weighed_tokens_by_default(ranks, chunks):
    """The gradients are left to the default: no finalize_model_grads_func, no wrapper."""
    num_stages = 2 * chunks
    holder = dist.new_group([0, 1])
    parts = {stage: WordStage(stage, num_stages) for stage in range(ranks.rank, num_stages, 2)}
    tied = tied_word(parts, (0, num_stages - 1), holder)
    config = PipelineConfig(
        pipeline_dtype=torch.float64,
        strict=ranks.strict_sends,
        variable_seq_lengths=True,
        deadline=60,
        calculate_per_token_loss=True,
        tied_parameters=(tied,),
    )
    for part in parts.values():
        part.config = config
    communicator = P2PCommunicator(dist.group.WORLD, config)
    call(
        get_forward_backward_func(2, chunks),
        model=list(parts.values()),
        forward_step_func=forward_step,
        p2p_communicator=communicator,
        pg_collection=Groups(),
    )
    assert apart(parts, one_process(num_stages, 4, 1, per_token=True)) < 1e-10
    communicator.close()


def forward_step(microbatches, model, lane=0):
    x = words(next(microbatches), lane)
    return model(x if model.first else model.received[0]), partial(loss_of, x)


@pytest.mark.ranks(2)
def test_without_a_pipeline_two_lanes_finish_weighed_tokens_by_default(ranks):
    part = WordStage(0, 1, PipelineConfig(calculate_per_token_loss=True))
    step = partial(forward_step, lane=ranks.rank)
    call(model=part, count=3, forward_step_func=step, pg_collection=Groups(dp=dist.group.WORLD))
    assert apart({0: part}, one_process(1, 3, 2, per_token=True)) < 1e-10
