"""The interleaved step function: chunks by rank, with the gradients of one process."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autograd_kit.gradients import assert_same_gradients, difference, gradients_of
from pipegrid.core.errors import StepArgumentError
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators import interleaved_1f1b
from pipegrid.plans.verify.verify import verify
from pipegrid.schedules import TakeTurns, chain, forward_backward_with_schedule, stage_places, step_plan
from pipegrid.schedules.megatron import forward_backward_pipelining_with_interleaving
from pipegrid.schedules.megatron.config import PipelineConfig
from pipegrid.schedules.megatron.counts import get_pp_rank_microbatches
from pipegrid.schedules.megatron.place import PlanNeeds, interleaved_proof
from pipegrid.schedules.megatron.step_functions import get_forward_backward_func
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.transport import P2PCommunicator
from pipegrid.transport.errors import P2PUsageError

from ..kit.hooks import Hook, noting
from ..kit.models import (
    Part,
    call,
    forward_step,
    in_one_process,
    mean_loss,
    microbatch,
    step_on,
    token_loss,
    uneven,
)

own_step = partial(forward_step, data=uneven)
interleaved = partial(call, forward_backward_pipelining_with_interleaving, forward_step_func=own_step)


def reference(stages, microbatches, *, loss=mean_loss):
    """The parts with their gradients, and the infos; a mean over microbatches, or a sum over tokens."""
    parts = [Part(stage) for stage in range(stages)]
    divisor = microbatches if loss is mean_loss else 1
    return parts, in_one_process(parts, map(uneven, range(microbatches)), divisor, loss)


def run(ranks, chunks, microbatches, network, *, config=None, **changes):
    config = config or PipelineConfig()
    parts = [Part(stage, config) for stage in range(ranks * chunks)]
    return parts, network.calls(
        interleaved, [parts[rank::ranks] for rank in range(ranks)], count=microbatches, **changes
    )


SHAPES = [(2, 2, 2), (2, 2, 6), (2, 3, 4), (3, 2, 3), (4, 2, 8), (2, 2, 5, 3), (2, 2, 7, 5), (3, 3, 9, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("overlap", [False, True], ids=["late", "overlapped"])
def test_gradients_and_infos_are_those_of_one_process(shape, overlap, network):
    ranks, chunks, microbatches, *group = shape
    config = PipelineConfig(
        microbatch_group_size_per_vp_stage=group[0] if group else None,
        overlap_p2p_comm=overlap,
        deallocate_pipeline_outputs=True,
    )
    parts, returned = run(ranks, chunks, microbatches, network, config=config)
    expected, infos = reference(ranks * chunks, microbatches)
    assert returned == [[]] * (ranks - 1) + [infos]
    assert_same_gradients(parts, expected)
    assert all(lane.empty() for lane in network.lanes.values())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "dualpipe_v", "zero_bubble_v"])
def test_pairs_of_a_schedule_have_the_gradients_of_one_process(ranks, schedule):
    """On two replicas, whose gradients are reduced from the last backward on."""
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    pp, _ = grid.create_pgs(["pp", "dp"])
    here, placement, turns, called = grid.coords(ranks.rank), stage_places(schedule, 2), TakeTurns(), []

    def run_pair(pair, forward, backward):
        called.append(pair)
        turns(pair, forward, backward)

    for function in (None, run_pair):
        config = PipelineConfig(
            pipeline_dtype=torch.float64, deadline=60, overlap_moe_expert_parallel_comm=True, pair_func=function
        )
        communicator = P2PCommunicator(pp, config, placement=placement)
        parts = [Part(stage, config) for stage in range(4)]
        own = [stage for stage, place in enumerate(placement) if place == here["pp"]]
        models = [copy.deepcopy(parts[stage]) for stage in own]
        for _ in range(2):
            for model in models:
                model.zero_grad()
            call(
                forward_backward_with_schedule,
                model=models,
                count=6,
                forward_step_func=step_on(here["dp"]),
                p2p_communicator=communicator,
                pg_collection=ProcessGroupCollection.from_grid(grid),
                schedule=schedule,
            )
        in_one_process(parts, [microbatch(index, lane) for lane in range(2) for index in range(6)], 12)
        assert difference(gradients_of(models), gradients_of([parts[stage] for stage in own])) < 1e-12
        communicator.close()
    assert called
    assert all(str(forward.kind) == "F" and str(other.kind) in "BI" for forward, other in called)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_overlapped_expert_communication_has_one_more_forward_in_flight(shape, network):
    ranks, chunks, microbatches, *group = shape
    started = [[] for _ in range(ranks)]

    def before(action):
        if action.kind in "FB":
            started[action.stage % ranks].append(action.kind)

    config = PipelineConfig(
        microbatch_group_size_per_vp_stage=group[0] if group else None,
        overlap_moe_expert_parallel_comm=True,
        hooks=(Hook(before),),
    )
    parts, returned = run(ranks, chunks, microbatches, network, config=config)
    expected, infos = reference(ranks * chunks, microbatches)
    assert returned == [[]] * (ranks - 1) + [infos]
    assert_same_gradients(parts, expected)
    for rank, kinds in enumerate(started):
        place = network.communicator(ranks, rank)
        counts = get_pp_rank_microbatches(
            microbatches,
            chunks,
            group[0] if group else None,
            overlap_moe_expert_parallel_comm=True,
            p2p_communicator=place,
        )
        total, _, warmup, _ = counts
        assert kinds.index("B") == min(warmup + 1, total)


def test_forward_only_runs_no_backward(network):
    parts, returned = run(2, 2, 4, network, forward_only=True)
    assert returned[-1] == reference(4, 4)[1]
    assert all(parameter.grad is None for part in parts for parameter in part.parameters())
    assert network.messages == 3 * 4


def test_finalize_is_called_once_with_all_chunks_and_the_tokens(network):
    calls = {}

    def finalize(models, num_tokens, pg_collection):
        calls[id(models[0])] = (models, num_tokens.item(), pg_collection)

    config = PipelineConfig(calculate_per_token_loss=True, finalize_model_grads_func=finalize)
    parts, _ = run(
        *(2, 2, 4), network, config=config,
        forward_step_func=partial(own_step, loss=token_loss),
    )  # fmt: skip
    tokens = sum(len(uneven(index)) for index in range(4))
    assert calls[id(parts[0])] == ([parts[0], parts[2]], 0, None)
    assert calls[id(parts[1])] == ([parts[1], parts[3]], tokens, None)
    assert_same_gradients(parts, reference(4, 4, loss=token_loss)[0])


def context(name, calls):
    return partial(noting, calls, f"enter {name}", f"leave {name}")


def synced(network, **options):
    """What rank 1 of 2 does around its backwards of 2 microbatches."""
    calls = []

    def before(action):
        if action.kind == "B":
            calls.append(str(action))

    quiet = PipelineConfig()
    watched = PipelineConfig(hooks=(Hook(before),), **{name: make(calls) for name, make in options.items()})
    parts = [Part(stage, watched if stage % 2 else quiet) for stage in range(4)]
    network.calls(interleaved, [parts[0::2], parts[1::2]], count=2)
    return calls


def test_one_no_sync_context_is_left_for_the_last_backward_of_each_chunk(network):
    calls = synced(network, no_sync_func=lambda c: context("all", c))
    assert calls == ["enter all", "3B0", "3B1", "leave all", "enter all", "1B0", "1B1", "leave all"]


def test_each_chunk_may_have_its_own_functions(network):
    calls = synced(
        network,
        no_sync_func=lambda c: [context("first", c), context("second", c)],
    )
    assert calls == ["enter first", "enter second", "3B0", "3B1", "leave second", "1B0", "1B1", "leave first"]
    calls = synced(
        network,
        no_sync_func=lambda c: context("all", c),
        grad_sync_func=lambda c: [lambda _: c.append("sync first"), lambda _: c.append("sync second")],
        param_sync_func=lambda c: [lambda _: c.append("parameters first"), None],
    )
    assert calls == [
        "parameters first",
        *("enter all", "3B0", "3B1", "1B0", "1B1", "leave all"),
        *("sync first", "sync second"),
    ]


def test_windows_of_partial_checkpoints_count_all_chunks(network):
    seen = []

    def step(iterator, model, checkpoint):
        seen.append(checkpoint)
        return own_step(iterator, model)

    config = PipelineConfig(num_microbatches_with_partial_activation_checkpoints=2)
    run(2, 2, 4, network, config=config, forward_step_func=step)
    # 8 forwards on each rank; 5 of them before the first backward on rank 0, 3 on rank 1.
    assert sorted(seen) == sorted([n % 5 >= 2 for n in range(8)] + [n % 3 >= 2 for n in range(8)])


def refused(network, *, config=None, **changes):
    """A call with these arguments beside good ones."""
    model = [Part(stage, config or PipelineConfig()) for stage in (0, 2)]
    return interleaved(**{"model": model, "p2p_communicator": network.communicator(2, 0), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"p2p_communicator": None}, "p2p_communicator is None; it must be a Communicator"),
        ({"adjust_tensor_shapes_fn": print}, "config.hidden_size is None; it must"),
        ({"model": nn.Linear(1, 1)}, "model is Linear.*; interleaving takes a list of at least two chunks"),
        ({"model": [nn.Linear(1, 1)]}, "model is a list of 1; interleaving takes"),
        ({"data_iterator": [None]}, "2 stages of module 'model', and data_iterator is a list of 1; give"),
        ({"data_iterator": iter(())}, "2 stages of module 'model', and data_iterator is .*iterator; give"),
        ({"num_microbatches": 1}, "1 microbatches in groups of 2 over 2 ranks: .* ranks <= group size <= microbatches"),
        ({"num_microbatches": 3}, "3 microbatches in groups of 2 over 2 ranks: .* a last group that is full"),
        ({"config": PipelineConfig(microbatch_group_size_per_vp_stage=5)}, "4 microbatches in groups of 5"),
        ({"config": PipelineConfig(microbatch_group_size_per_vp_stage=1)}, "4 microbatches in groups of 1"),
        ({"num_microbatches": "4"}, "num_microbatches is '4'; it must be an integer"),
        (
            {"config": SimpleNamespace(microbatch_group_size_per_vp_stage=0)},
            "microbatch_group_.* is 0; it must be an integer",
        ),
        (
            {"config": SimpleNamespace(microbatch_group_size_per_vp_stage=2.0)},
            "microbatch_group_size_per_vp_stage is 2.0",
        ),
        ({"config": PipelineConfig(no_sync_func=[print])}, r"config.no_sync_func is a list of 1 and .* 2 chunks"),
    ],
)
def test_bad_arguments_are_named(changes, message, network):
    with pytest.raises((StepArgumentError, P2PUsageError), match=message):
        refused(network, **changes)
    assert network.messages == 0


def test_a_graph_of_modules_is_refused(network):
    graph = ModuleGraph({"images": 1, "language": 1}, {"images": ["language"]})
    with pytest.raises(StepArgumentError, match="serves a graph of modules"):
        refused(network, p2p_communicator=network.communicator(2, 0, graph, (0,)))


def test_the_communicators_chunks_are_those_of_the_model(network):
    communicator = network.communicator(2, 0)
    communicator.virtual_pipeline_model_parallel_size = 3
    with pytest.raises(StepArgumentError, match="runs 3 stages of module 'model', and model is a list of 2"):
        refused(network, p2p_communicator=communicator)


def test_the_step_function_follows_the_number_of_chunks():
    assert get_forward_backward_func(4, 2) is forward_backward_pipelining_with_interleaving
    with pytest.raises(StepArgumentError, match="vp_size=2 with pp_size=1"):
        get_forward_backward_func(1, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_each_extra_warmup_forward_is_one_more_chunk_live(ranks, chunks):
    def live(microbatches, group, extra):
        """Per position, how many chunks are live at most; a chunk is a share of a microbatch."""
        plan = interleaved_1f1b(ranks, microbatches, num_chunks=chunks, group_size=group, extra_warmup=extra)
        return [round(peak * plan.num_chunks) for peak in verify(plan).peak_live]

    for group in (ranks, 2 * ranks):
        usual = live(4 * ranks + 4, group, 0)
        for extra in (1, 2):
            assert live(4 * ranks + 4, group, extra) == [count + extra for count in usual]
    for microbatches, group in ((1, 1), (ranks, 1), (ranks, ranks), (2 * ranks + 1, ranks + 1)):
        usual, more = live(microbatches, group, 0), live(microbatches, group, 1)
        assert all(0 <= count - before <= 1 for before, count in zip(usual, more, strict=True))
        assert max(more) <= microbatches * chunks


@pytest.mark.parametrize("bad", [-1, 1.0, "1", True])
def test_an_extra_warmup_is_a_number_of_forwards(bad):
    with pytest.raises(PlanError, match=f"extra_warmup is {bad!r}; it must be an integer of at least 0"):
        interleaved_1f1b(2, 4, extra_warmup=bad)


def test_a_plan_is_made_and_proved_once():
    assert interleaved_proof(2, 2, PlanNeeds(4), 2, "late", False) is interleaved_proof(
        2, 2, PlanNeeds(4), 2, "late", False
    )


def test_the_plan_of_a_step_has_its_pairs():
    for name in ("interleaved_1f1b", "dualpipe_v", "zero_bubble_v"):
        placement = tuple((place,) for place in stage_places(name, 2))
        options = {"placement": placement, "schedule": name}
        assert any(step_plan(chain(4), 6, overlap=True, **options).pairs)
        assert not any(step_plan(chain(4), 6, **options).pairs)
    with pytest.raises(PlanError, match="1f1b has no pairs of a forward and a backward"):
        step_plan(chain(2), 4, overlap=True)
    with pytest.raises(PlanError, match="dualpipe_v has pairs of one module that is trained"):
        graph = ModuleGraph({"a": 1, "b": 4}, {"a": ["b"]})
        step_plan(graph, 6, placement=((0,), (1,), (2,), (2,), (1,)), schedule="dualpipe_v", overlap=True)
