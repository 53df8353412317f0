"""Receives that a step posts before their turn: a sender need not wait for a receiver that is late."""

import pytest
import torch
import torch.distributed as dist

from pipegrid.schedules import PipelineRuntime, lower, one_f_one_b
from pipegrid.transport import Direction, Edge, P2PCommunicator, P2PConfig

from ..kit.stages import Scale

MICROBATCHES = 5
THERE = Edge(0, 1)


def posted(ranks, steps=1, **settings):
    """Per step on rank 1, the receives of activations that were posted before each receive of the plan."""
    found = []
    config = P2PConfig(pipeline_dtype=torch.float64, deadline=60.0, **settings)
    with P2PCommunicator(dist.group.WORLD, config) as communicator:
        plan = lower(one_f_one_b(2, MICROBATCHES))
        runtime = PipelineRuntime(plan, {ranks.rank: Scale(plan, ranks.rank)}, communicator)
        lane = communicator.lane(THERE, Direction.FORWARD)
        seen = []
        runtime.register("RECV_F", lambda _, run: (seen.append(lane.received), run()))
        for step in range(steps):
            runtime.step()
            found.append([count - step * MICROBATCHES for count in seen])
            seen.clear()
            if ranks.rank == 1:  # none of the next step
                assert lane.received == (step + 1) * MICROBATCHES
    return found if ranks.rank == 1 else None


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(("settings", "ahead"), [({}, 1), ({"receives_ahead": 3}, 3), ({"receives_ahead": 0}, 0)])
def test_receives_of_the_step_are_posted_before_their_turn_and_none_of_the_next(ranks, settings, ahead):
    found = posted(ranks, steps=3, **settings)
    assert found in (None, [[min(turn + ahead, MICROBATCHES) for turn in range(MICROBATCHES)]] * 3)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("settings", [{"strict": True}, {"communicators": "shared"}], ids=["strict", "shared"])
def test_where_the_order_of_transfers_counts_each_is_posted_in_its_turn(ranks, settings):
    assert posted(ranks, receives_ahead=2, **settings) in (None, [list(range(MICROBATCHES))])


@pytest.mark.ranks(2, backend="gloo")
def test_an_evaluation_posts_none_of_its_gradients(ranks):
    config = P2PConfig(pipeline_dtype=torch.float64, deadline=60.0)
    with P2PCommunicator(dist.group.WORLD, config) as communicator:
        plan = lower(one_f_one_b(2, MICROBATCHES))
        runtime = PipelineRuntime(plan, {ranks.rank: Scale(plan, ranks.rank)}, communicator)
        for _ in range(2):
            runtime.eval()
        assert communicator.lane(THERE, Direction.BACKWARD).received == 0
        runtime.step()
        assert communicator.lane(THERE, Direction.BACKWARD).received == (MICROBATCHES if ranks.rank == 0 else 0)
