"""Epochs over a simulated store: any interleaving, a crash at any operation of the store, wrong suspicions."""

import random

import pytest

from monitor_kit.epoch_world import World
from pipegrid.monitor.epochs import heartbeat


def crashes(rng, ranks, count, *, longest=60):
    """A crash of ``count`` ranks, each at an operation of its own."""
    return {(rank, rng.randrange(longest)): rng.choice(["before", "after"]) for rank in rng.sample(range(ranks), count)}


def some_of(blocks):
    """The first half in every run."""
    return [*range(blocks // 2), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(blocks // 2, blocks))]


@pytest.mark.parametrize("block", some_of(8))
def test_survivors_agree_and_go_on_whoever_dies_when(block):
    for seed in range(block * 40, block * 40 + 40):
        rng = random.Random(seed)
        ranks = rng.randint(2, 4)
        world = World(ranks, 3, rng, crashes=crashes(rng, ranks, rng.randint(0, ranks - 1)))
        world.run()
        world.check()
        assert len(world.ends) + len(world.died) == ranks
        assert set(world.ends.values()) <= {"finished", "fenced"}, (seed, world.ends)
        if not world.died:
            assert world.ends, seed


@pytest.mark.parametrize("block", some_of(4))
def test_wrong_suspicions_fence_and_never_split(block):
    for seed in range(block * 40, block * 40 + 40):
        rng = random.Random(1000 + seed)
        ranks = rng.randint(2, 4)
        world = World(ranks, 3, rng, crashes=crashes(rng, ranks, rng.randint(0, ranks - 1)), accuse=0.02)
        world.run()
        world.check()
        assert set(world.ends.values()) <= {"finished", "fenced"}, (seed, world.ends)


@pytest.mark.parametrize("block", some_of(4))
def test_a_rank_that_gives_up_ends_all_at_once(block):
    for seed in range(block * 40, block * 40 + 40):
        rng = random.Random(2000 + seed)
        ranks = rng.randint(2, 4)
        quitter = rng.randrange(ranks)
        some = {
            here: when for here, when in crashes(rng, ranks, rng.randint(0, ranks - 1)).items() if here[0] != quitter
        }
        world = World(ranks, 3, rng, crashes=some, gives_up=(quitter, rng.randrange(4)))
        world.run()
        world.check()
        assert world.ends[quitter] != "finished" or world.gives_up[1] >= 3
        for rank, end in world.ends.items():
            assert end in ("finished", "fenced") or "out of memory" in end, (seed, rank, end)


@pytest.mark.parametrize("block", some_of(4))
def test_a_vote_that_fails_at_its_deadline_fails_for_all(block):
    for seed in range(block * 40, block * 40 + 40):
        rng = random.Random(3000 + seed)
        world = World(3, 3, rng, crashes=crashes(rng, 3, 1), deadline=rng.choice([0.1, 0.5, 2.0]), fails=0.3)
        world.run()
        world.check()
        failed = [end for end in world.ends.values() if end.startswith("failed")]
        assert all("did not vote" in end for end in failed), world.ends


@pytest.mark.parametrize("kind", ["before", "after"])
@pytest.mark.parametrize("first", [None, (1, 4)])  # with another death before, so that many are during the vote
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_dies_at_each_of_its_operations(rank, first, kind):
    """One schedule, in turns, and each point of it at which a process may end."""
    operation, points = 0, 0
    while True:
        crashes = {(rank, operation): kind} if first is None else {first: kind, (rank, operation): kind}
        world = World(3, 3, random.Random(5), crashes=crashes, chaos=0, fails=0.0)
        world.run()
        world.check()
        assert world.ends == dict.fromkeys(sorted({0, 1, 2} - world.died), "finished"), (operation, world.ends)
        if rank not in world.died:
            break
        operation += 1
        points += 1
    assert points >= (20 if first is None else 60)


@pytest.mark.parametrize("block", some_of(2))
def test_slow_ranks_are_never_lost_while_their_heartbeats_go_on(block):
    """Turns are fair, and the clock is that of the heartbeats."""
    for seed in range(block * 20, block * 20 + 20):
        world = World(4, 4, random.Random(seed), chaos=0, fails=0.2)
        world.run()
        world.check()
        assert set(world.ends.values()) == {"finished"}
        assert not any(result.dead for *_, result in world.results)


@pytest.mark.parametrize("block", some_of(2))
def test_tensor_parallel_peers_retire_with_the_dead(block):
    for seed in range(block * 30, block * 30 + 30):
        rng = random.Random(seed)
        world = World(4, 3, rng, crashes=crashes(rng, 4, 1), chaos=0, retire=lambda dead: {rank ^ 1 for rank in dead})
        world.run()
        world.check()
        for dead in world.died:
            if any(dead in result.dead for *_, result in world.results):
                assert world.ends[dead ^ 1] == "retired"
                assert {world.ends[rank] for rank in range(4) if rank >> 1 != dead >> 1} == {"finished"}


def test_a_living_rank_watches_past_the_dead_ones_behind_it(monkeypatch):
    """With one rank to watch each, and no other news of deaths than silence."""
    monkeypatch.setattr(heartbeat, "WATCHED", 1)
    for seed in range(30):
        rng = random.Random(seed)
        dying = {
            (rank, rng.randrange(30)): "after" for rank in rng.sample([[1, 2], [1, 2, 3], [3, 4, 0], [4, 0]], 1)[0]
        }
        world = World(5, 3, rng, crashes=dying, chaos=0, told=0.0)
        world.run()
        world.check()
        assert world.ends == dict.fromkeys(sorted(set(range(5)) - world.died), "finished"), (seed, world.ends)
