"""Ranks that are about to run different steps are told so before a message of one is taken for one of the other."""

import re
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from pipegrid.schedules import (
    DisagreementError,
    PipelineConfig,
    PipelineError,
    PipelineRuntime,
    forward_backward_pipelining_without_interleaving,
    gpipe,
    lower,
    one_f_one_b,
)
from pipegrid.transport import P2PCommunicator, P2PConfig

from ..kit.models import WIDTH, Part, call, forward_step
from ..kit.stages import Scale

# What a rank would wait for messages that do not come, if nobody told it better.
DEADLINE = 60.0


def pipeline(**settings):
    return P2PCommunicator(dist.group.WORLD, P2PConfig(pipeline_dtype=torch.float64, deadline=DEADLINE, **settings))


def runtime(ranks, communicator, microbatches, generator=one_f_one_b):
    """The runtime of this rank, and the microbatches that its stage has computed."""
    plan, seen = lower(generator(ranks.world_size, microbatches)), []
    return PipelineRuntime(plan, {ranks.rank: Scale(plan, ranks.rank, seen.append)}, communicator), seen


def disagreement(ranks, function, *, late=None):
    """The text of the error that ``function`` ends with, on every rank, and soon; rank ``late`` calls it last."""
    ranks.barrier()
    if ranks.rank == late:
        time.sleep(0.5)
    began = time.monotonic()
    with pytest.raises(DisagreementError) as found:
        function()
    assert time.monotonic() - began < DEADLINE / 2
    return str(found.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strict", [False, True])
def test_different_numbers_of_microbatches_are_named_on_both_ranks(ranks, strict):
    counts = [3, 2]
    with pipeline(strict=strict) as communicator:
        mine, _ = runtime(ranks, communicator, counts[ranks.rank])
        text = disagreement(ranks, mine.step)
        for rank, count in enumerate(counts):
            assert f"rank {rank}" in text
            assert f"a step of {count} microbatches" in text
        assert "Give every rank the same plan" in text
        with pytest.raises(PipelineError, match="failed before: .* do not run the same step"):
            mine.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [0, 1])
def test_who_comes_second_to_a_step_computes_nothing_of_it(ranks, late):
    with pipeline() as communicator:
        mine, seen = runtime(ranks, communicator, 2 + ranks.rank)
        disagreement(ranks, mine.step, late=late)
        if ranks.rank == late:
            assert seen == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("changed", [0, 1])
def test_a_count_that_changes_on_one_rank_alone_is_found_in_that_step(ranks, changed):
    with pipeline() as communicator:
        before, _ = runtime(ranks, communicator, 3)
        for _ in range(3):
            before.step()
        after = runtime(ranks, communicator, 4)[0] if ranks.rank == changed else before
        text = disagreement(ranks, after.step)
        assert "a step of 3 microbatches" in text
        assert "a step of 4 microbatches" in text


@pytest.mark.ranks(2)
def test_the_step_functions_say_so_too(ranks):
    def step(microbatches):
        call(
            forward_backward_pipelining_without_interleaving,
            model=model,
            count=microbatches,
            forward_step_func=partial(forward_step, data=lambda _: torch.ones(2, WIDTH, dtype=torch.float64)),
            p2p_communicator=communicator,
        )

    model = Part(0, PipelineConfig(pipeline_dtype=torch.float64))
    with pipeline() as communicator:
        step(4)
        # As many messages either way: three steps of two, two of three.
        text = disagreement(ranks, lambda: step(3 - ranks.rank))
        assert "a step of 3 microbatches" in text
        assert "a step of 2 microbatches" in text


@pytest.mark.ranks(2)
def test_a_step_and_an_evaluation_are_not_the_same(ranks):
    with pipeline() as communicator:
        mine, _ = runtime(ranks, communicator, 3)
        mine.eval()
        mine.step()
        text = disagreement(ranks, mine.step if ranks.rank == 0 else mine.eval)
        assert "a step of 3 microbatches" in text
        assert "an evaluation of 3 microbatches" in text


@pytest.mark.ranks(2)
def test_equal_counts_under_different_plans_are_not_the_same(ranks):
    with pipeline() as communicator:
        mine, _ = runtime(ranks, communicator, 3, [one_f_one_b, gpipe][ranks.rank])
        text = disagreement(ranks, mine.step)
        assert len(set(re.findall(r"a step of 3 microbatches \(plan (\w{12})\)", text))) == 2


@pytest.mark.ranks(3)
def test_a_rank_that_agrees_with_its_neighbour_is_told_why_the_step_ends(ranks):
    with pipeline() as communicator:
        mine, _ = runtime(ranks, communicator, 3 if ranks.rank == 0 else 2)
        ranks.barrier()
        with pytest.raises((DisagreementError, PipelineError)) as found:
            mine.step()
        assert "the ranks do not run the same step" in str(found.value)
        assert isinstance(found.value, DisagreementError) or ranks.rank == 2


@pytest.mark.ranks(3)
def test_ranks_that_agree_are_left_alone(ranks):
    with pipeline() as communicator:
        (three, _), (four, seen) = (runtime(ranks, communicator, count) for count in (3, 4))
        for verb in (three.eval, three.step, four.step, three.step, three.step, four.eval, four.eval, four.step):
            verb()
        assert len(seen) == 4 * 4
