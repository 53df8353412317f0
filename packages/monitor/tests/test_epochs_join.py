"""New processes of dead ranks over a simulated store: they come in once, with the state, wherever processes die."""

import random

import pytest

from monitor_kit.epoch_world import LATER, World
from pipegrid.monitor.epochs.heartbeat import Heartbeat
from pipegrid.monitor.epochs.records import Epoch
from pipegrid.monitor.epochs.stored_epochs import StoredEpochs

from .test_epochs_model import crashes

KEYS = 8
BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.nightly) for block in range(1, 100))]


def world_with_comers(seed, **settings):
    """A job whose ranks die, of some of which one process or two come after the first, which may die as well."""
    rng = random.Random(seed)
    ranks = rng.randint(2, 4)
    dying = crashes(rng, ranks, rng.randint(1, ranks - 1), longest=40)
    comers = []
    for rank, _ in [*dying]:
        comers.append(rank + LATER)
        if rng.random() < 0.5:
            comers.append(rank + 2 * LATER)
            dying[rank + LATER, rng.randrange(40)] = rng.choice(["before", "after"])
    return World(ranks, KEYS, rng, crashes=dying, comers=comers, chaos=1500, **settings)


GONE = ("failed: the job has ended", "failed: ranks [")  # of a process that comes too late


def require_good_ends(world, seed, *, also=()):
    for process, end in world.ends.items():
        good = end in ("finished", "fenced") or (process >= LATER and end.startswith(GONE)) or end.startswith(also)
        assert good, (seed, process, world.ends)


def run(world, seed, **options):
    world.run()
    world.check()
    require_good_ends(world, seed, **options)
    return world


@pytest.mark.parametrize("block", BLOCKS)
def test_new_processes_come_in_whoever_dies_when(block):
    came = finished = 0
    for seed in range(block * 30, block * 30 + 30):
        world = run(world_with_comers(seed), seed)
        came += len(world.joins)
        finished += sum(world.ends.get(process) == "finished" for process, _ in world.joins)
    assert came > 10
    assert finished > 5, came


def test_new_processes_finish_if_none_dies_again():
    """Turns are fair, and no attempt fails by itself."""
    for seed in range(15):
        rng = random.Random(seed)
        rank = rng.randrange(3)
        world = World(3, 12, rng, crashes={(rank, rng.randrange(25)): "after"}, comers=[rank + LATER], chaos=0, fails=0)
        run(world, seed)
        if rank in world.died and world.joins:
            assert world.ends == dict.fromkeys(sorted({0, 1, 2, rank + LATER} - {rank}), "finished"), (seed, world.ends)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_process_that_comes_before_the_old_one_has_ended_waits_for_that(block):
    """With wrong suspicions, by which a process that lives on is outside of the job."""
    for seed in range(block * 30, block * 30 + 30):
        rng = random.Random(1000 + seed)
        ranks = rng.randint(2, 4)
        dying = crashes(rng, ranks, rng.randint(0, ranks - 1), longest=40)
        comers = [rank + LATER * nth for rank in rng.sample(range(ranks), 2) for nth in (1, 2)]
        world = World(ranks, KEYS, rng, crashes=dying, comers=comers, early=0.01, accuse=0.01, chaos=1500)
        run(world, seed, also=("failed: rank",))
        state = [end for end in world.ends.values() if "no rank with the state" in end]
        assert len(state) == 0 or not any(end == "finished" for end in world.ends.values())


def test_a_duplicate_of_a_rank_that_lives_ends_and_the_job_does_not_notice():
    for seed in range(8):
        world = World(3, 40, random.Random(seed), comers=[1 + LATER], early=1.0, chaos=0, fails=0)
        run(world, seed)
        assert [world.ends[rank] for rank in range(3)] == ["finished"] * 3
        assert world.ends[1 + LATER].startswith((*GONE, "fenced")), world.ends
        assert world.results == []


