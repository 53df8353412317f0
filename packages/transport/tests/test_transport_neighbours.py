"""What ranks say of a step over their lanes: each hears what the other runs, in order, and neither waits to say it."""

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import Edge, P2PCommunicator, P2PConfig, P2PPeerError

from .two_ranks import heard, say, until

SECONDS = 20.0


def around(ranks):
    """The edges of this rank in a chain."""
    return [Edge(stage, stage + 1) for stage in range(ranks.world_size - 1) if ranks.rank in (stage, stage + 1)]


def chain(ranks, **settings):
    return P2PCommunicator(dist.group.WORLD, P2PConfig(pipeline_dtype=torch.float32, deadline=SECONDS, **settings))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("length", [1, 507, 508, 3000])
def test_each_hears_what_the_other_runs_however_long_it_is(ranks, length):
    with chain(ranks) as communicator:
        neighbours = communicator.neighbours(around(ranks))
        for step in range(4):
            what = f"{step}" * length
            own = what if step != 2 else f"{what}, rank {ranks.rank}"
            say(neighbours, own)
            assert heard(neighbours) == ({} if step != 2 else {1 - ranks.rank: f"{what}, rank {1 - ranks.rank}"})


@pytest.mark.ranks(3)
def test_each_neighbour_is_compared(ranks):
    with chain(ranks) as communicator:
        neighbours = communicator.neighbours(around(ranks))
        for _ in range(3):
            say(neighbours, "the same")
            assert heard(neighbours) == {}
        say(neighbours, f"rank {ranks.rank}")
        assert heard(neighbours) == {one.peer: f"rank {one.peer}" for one in neighbours}


@pytest.mark.ranks(2)
def test_one_that_is_ahead_is_compared_step_by_step(ranks):
    with chain(ranks) as communicator:
        neighbours = communicator.neighbours(around(ranks))
        said = {0: ["a", "b", "a"], 1: ["a", "b", "x"]}
        for step, what in enumerate(said[ranks.rank]):
            if ranks.rank == 1:
                ranks.barrier()
            say(neighbours, what)
            if ranks.rank == 0:  # which has said it before the other begins
                ranks.barrier()
            assert heard(neighbours) == ({} if step < 2 else {1 - ranks.rank: said[1 - ranks.rank][step]})


@pytest.mark.ranks(2)
def test_a_look_waits_for_no_rank_and_works_on_a_lane_that_has_ended(ranks):
    with chain(ranks) as communicator:
        neighbours = communicator.neighbours(around(ranks))
        if ranks.rank == 0:
            say(neighbours, "first")
            assert neighbours[0].difference() is None
        ranks.barrier()
        if ranks.rank == 1:
            say(neighbours, "second")
            until(lambda: neighbours[0].difference() == "first")
        ranks.barrier()
        if ranks.rank == 0:
            until(lambda: neighbours[0].difference() == "second")
            communicator.abort("a difference")
            assert neighbours[0].difference() == "second"
        ranks.barrier()


@pytest.mark.ranks(2)
def test_a_neighbour_that_has_ended_its_lanes_is_a_typed_error(ranks):
    with chain(ranks) as communicator:
        neighbours = communicator.neighbours(around(ranks))
        ranks.barrier()
        if ranks.rank == 1:
            communicator.abort("the stage failed")
        else:
            with pytest.raises(P2PPeerError, match="the stage failed"):
                say(neighbours, "a step")
                heard(neighbours)
        ranks.barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("communicators", ["separate", "shared"])
def test_the_neighbours_of_an_edge_are_the_ranks_at_its_ends(ranks, communicators):
    chain(ranks, communicators=communicators).close()
    first, second = (chain(ranks, communicators=communicators) for _ in range(2))
    peers = {one.peer for one in first.neighbours(around(ranks))}
    assert peers == {rank for rank in range(3) if abs(rank - ranks.rank) == 1}
    # What is said over one communicator is not heard over another, nor what was said over one that is gone.
    say(first.neighbours(around(ranks)), f"rank {ranks.rank}")
    ranks.barrier()
    say(second.neighbours(around(ranks)), "the same")
    assert heard(second.neighbours(around(ranks))) == {}
    assert heard(first.neighbours(around(ranks))) == {peer: f"rank {peer}" for peer in peers}
    ranks.barrier()
    for communicator in (first, second):
        communicator.close()
