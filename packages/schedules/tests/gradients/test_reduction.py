"""Who reduces is settled before the step: what would be wrong in silence is refused aloud."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipegrid.core.graph import ModuleGraph
from pipegrid.gradients.errors import GradientError
from pipegrid.gradients.reduction.policy import gradient_policy
from pipegrid.monitor.collectives import Waiting
from pipegrid.schedules.megatron.config import PipelineConfig
from plan_kit.groups import Group, Groups

from ..kit.of_job import OfJob

GRAPH = ModuleGraph({"images": 1, "language": 1}, {"images": ["language"]})
TWO_CHUNKS = ModuleGraph({"images": 2, "language": 1}, {"images": ["language"]})


class Wrapped(nn.Linear):
    def no_sync(self):
        raise NotImplementedError


def communicator_of(shapes):
    """Of modules with grids of these shapes, dp and cp."""
    return OfJob(dims={name: dict(zip(("dp", "cp"), shape, strict=True)) for name, shape in shapes.items()})


def settle(*, model=None, chunks=None, grids=None, collection=None, stage=0, graph=GRAPH, frozen=(), **options):
    communicator = None if grids is None else communicator_of(grids)
    models, config = chunks or {stage: model or nn.Linear(1, 1)}, PipelineConfig(**options)
    policy = gradient_policy(
        models=models,
        config=config,
        communicator=communicator,
        graph=graph,
        pg_collection=collection,
        frozen=frozen,
    )
    return policy.of_step(models, config, collection, Waiting()).finish


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"calculate_per_token_loss": True}, "divided by the tokens of the job, but nothing sums and divides them"),
        (
            {"grids": {"images": (2, 1), "language": (1, 1)}},
            r"'images' must be summed over its replicas \(dp x cp: 2\) and divided by 1, but nothing sums",
        ),
        (
            {"grids": {"images": (1, 1), "language": (2, 1)}},
            r"'images' must be summed over its replicas \(dp x cp: 1\) and divided by 2, but nothing sums",
        ),
        (
            {"grids": {"images": (2, 1), "language": (1, 1)}, "collection": Groups()},
            r"'images' has 2 replicas \(dp x cp\), but their group in pg_collection has 1",
        ),
        (
            {"grids": {"images": (2, 1), "language": (1, 1)}, "model": Wrapped(1, 1), "collection": Groups()},
            r"\(dp x cp: 2\) and divided by 1, but Wrapped averages over them",
        ),
        (
            {"model": Wrapped(1, 1), "calculate_per_token_loss": True},
            "the tokens of the job, but Wrapped averages",
        ),
    ],
)
def test_what_would_be_wrong_is_refused(arguments, text):
    with pytest.raises(GradientError, match=text):
        settle(**arguments)


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(GradientError, match=r"module 'images' has 2 cp ranks, but no dp_cp group"):
        settle(collection=Groups(dp=Group(2), cp=Group(2)))
    with pytest.raises(GradientError, match="collections is 3; it must have the group `dp`"):
        settle(collection=3)
    with pytest.raises(GradientError, match="no process groups for module 'images'"):
        settle(collection={"language": Groups()})


def test_a_finalizer_is_asked_first_and_told_the_tokens():
    calls = []

    def finalize(models, num_tokens, pg_collection):
        calls.append((len(models), None if num_tokens is None else int(num_tokens), pg_collection))

    settle(finalize_model_grads_func=finalize)({0: torch.tensor(7)})
    settle(finalize_model_grads_func=finalize, calculate_per_token_loss=True)({0: torch.tensor(7)})
    settle(finalize_model_grads_func=finalize, calculate_per_token_loss=True)({0: None})
    assert calls == [(1, None, None), (1, 7, None), (1, 0, None)]


def test_one_lane_of_two_of_the_loss_is_divided_by_two():
    """The encoder's one lane saw the sum of two lanes' losses, each a mean over its own half."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    settle(model=model, grids={"images": (1, 1), "language": (2, 1)}, collection=Groups())({0: None})
    assert model.weight.grad.item() == 0.5


def test_chunks_that_share_a_parameter_finish_it_once():
    """Of a V-shaped schedule, the first rank has both the embedding and the head."""
    first, last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    last.weight = first.weight
    first.weight.grad = torch.ones_like(first.weight)
    grids = {"images": (1, 1), "language": (2, 1)}
    settle(chunks={0: first, 1: last}, graph=TWO_CHUNKS, grids=grids, collection=Groups())({0: None, 1: None})
    assert first.weight.grad.item() == 0.5
    told = []

    def finalize(models, *_, **__):
        told.extend(models)

    settle(chunks={0: first, 1: last}, graph=TWO_CHUNKS, finalize_model_grads_func=finalize)({0: None, 1: None})
    assert told == [first, last]


def test_all_chunks_reduce_by_themselves_or_none():
    with pytest.raises(GradientError, match="some chunks of a module reduce by themselves"):
        settle(chunks={0: Wrapped(1, 1), 1: nn.Linear(1, 1)}, graph=TWO_CHUNKS)
    settle(chunks={0: Wrapped(1, 1), 1: Wrapped(1, 1)}, graph=TWO_CHUNKS)({0: None, 1: None})


def test_modules_on_one_rank_count_the_tokens_of_the_job_together():
    """A colocated encoder has no loss of its own; the language model's tokens divide the gradients of both."""
    counted = []

    def finalize(models, num_tokens, pg_collection):
        counted.append((len(models), int(num_tokens)))

    both = {0: nn.Linear(1, 1), 1: nn.Linear(1, 1)}
    finish = settle(chunks=both, finalize_model_grads_func=finalize, calculate_per_token_loss=True)
    finish({0: None, 1: torch.tensor(7)})
    assert counted == [(2, 7)]


def test_losses_on_different_lanes_are_each_a_mean_over_their_own():
    """All gradients are divided by the larger number of lanes, so the loss of the smaller module counts for less."""
    graph = ModuleGraph({"a": 1, "b": 1, "c": 1}, {"c": ["a", "b"]})
    policy = gradient_policy(
        models={graph.stage(name, 0): nn.Linear(1, 1) for name in ("b", "c")},
        config=PipelineConfig(),
        communicator=communicator_of({"a": (2, 1), "b": (1, 1), "c": (1, 1)}),
        graph=graph,
        pg_collection=Groups(),
    )
    assert policy.loss_lanes == 2
    assert list(policy.loss_factors.values()) == [2.0, 2.0]


def test_a_frozen_module_needs_no_groups():
    grids = {"images": (2, 1), "language": (1, 1)}
    with pytest.raises(GradientError, match=r"'images' must be summed .*, but nothing sums"):
        settle(grids=grids)
    settle(grids=grids, frozen=("images",))({0: None})


def test_means_of_fully_shard_fit_a_finalizer_only_over_the_lanes_of_the_loss(monkeypatch):
    monkeypatch.setattr("pipegrid.gradients.reduction.policy.fsdp_divisors", lambda model: {id(model): None})
    finalize = {"finalize_model_grads_func": lambda *_, **__: None}
    settle(grids={"images": (2, 1), "language": (2, 1)}, **finalize)({0: None})
    with pytest.raises(GradientError, match="divided by 1, but fully_shard averages over them"):
        settle(grids={"images": (2, 1), "language": (1, 1)}, **finalize)
    with pytest.raises(GradientError, match=r"\(dp x cp: 2\) and divided by 1, but fully_shard averages"):
        settle(grids={"images": (2, 1), "language": (1, 1)})