def test_ranks_that_compute_together_come_in_together():
    for seed in range(20):
        rng = random.Random(seed)
        first, late = rng.sample([0, 1], 2)
        dying = {(first, rng.randrange(25)): "after"}
        world = World(4, 16, rng, crashes=dying, comers=[first + LATER, late + LATER], chaos=0, fails=0.0)
        world.retire = lambda dead: {rank ^ 1 for rank in dead}
        world.run()
        world.check()
        for _, result in world.joins:
            members = result.epoch.members
            assert all(rank ^ 1 in members for rank in members), result
        if world.joins:
            assert [world.ends[rank] for rank in (2, 3)] == ["finished"] * 2
            assert {process for process, _ in world.joins} == {LATER, 1 + LATER}
    assert world.joins


def test_the_state_of_the_job_is_gone_with_its_last_rank():
    """The new process of one of two ranks does not get it, since the other one dies: all know."""
    seen = 0
    for seed in (*range(35), 147, 228, 240, 275, 345):  # one in eighty comes to it, the last five do
        rng = random.Random(seed)
        dying = {(0, rng.randrange(100)): "after", (1, rng.randrange(40)): "before"}
        world = World(2, KEYS, rng, crashes=dying, comers=[LATER, 1 + LATER], fails=0.3)
        world.run()
        world.check()
        ends = [world.ends[process] for process, _ in world.joins if process in world.ends]
        seen += any("no rank with the state" in end for end in ends)
        assert not ("finished" in ends and any("no rank" in end for end in ends)), world.ends
    assert seen


def test_a_process_that_never_gets_the_state_leaves_and_the_job_goes_on():
    left = 0
    for seed in range(20):
        rng = random.Random(seed)
        dying, comers = {(1, rng.randrange(25)): "after"}, [1 + LATER]
        world = World(3, 20, rng, crashes=dying, comers=comers, faulty=comers, chaos=0, fails=0)
        run(world, seed)
        left += len(world.joins)
        assert [world.ends[rank] for rank in (0, 2)] == ["finished"] * 2
        assert world.ends.get(1 + LATER) != "finished"
    assert left > 10


@pytest.mark.parametrize("kind", [pytest.param("before", marks=pytest.mark.nightly), "after"])
def test_a_new_process_dies_at_each_of_its_operations_and_the_next_one_comes_in(kind):
    operation = points = 0
    while True:
        dying = {(1, 6): "after", (1 + LATER, operation): kind}
        comers = [1 + LATER, 1 + 2 * LATER]
        world = World(3, 40, random.Random(3), crashes=dying, comers=comers, chaos=0, fails=0.0)
        run(world, operation)
        if 1 + LATER not in world.died or operation > 120:  # in its third key by then
            break
        assert world.ends == {0: "finished", 2: "finished", 1 + 2 * LATER: "finished"}, (operation, world.ends)
        assert world.joins[-1][0] == 1 + 2 * LATER
        operation += 3
        points += 1
    assert points >= 30


def test_a_round_of_the_heartbeat_is_of_the_epoch_in_which_it_began(monkeypatch):
    """Rank 1 has died, its new process has come in, and rank 2 has died, all in one call of the store."""
    old, new = Epoch(0, (0, 1, 2)), Epoch(1, (0, 1), {0: 1, 1: 2, 2: 1})
    lost = []

    def heartbeats(stored, rank, incarnation, amount=0):
        if rank == 1:
            heartbeat.epoch = new
        return 7

    monkeypatch.setattr(StoredEpochs, "asking", lambda stored: {})
    monkeypatch.setattr(StoredEpochs, "heartbeats", heartbeats)
    heartbeat = Heartbeat(StoredEpochs(None), 0, 1, old, 1.0, 60.0, lambda why: None)
    monkeypatch.setattr(Heartbeat, "lost", lambda heartbeat, rank, why, epoch=None: lost.append((rank, epoch.number)))
    for now in range(50):
        heartbeat.epoch = old
        heartbeat.send(heartbeat._sent_at + now)
    assert set(lost) == {(1, 0), (2, 0)}
