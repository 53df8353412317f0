"""Tied parameters: who sums with whom, copies checked to be equal, one gradient with the same bits on all of them."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autograd_kit.gradients import assert_same_bits
from pipegrid.bridges import ModuleGraphError, MultiModulePipelineCommunicator
from pipegrid.core.graph import ModuleGraph
from pipegrid.gradients import ReplicaError
from pipegrid.gradients.reduction.tie_groups import stages_here, tie_groups
from pipegrid.gradients.reduction.tied import COMPARED_EVERY, TieMark, required_ties
from pipegrid.schedules import (
    GradientError,
    PipelineConfig,
    PlanError,
    clip_grad_norm_,
    forward_backward_pipelining_without_interleaving,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    one_f_one_b,
    reduce_gradients,
    tie_parameters,
    verify,
    with_reduce,
)
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, replica_samples
from pipegrid.transport import P2PCommunicator

from ..kit.models import call, in_one_process
from ..kit.words import WORDS, WordStage, word_stages

TIED = {"embedding": (0, 3)}


@pytest.mark.parametrize(
    "plan",
    [
        one_f_one_b(4, 5),
        interleaved_1f1b(2, 4),
        multi_module_1f1b(ModuleGraph({"a": 2, "b": 1, "c": 1}, {"a": ["b", "c"], "b": ["c"]}), 3),
        multi_module_1f1b(ModuleGraph({"model": 4}), 3, placement=[0, 0, 0, 0]),
    ],
    ids=str,
)
def test_adding_the_reduce_later_gives_the_plan_that_lower_gives(plan):
    assert with_reduce(lower(plan), TIED) == lower(plan, tied=TIED)


def test_two_ties_are_reduced_in_one_order_everywhere():
    plan = with_reduce(with_reduce(lower(one_f_one_b(4, 3)), TIED), {"positions": (0, 3)})
    assert verify(plan)
    for position in (0, 3):
        assert [a.group for a in plan.actions(position) if a.group is not None] == ["embedding", "positions"]


@pytest.mark.parametrize(
    ("plan", "tied", "text"),
    [
        (one_f_one_b(4, 2), TIED, "to be done here, and never done"),
        (lower(one_f_one_b(4, 2), tied=TIED), TIED, "has embedding, which a group has already"),
        (lower(one_f_one_b(2, 2)), TIED, "names stage 3; the plan has stages 0..1"),
    ],
)
def test_a_reduce_that_cannot_stand_in_the_plan(plan, tied, text):
    with pytest.raises(PlanError, match=text):
        verify(with_reduce(plan, tied))


def grid(shape, dims, offset=0):
    return HyperCommGrid(shape, dims, rank_offset=offset, world_size=64)


CHAIN = ModuleGraph({"model": 4})
PAIR = ModuleGraph({"images": 2, "language": 2}, {"images": ["language"]})


def groups_of(graph, stages, **grids):
    return [(tie.spec.ranks, sorted(tie.contributing)) for tie in tie_groups("t", stages, graph, grids)]


def test_copies_sum_shard_by_shard_across_stages_and_replicas():
    box = grid([2, 2, 4], ["tp", "dp", "pp"])
    found = groups_of(CHAIN, [0, 3], model=box)
    assert found == [((0, 2, 12, 14), [0, 2, 12, 14]), ((1, 3, 13, 15), [1, 3, 13, 15])]
    assert stages_here([0, 3], CHAIN, {"model": box}, 13) == (3,)


def test_unequal_numbers_of_lanes_are_one_sum():
    found = groups_of(
        PAIR,
        [0, 3],
        images=grid([2, 3, 2], ["pp", "dp", "cp"]),
        language=grid([2, 2], ["dp", "pp"], 12),
    )
    assert found == [((0, 2, 4, 6, 8, 10, 14, 15), [0, 2, 4, 6, 8, 10, 14, 15])]


def test_with_unequal_tp_the_first_tp_rank_of_each_contributes():
    found = groups_of(
        PAIR, [0, 3], images=grid([2, 1, 2], ["tp", "dp", "pp"]), language=grid([1, 2, 2], ["tp", "dp", "pp"], 4)
    )
    assert found == [((0, 1, 6, 7), [0, 6, 7])]


def test_a_rank_with_two_of_the_stages_is_one_member():
    """An encoder on dp 2 over a language model on pp 2: each rank sums its own copies before it sends them."""
    over = ModuleGraph({"encoder": 1, "language": 2}, {"encoder": ["language"]})
    grids = {"encoder": grid([2], ["dp"]), "language": grid([2], ["pp"])}
    assert groups_of(over, [0, 2], **grids) == [((0, 1), [0, 1])]
    assert [stages_here([0, 2], over, grids, rank) for rank in range(2)] == [(0,), (0, 2)]
    crossed = {"encoder": grid([2, 2], ["tp", "dp"]), "language": grid([2, 2], ["pp", "tp"])}
    with pytest.raises(GradientError, match=r"rank 1 holds two of the stages .* the shard \{'tp': 1\} of one and"):
        groups_of(over, [0, 2], **crossed)


def test_stages_and_grids_that_do_not_fit():
    with pytest.raises(ModuleGraphError, match=r"no stage 4; the graph has stages 0\.\.3"):
        groups_of(CHAIN, [0, 4], model=grid([4], ["pp"]))
    with pytest.raises(GradientError, match="has 4 stages in the graph and pp 2 in its grid"):
        groups_of(CHAIN, [0, 3], model=grid([2], ["pp"]))


# ---------------------------------------------------------------------------------------------------------------
# On real ranks.

BATCH, TOKENS, MICROBATCHES, STEPS = 4, 3, 3, 2


def tokens_of(index):
    return torch.randint(WORDS, (BATCH, TOKENS), generator=torch.Generator().manual_seed(index))


def counted_of(index):
    return torch.randint(0, 2, (BATCH, TOKENS), generator=torch.Generator().manual_seed(90 + index)).double()


def loss_of(counted, output, *, per_token):
    if per_token:
        return (output.square().mean(dim=-1) * counted).sum(), counted.sum().long(), None
    return output.square().mean(), None


pipelined = partial(call, forward_backward_pipelining_without_interleaving, count=MICROBATCHES)


def one_process(per_token):
    """The reference: one parameter in both places, SGD; its gradients and norm at the last step."""
    parts = word_stages(2)
    parameters = list(nn.ModuleList(parts).parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    divisor = sum(counted_of(i).sum() for i in range(MICROBATCHES)) if per_token else MICROBATCHES
    for _ in range(STEPS):
        optimizer.zero_grad()
        for index in range(MICROBATCHES):
            in_one_process(parts, [tokens_of(index)], divisor, partial(loss_of, counted_of(index), per_token=per_token))
        optimizer.step()
    norm = torch.cat([parameter.grad.flatten() for parameter in parameters]).norm()
    return parts[0].word, parts[1].layer.weight, norm


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("lanes", "per_token"), [((2, 1), False), ((1, 2), True), ((1, 2), False)], ids=["2-1 mean", "1-2 tok", "1-2 mean"]
)
def test_across_modules_with_unequal_lanes_training_is_that_of_one_process(ranks, lanes, per_token):
    grids = {
        "text": HyperCommGrid([lanes[0]], ["dp"]),
        "head": HyperCommGrid([lanes[1]], ["dp"], rank_offset=lanes[0]),
    }
    graph = ModuleGraph({"text": 1, "head": 1}, {"text": ["head"]})
    here = stages_here([0, 1], graph, grids, ranks.rank)[0]
    for each in grids.values():
        each.create_pg("dp")
    collection = ProcessGroupCollection.from_grid(grids[graph.order[here]])
    stage = WordStage(here, 2)
    tied = tie_parameters("word", {here: stage.word}, stages=[1, 0], grids=grids, graph=graph)
    stage.config = PipelineConfig(
        pipeline_dtype=torch.float64,
        calculate_per_token_loss=per_token,
        strict=ranks.strict_sends,
        deadline=30,
        tied_parameters=[tied],
    )
    communicator = MultiModulePipelineCommunicator(grids, {"text": ["head"]}, stage.config)
    share = replica_samples(BATCH, grids[graph.order[here]])

    def step(indices, model):
        index = next(indices)
        if here == 0:
            return {"text": model(tokens_of(index)[share.start : share.stop])}, None
        counted = counted_of(index)[share.start : share.stop]
        return model(model.received["text"]), partial(loss_of, counted, per_token=per_token)

    train(stage, step, communicator, collection)
    word, weight, norm = one_process(per_token)
    assert torch.allclose(stage.word.grad, word.grad, rtol=1e-11, atol=1e-15)
    if here == 1:
        assert torch.allclose(stage.layer.weight.grad, weight.grad, rtol=1e-11, atol=1e-15)
    for tensor in (stage.word.detach(), stage.word.grad):
        assert_same_bits(tensor)
    assert torch.allclose(clip_grad_norm_(stage, collection, 1e-3), norm, rtol=1e-11)
    communicator.destroy()
    dist.barrier()


def train(stage, step, communicator, collection):
    """Some steps of SGD."""
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        pipelined(model=stage, forward_step_func=step, p2p_communicator=communicator, pg_collection=collection)
        optimizer.step()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("own_group", [False, True], ids=["grids", "embd"])
def test_on_two_replicas_of_one_pipeline_training_is_that_of_one_process(ranks, own_group):
    """The group of a tie made from the grid, over all lanes; or the collection's, with the lanes summed after it."""
    box = HyperCommGrid([2, 2], ["dp", "pp"])
    pp, dp = box.create_pgs(["pp", "dp"])
    collection = ProcessGroupCollection(pp=pp, dp=dp, embd=pp)
    here = box.coords(ranks.rank)["pp"]
    stage = WordStage(here, 2)
    where = {"group": collection.embd} if own_group else {"grids": box}
    tied = tie_parameters("word", {here: stage.word}, stages=[0, 1], **where)
    stage.config = PipelineConfig(pipeline_dtype=torch.float64, strict=ranks.strict_sends, tied_parameters=(tied,))
    communicator = P2PCommunicator(pp, stage.config)
    share = replica_samples(BATCH, box)

    def step(indices, model):
        index = next(indices)
        x = tokens_of(index)[share.start : share.stop] if here == 0 else model.received[0]
        return model(x), partial(loss_of, None, per_token=False)

    train(stage, step, communicator, collection)
    word, _, norm = one_process(False)
    assert torch.allclose(stage.word.grad, word.grad, rtol=1e-11, atol=1e-15)
    for tensor in (stage.word.detach(), stage.word.grad):
        assert_same_bits(tensor)
    assert torch.allclose(clip_grad_norm_(stage, collection, 1e-3), norm, rtol=1e-11)
    communicator.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_hand", [False, True])
