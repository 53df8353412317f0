"""After a step's reductions the gradients are those of one process: every schedule, tied copies, weighed tokens.

On real ranks, because the sums are: over the copies of a tied weight, over replicas, and of tokens over the job.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn

from pipegrid.schedules.generators.registry import SCHEDULES
from pipegrid.schedules.gradients.reduction.reduce import reduce_gradients
from pipegrid.schedules.gradients.reduction.tied import tie_parameters, tied_stages
from pipegrid.schedules.megatron.config import PipelineConfig
from pipegrid.schedules.megatron.step_functions import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from pipegrid.schedules.passes.lowering import lower
from pipegrid.schedules.runtime import Forwarded, PipelineRuntime
from pipegrid.transport import P2PCommunicator

from ..kit.groups import Groups

WORDS, WIDTH = 7, 4
NAMES = [name for name, schedule in SCHEDULES.items() if schedule.trains and not schedule.sliced]


def parameter(seed, *shape):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


class Part(nn.Module):
    """A layer; the first stage looks words up before it, the last one scores words after it."""

    def __init__(self, stage, num_stages, config=None):
        super().__init__()
        self.weight = parameter(stage, WIDTH, WIDTH)
        if stage == 0:
            self.word = parameter(99, WORDS, WIDTH)
        if stage == num_stages - 1:
            self.head = self.word if num_stages == 1 else parameter(99, WORDS, WIDTH)
        self.config = config
        self.received = [None]

    def set_input_tensor(self, received):
        self.received = received

    def forward(self, x):
        if hasattr(self, "word"):
            x = nn.functional.embedding(x, self.word)
        x = torch.tanh(x @ self.weight)
        return x @ self.head.t() if hasattr(self, "head") else x


def words(microbatch, lane):
    """Microbatches and lanes have unequal numbers of them."""
    generator = torch.Generator().manual_seed(10 * microbatch + lane)
    return torch.randint(WORDS, (2 + (3 * microbatch + lane) % 4,), generator=generator)


def loss_of(output, x, *, per_token):
    """The mean over tokens; or their weighted sum, and the sum of the weights, which is not whole."""
    losses = nn.functional.cross_entropy(output, x.roll(1), reduction="none")
    weights = 0.2 + 0.3 * (x % 4).double()
    return ((losses * weights).sum(), weights.sum()) if per_token else (losses.mean(), None)


def one_process(num_stages, microbatches, lanes, *, per_token):
    parts = [Part(stage, num_stages) for stage in range(num_stages)]
    parts[-1].head = parts[0].word
    total = 0.0
    for microbatch, lane in itertools.product(range(microbatches), range(lanes)):
        x = words(microbatch, lane)
        output = x
        for part in parts:
            output = part(output)
        loss, weight = loss_of(output, x, per_token=per_token)
        total += weight.item() if per_token else 1
        loss.backward()
    for each in {id(each): each for part in parts for each in part.parameters()}.values():
        each.grad.div_(total)
    return parts


def assert_equal_gradients(parts, expected, case=""):
    """By stage; the measure of the design. ``case`` is named where they differ."""
    everything = [each.grad for part in expected for each in part.parameters()]
    floor = 1e-3 * torch.cat([gradient.flatten() for gradient in everything]).norm() / len(everything) ** 0.5
    for stage, part in parts.items():
        for (name, found), wanted in zip(part.named_parameters(), expected[stage].parameters(), strict=True):
            apart = (found.grad - wanted.grad).norm() / torch.maximum(wanted.grad.norm(), floor)
            assert apart < 1e-10, (case, stage, name, float(apart))


@frozen
class Computation:
    part: Part
    outgoing: tuple
    lane: int
    microbatches: int
    counted: list
    per_token: bool

    def forward(self, microbatch, inputs):
        x = words(microbatch, self.lane)
        output = self.part(next(iter(inputs.values())) if inputs else x)
        if self.outgoing:
            return Forwarded(dict.fromkeys(self.outgoing, output))
        loss, weight = loss_of(output, x, per_token=self.per_token)
        self.counted.append(weight)
        return Forwarded({}, loss if self.per_token else loss / self.microbatches)


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
    parts = {stage: Part(stage, computes.num_stages, config) for stage in computes.stages_at[position]}
    copies = {}
    if 0 in parts:
        copies[0] = parts[0].word
    if first_and_last[1] in parts:
        copies[first_and_last[1]] = parts[first_and_last[1]].head
    tied = tie_parameters("word", copies, stages=first_and_last, group=embeddings[lane] if copies else None)
    plan = lower(computes, tied=dict(tied_stages([tied])))
    counted = []
    stages = {
        stage: Computation(
            part,
            tuple(edge for edge in plan.graph.stage_edges if edge.source == stage),
            lane,
            microbatches,
            counted,
            per_token,
        )
        for stage, part in parts.items()
    }
    placement = [only for (only,) in plan.placement]
    communicator = P2PCommunicator(pipelines[lane], config, placement=placement)
    PipelineRuntime(plan, stages, communicator, reducers={"word": tied.reduce}).step()
    reduce_gradients(
        nn.ModuleList(parts.values()),
        Groups(dp=beside[position]),
        num_tokens=sum(counted) if per_token else None,
    )
    assert_equal_gradients(parts, one_process(plan.num_stages, microbatches, lanes, per_token=per_token), name)
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
    copies = {}
    parts = {stage: Part(stage, num_stages) for stage in range(ranks.rank, num_stages, 2)}
    if 0 in parts:
        copies[0] = parts[0].word
    if num_stages - 1 in parts:
        copies[num_stages - 1] = parts[num_stages - 1].head
    tied = tie_parameters("word", copies, stages=(0, num_stages - 1), group=holder)
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
    models, data = list(parts.values()), [iter(range(4)) for _ in parts]
    step = forward_backward_pipelining_with_interleaving if chunks > 1 else _without_interleaving
    step(
        forward_step_func=forward_step,
        data_iterator=data,
        model=models,
        num_microbatches=4,
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=communicator,
        pg_collection=Groups(),
    )
    assert_equal_gradients(parts, one_process(num_stages, 4, 1, per_token=True))
    communicator.close()


_without_interleaving = forward_backward_pipelining_without_interleaving


def forward_step(microbatches, model):
    x = words(next(microbatches), 0)
    output = model(x if hasattr(model, "word") else model.received[0])
    return output, partial(counted_loss, x)


def counted_loss(x, output):
    return *loss_of(output, x, per_token=True), {}


@pytest.mark.ranks(2)
def test_without_a_pipeline_two_lanes_finish_weighed_tokens_by_default(ranks):
    part = Part(0, 1, PipelineConfig(calculate_per_token_loss=True))

    def step(microbatches, model):
        x = words(next(microbatches), ranks.rank)
        return model(x), partial(counted_loss, x)

    forward_backward_no_pipelining(
        forward_step_func=step,
        data_iterator=iter(range(3)),
        model=part,
        num_microbatches=3,
        seq_length=1,
        micro_batch_size=1,
        pg_collection=Groups(dp=dist.group.WORLD),
    )
    assert_equal_gradients({0: part}, one_process(1, 3, 2, per_token=True))
