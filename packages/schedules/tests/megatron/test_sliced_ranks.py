"""Slices on real ranks: the runtime and the step functions have the gradients of one process, over replicas too."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autograd_kit.gradients import assert_same_gradients
from pipegrid.core.errors import StepArgumentError
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import chain
from pipegrid.schedules import (
    PipelineConfig,
    PipelineRuntime,
    get_forward_backward_func,
    lower,
    seq1f1b,
    seq1f1b_interleaved,
    seq1f1b_zero_bubble,
)
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.megatron.place import step_plan
from pipegrid.schedules.runtime import PipelineError
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import P2PCommunicator

from ..kit.of_job import OfJob
from ..kit.sliced_transformer import (
    LENGTHS,
    TOKENS,
    again,
    batches,
    in_one_process,
    loss_of,
    parts,
    sliced_stages,
)


def config_on(ranks, *, strict=False, **options):
    options |= {"strict": strict or ranks.strict_sends, "staged": ranks.backend == "staged"}
    return PipelineConfig(pipeline_dtype=torch.float64, variable_seq_lengths=True, **options)


def check_runtime(ranks, make, slices, *, strict):
    plan = lower(make(ranks.world_size, 3, num_slices=slices))
    config = config_on(ranks, strict=strict)
    communicator = P2PCommunicator(dist.group.WORLD, config, placement=[place for (place,) in plan.placement])
    every = sliced_stages(plan)
    stages = {number: every[number] for number in plan.stages_at[ranks.rank]}
    runtime = PipelineRuntime(plan, stages, communicator)
    expected = parts(plan.num_stages)
    in_one_process(expected, batches(3, TOKENS))
    for _ in range(2):
        for stage in stages.values():
            stage.model.zero_grad()
        runtime.step()
        for number, stage in stages.items():
            assert_same_gradients(stage.model, expected[number], rtol=1e-10, atol=1e-12)
    communicator.close()


def forward_step(iterator, model, checkpoint=None, *, mean, **options):
    tokens, targets, weights, count = next(iterator)
    received = model.received[0]
    output = model(tokens if received is None else received, **options)

    def loss_func(logits):
        loss = loss_of(logits, targets, weights)
        return (loss / count, float(count)) if mean else (loss, weights.sum(), loss.item())

    return output, loss_func


def sliced(data, lengths):
    """An item for each slice: its tokens, and the weight of all tokens of its microbatch."""
    for tokens, targets, weights in data:
        for part in zip(*(each.split(lengths, 1) for each in (tokens, targets, weights)), strict=True):
            yield *part, weights.sum()


def check_step(ranks, schedule, slices, *, pp, mean, chunks=1):
    """Every replica has its own microbatches; gradients are those of all of them in one process."""
    lanes = ranks.world_size // pp
    grid = HyperCommGrid([lanes, pp], ["dp", "pp"])
    pp_group, dp_group = grid.create_pgs(["pp", "dp"])
    here, lane = grid.coords(ranks.rank)["pp"], grid.coords(ranks.rank)["dp"]
    config = config_on(ranks, calculate_per_token_loss=not mean)
    communicator = P2PCommunicator(pp_group, config)
    num_stages = pp * chunks
    stages = range(here, num_stages, pp)
    models = parts(num_stages, config=config)[here::pp]
    all_data = [batches(2, TOKENS, seed=seed) for seed in range(lanes)]
    expected = parts(num_stages)
    in_one_process(expected, [batch for data in all_data for batch in data], means=mean)
    step = get_forward_backward_func(schedule=schedule, num_slices=slices)
    for _ in range(2):
        for model in models:
            model.zero_grad()
        infos = step(
            forward_step_func=partial(forward_step, mean=mean),
            data_iterator=[sliced(all_data[lane], LENGTHS[slices]) for _ in models],
            model=models,
            num_microbatches=2,
            p2p_communicator=communicator,
            pg_collection=SimpleNamespace(dp=dp_group, pp=pp_group),
        )
        assert len(infos) == (2 * slices if here == pp - 1 else 0)
        for stage, model in zip(stages, models, strict=True):
            assert_same_gradients(model, expected[stage], rtol=1e-10, atol=1e-12)
            assert all(block.attention.current_slice is None for block in model.blocks)
    communicator.close()


@pytest.mark.ranks(4)
def test_gradients_on_ranks_are_those_of_one_process(ranks):
    check_runtime(ranks, seq1f1b, 3, strict=True)
    check_step(ranks, "seq1f1b_interleaved", 2, pp=2, mean=False, chunks=2)
    check_step(ranks, "seq1f1b_zero_bubble", 4, pp=4, mean=True)


@pytest.mark.nightly
@pytest.mark.parametrize("slices", [2, 3, 4])
@pytest.mark.parametrize("make", [seq1f1b, seq1f1b_interleaved, seq1f1b_zero_bubble])
@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3, 4)])
def test_gradients_of_every_schedule_on_ranks(ranks, size, make, slices):
    for strict in (False, True):
        check_runtime(ranks, make, slices, strict=strict)
    for mean in (False, True):
        chunks = 2 if make is seq1f1b_interleaved else 1
        for pp in {2, size} if size % 2 == 0 else {size}:
            check_step(ranks, make.__name__, slices, pp=pp, mean=mean, chunks=chunks)


# What does not run in slices, or not so


def test_schedules_and_graphs_without_slices_are_named():
    with pytest.raises(PlanError, match="gpipe does not cut microbatches into 2 slices; these do: seq1f1b,"):
        get_forward_backward_func(schedule="gpipe", num_slices=2)
    with pytest.raises(StepArgumentError, match="num_slices=2 without a schedule"):
        get_forward_backward_func(2, num_slices=2)
    graph = ModuleGraph({"images": 1, "language": 2}, {"images": ["language"]})
    with pytest.raises(PlanError, match="cut into 2 slices; slices are for one"):
        step_plan(graph, 4, schedule="seq1f1b", num_slices=2)
    assert step_plan(chain(2), 4, schedule="seq1f1b", num_slices=2).num_slices == 2


def one_rank_step(model=None, *, mean=True, forward_only=False, **options):
    if model is None:
        (model,) = parts(1, config=PipelineConfig(pipeline_dtype=torch.float64))
    infos = get_forward_backward_func(schedule="seq1f1b", num_slices=3)(
        forward_step_func=partial(forward_step, mean=mean, **options),
        data_iterator=sliced(batches(2, TOKENS), LENGTHS[3]),
        model=model,
        num_microbatches=2,
        p2p_communicator=OfJob(total_stages=1, current_stage=0),
        forward_only=forward_only,
    )
    return model, infos


@pytest.mark.parametrize("options", [{}, {"run": again}], ids=["as it is", "checkpointed"])
def test_one_rank_runs_slices_and_evaluates_them(options):
    model, infos = one_rank_step(**options)
    expected = parts(1)
    in_one_process(expected, batches(2, TOKENS), means=True)
    assert_same_gradients(model, expected[0], rtol=1e-10, atol=1e-12)
    assert len(infos) == 6
    _, infos = one_rank_step(forward_only=True)
    assert len(infos) == 6


@pytest.mark.ranks(2, backend="gloo")  # torch finds the collectives of fully_shard by the device type of its tensors
def test_a_module_that_fully_shard_has_sharded_is_named(ranks):
    plan = lower(seq1f1b(1, 2, num_slices=2))
    (model,) = parts(1)
    fully_shard(model.blocks[0].mlp, mesh=init_device_mesh("cpu", (ranks.world_size,)))
    (stage,) = sliced_stages(plan, [model])
    with pytest.raises(StepArgumentError, match=r"fully_shard has sharded \(model.blocks.0.mlp\), .*into 2 slices"):
        PipelineRuntime(plan, {0: stage}, None)


def test_a_mean_over_a_slices_own_tokens_is_named():
    with pytest.raises(PipelineError, match="the mean over a microbatch needs the tokens of all its slices") as caught:
        one_rank_step(mean=False)
    assert isinstance(caught.value.__cause__, StageOutputError)


def test_a_model_without_the_attribute_is_named():
    model = torch.nn.Linear(2, 2)
    model.config = PipelineConfig(pipeline_dtype=torch.float64)
    with pytest.raises(StepArgumentError, match="no module of stage 0 has a current_slice"):
        one_rank_step(model)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_microbatches_with_partial_activation_checkpoints", 0),
        ("no_sync_func", nullcontext),
        ("defer_embedding_wgrad_compute", True),
        ("shard", "step"),
    ],
)
def test_an_option_of_whole_microbatches_is_named(name, value):
    config = PipelineConfig(pipeline_dtype=torch.float64, **{name: value})
    (model,) = parts(1, config=config)
    with pytest.raises(StepArgumentError, match=f"config.{name} is set, which counts whole microbatches"):
        one_rank_step(model)