def test_gradients_of_two_calls_add_up_where_nothing_but_a_tie_is_reduced(ranks, by_hand):
    """A REDUCE of all that is there would count the first call twice."""
    box = HyperCommGrid([2], ["pp"])
    stage, finalized = WordStage(ranks.rank, 2), []
    stage.config = PipelineConfig(
        pipeline_dtype=torch.float64,
        tied_parameters=(tie_parameters("word", {ranks.rank: stage.word}, stages=[0, 1], grids=box),),
        finalize_model_grads_func=(lambda *_, **__: finalized.append(stage.word.grad.clone())) if by_hand else None,
    )
    communicator = P2PCommunicator(box.create_pg(["pp"]), stage.config)

    def step(indices, model):
        index = next(indices)
        x = tokens_of(index) if ranks.rank == 0 else model.received[0]
        return model(x), partial(loss_of, None, per_token=False)

    held = []
    for _ in range(2):
        pipelined(model=stage, forward_step_func=step, p2p_communicator=communicator)
        held.append(stage.word.grad.clone())
    assert torch.equal(held[1], 2 * held[0])
    if by_hand:
        assert torch.equal(torch.stack(finalized), torch.stack(held))
    communicator.close()


@pytest.mark.ranks(4)
def test_three_lanes_beside_one_keep_the_same_bits_in_float32(ranks):
    """Where each module summed its own lanes, the order of the sums would differ, and so would the last bits."""
    grids = {"a": HyperCommGrid([3], ["dp"]), "b": HyperCommGrid([1], ["dp"], rank_offset=3)}
    graph = ModuleGraph({"a": 1, "b": 1}, {"a": ["b"]})
    stage = int(ranks.rank == 3)
    module = nn.Embedding(50, 3)
    nn.init.ones_(module.weight)
    tied = tie_parameters("word", {stage: module.weight}, stages=[0, 1], grids=grids, graph=graph)
    collection = ProcessGroupCollection(dp=grids["a"].create_pg("dp"))
    gradients = [torch.randn(50, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    if ranks.rank != 2:  # one lane that never used it counts as zero
        module.weight.grad = gradients[ranks.rank].clone()
    tied.reduce()
    reduce_gradients(module, collection, loss_lanes=1)
    expected = sum(gradients[rank].double() for rank in (0, 1, 3))
    assert torch.allclose(module.weight.grad.double(), expected, atol=1e-6)
    assert_same_bits(module.weight)
    norm = clip_grad_norm_(module, collection, 1.0)
    assert torch.allclose(norm, expected.norm(), rtol=1e-6)


@pytest.mark.ranks(4)
def test_tensor_parallel_shards_sum_with_their_like(ranks):
    """tp 2 x pp 2, the vocabulary cut over tp: rank 0 sums with 2, rank 1 with 3; the norm counts both shards."""
    box = HyperCommGrid([2, 1, 2], ["tp", "dp", "pp"])
    tp, dp = box.create_pgs(["tp", "dp"])
    collection = ProcessGroupCollection(tp=tp, dp=dp)
    module = nn.Embedding(4, 3).double()
    nn.init.constant_(module.weight, float(ranks.rank % 2))  # shards differ from each other, not from their copies
    module.weight.tensor_model_parallel = True
    tied = tie_parameters("word", {ranks.rank // 2: module.weight}, stages=[0, 1], grids=box)
    module.weight.grad = torch.full_like(module.weight, 10.0**ranks.rank)
    tied.reduce()
    reduce_gradients(module, collection)
    value = [101.0, 1010.0][ranks.rank % 2]
    assert torch.equal(module.weight.grad, torch.full_like(module.weight, value))
    expected = torch.tensor([101.0] * 12 + [1010.0] * 12).double().norm()
    assert torch.allclose(clip_grad_norm_(module, collection, 1e9), expected, rtol=1e-14)


@pytest.mark.ranks(2)
def test_two_copies_on_one_rank_are_summed_there_and_counted_once(ranks):
    graph = ModuleGraph({"encoder": 1, "language": 2}, {"encoder": ["language"]})
    grids = {"encoder": HyperCommGrid([2], ["dp"]), "language": HyperCommGrid([2], ["pp"])}
    collections = {"encoder": ProcessGroupCollection(dp=grids["encoder"].create_pg("dp"))}
    modules = {"encoder": nn.Linear(3, 3, bias=False).double()}
    copies = {0: modules["encoder"].weight}
    if ranks.rank == 1:
        modules["language"], collections["language"] = nn.Linear(3, 3, bias=False).double(), ProcessGroupCollection()
        copies[2] = modules["language"].weight
    for number, copy in enumerate(copies.values()):
        nn.init.ones_(copy)
        copy.grad = torch.full_like(copy, [1.0, 10.0][ranks.rank] + 100 * number)
    tie_parameters("word", copies, stages=[0, 2], grids=grids, graph=graph).reduce()
    reduce_gradients(modules, collections, loss_lanes=1)
    assert all(torch.equal(copy.grad, torch.full_like(copy, 121.0)) for copy in copies.values())
    norm = clip_grad_norm_(modules, collections, 1e9)
    assert norm.item() == pytest.approx(3 * 121.0, rel=1e-14)
    if ranks.rank == 1:
        with torch.no_grad():
            copies[2] += 0.5
    with pytest.raises(GradientError, match=r"differ from that of rank 0: rank 1 by 0\.5;"):
        tie_parameters("word", copies, stages=[0, 2], grids=grids, graph=graph)


@pytest.mark.ranks(3)
def test_whole_on_two_tp_ranks_beside_one_is_counted_once(ranks):
    grids = {
        "a": HyperCommGrid([2, 1], ["tp", "pp"]),
        "b": HyperCommGrid([1, 1], ["tp", "pp"], rank_offset=2),
    }
    graph = ModuleGraph({"a": 1, "b": 1}, {"a": ["b"]})
    stage = int(ranks.rank == 2)
    module = nn.Embedding(4, 3).double()
    nn.init.ones_(module.weight)
    tied = tie_parameters("word", {stage: module.weight}, stages=[0, 1], grids=grids, graph=graph)
    module.weight.grad = torch.full_like(module.weight, 7.0 if stage == 0 else 0.5)
    tied.reduce()
    assert torch.equal(module.weight.grad, torch.full_like(module.weight, 7.5))
    collection = ProcessGroupCollection(tp=grids["a"].create_pg("tp"))
    expected = torch.full((12,), 7.5).double().norm()
    assert torch.allclose(clip_grad_norm_(module, collection, 1e9), expected, rtol=1e-14)
    module.weight.tensor_model_parallel = True
    with pytest.raises(GradientError, match="is sharded over tp, and the modules that hold it have different tp sizes"):
        tie_parameters("word", {stage: module.weight}, stages=[0, 1], grids=grids, graph=graph)


@pytest.mark.ranks(2)
def test_a_rank_that_never_comes_to_the_reduce_is_waited_for_no_longer_than_the_timeout(ranks):
    parameter = nn.Parameter(torch.ones(3))
    box = HyperCommGrid([2], ["pp"])
    tied = tie_parameters("word", {ranks.rank: parameter}, stages=[0, 1], grids=box, timeout=timedelta(seconds=5))
    if ranks.rank == 0:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out|connection (closed|reset)"):
            tied.reduce()
        assert time.monotonic() - began < 13
    ranks.barrier()


@pytest.mark.ranks(2)
def test_copies_that_differ_are_named_with_ranks_and_difference_on_every_rank(ranks):
    box = HyperCommGrid([2], ["pp"])

    def tie(parameter, name="word"):
        return tie_parameters(name, {ranks.rank: nn.Parameter(parameter)}, stages=[0, 1], grids=box)

    values = torch.ones(5, 3)
    values[4, 2] += 0.25 * ranks.rank
    text = r"'word' differ from that of rank 0: rank 1 by 0\.25; initialize them with"
    with pytest.raises(GradientError, match=text):
        tie(values)
    values = torch.ones(5, 3)
    values[1, 1] = float("nan") if ranks.rank else 1.0
    with pytest.raises(GradientError, match="rank 1 by inf"):
        tie(values)
    with pytest.raises(
        GradientError, match=r"rank 0: torch.float32 of shape \(4, 3\); rank 1: torch.float32 of shape \(5, 3\)"
    ):
        tie(torch.ones(4 + ranks.rank, 3))
    with pytest.raises(
        GradientError, match=r"rank 0: torch.float32 of shape \(2,\); rank 1: torch.bfloat16 of shape \(2,\)"
    ):
        tie(torch.ones(2, dtype=[torch.float32, torch.bfloat16][ranks.rank]))
    values[1, 1] = float("nan")
    assert tie(values).stages == (0, 1)


@pytest.mark.ranks(3)
def test_what_is_tied_wrongly_is_refused_before_anything_is_sent(ranks):
    box = HyperCommGrid([3], ["pp"])
    module = nn.Linear(2, 2)
    with pytest.raises(GradientError, match="this rank holds its stages .*, but copies are for"):
        tie_parameters("w", {} if ranks.rank != 1 else {0: module.weight}, stages=[0, 1, 2], grids=box)
    with pytest.raises(GradientError, match=r"has the stages \[0, 0\]; name two or more stages"):
        tie_parameters("w", {}, stages=[0, 0], grids=box)
    with pytest.raises(GradientError, match="has copies here, and neither grids nor a group to sum them over"):
        tie_parameters("w", {0: module.weight}, stages=[0, 2])
    with pytest.raises(GradientError, match="has grids and a group; give one"):
        tie_parameters("w", {0: module.weight}, stages=[0, 2], grids=box, group=dist.group.WORLD)
    with pytest.raises(GradientError, match=r"stage 0 is of module 'model', which has no grid; .* of \['language'\]"):
        tie_parameters("w", {0: module.weight}, stages=[0, 2], grids={"language": box}, graph=3)
    with pytest.raises(GradientError, match=f"the copy of stage {ranks.rank} is no plain Parameter"):
        tie_parameters("w", {ranks.rank: module.weight.detach()}, stages=[0, 1, 2], grids=box)
    middle = ranks.rank == 1
    nn.init.ones_(module.weight)
    tied = tie_parameters("w", {} if middle else {ranks.rank: module.weight}, stages=[0, 2], grids=box)
    tied.reduce()  # nothing to do in the middle
    assert (tied.stages, tied.copies == ()) == ((0, 2), middle)
    if middle:
        return
    with pytest.raises(GradientError, match="is already tied as 'w'"):
        tie_parameters("v", {ranks.rank: module.weight}, stages=[0, 2], grids=box)


def test_ties_are_settled_before_the_step():
    module = nn.Linear(2, 2)
    module.weight.tied = TieMark("w", over_replicas=True)
    with pytest.raises(GradientError, match=r"is tied as 'w', which config.tied_parameters does not have \(\[\]\)"):
        required_ties(models=[module], config=PipelineConfig(), stages=[0])
    tie = SimpleNamespace(name="w", stages=(0, 1), copies=(module.weight,))
    assert required_ties(models=[module], config=PipelineConfig(tied_parameters=[tie]), stages=[0]) == (tie,)
    with pytest.raises(GradientError, match="'w' is on stage 1, whose model trains none of its copies"):
        required_ties(models=[nn.Linear(1, 1)], config=PipelineConfig(tied_parameters=[tie]), stages=[1])
    module.no_sync = None
    with pytest.raises(GradientError, match="by its REDUCE, and by the model's wrapper as well"):
        required_ties(models=[module], config=PipelineConfig(tied_parameters=[tie]), stages=[0])


@pytest.mark.parametrize("value", [3, ("bow",), {"neck": "bow"}, nn.ModuleList([nn.Linear(2, 2)])], ids=type)
def test_an_attribute_of_a_model_that_is_called_ties_is_the_models_own(value):
    module = nn.Linear(2, 2)
    module.ties, module.number = value, 0
    assert required_ties(models=[module], config=PipelineConfig(), stages=[0]) == ()


def test_a_gradient_whose_reduce_never_ran_is_not_finished():
    module = nn.Linear(2, 2)
    module.weight.tied = TieMark("w", over_replicas=True, summed=True)
    reduce_gradients(module, ProcessGroupCollection())
    with pytest.raises(GradientError, match="tied parameter 'w' in module 'head' was not summed over its copies"):
        reduce_gradients({"head": module}, ProcessGroupCollection())


@pytest.mark.ranks(2)
def test_copies_that_drift_apart_are_an_error_after_the_first_update_and_every_so_many_sums(ranks):
    grid = HyperCommGrid([2], ["pp"])
    weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    word = tie_parameters("word", {ranks.rank: weight}, stages=[0, 1], grids=grid)
    before, after = weight.detach().clone(), weight.detach() + 1e-6 * ranks.rank
    word.reduce()
    weight.data.copy_(after)
    text = r"copies of tied parameter 'word' have drifted apart .* checksums are rank 0: \w{16}; rank 1: \w{16}\. "
    with pytest.raises(ReplicaError, match=text):
        word.reduce()
    weight.data.copy_(before)
    word.require_equal()
    weight.data.copy_(after)
    for _ in range(COMPARED_EVERY - 1):
        word.reduce()
    with pytest.raises(ReplicaError, match=text):
        word.reduce()
