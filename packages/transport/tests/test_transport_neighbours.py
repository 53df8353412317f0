"""The handshake before a step: the rank that comes second to the step sees a difference; neither rank waits."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import Edge, P2PCommunicator, P2PConfig, P2PPeerError
from pipegrid.transport.control.handshake import Handshake, PeerHandshake, StoreCalls


class Plain(dist.HashStore):
    """A store that cannot read several values at once, as a file store is."""

    def has_extended_api(self):
        return False

    def multi_get(self, keys):
        raise NotImplementedError


@pytest.fixture(params=[dist.HashStore, Plain], ids=["several at once", "one by one"])
def store(request):
    return request.param()


def ends(store, *pairs):
    """Per rank its neighbours, for connections between those pairs of ranks."""
    ranks = sorted({rank for pair in pairs for rank in pair})
    return [
        Handshake(store, [PeerHandshake.between(rank, sum(pair) - rank, f"{pair}") for pair in pairs if rank in pair])
        for rank in ranks
    ]


def test_the_second_to_come_sees_the_difference_and_the_first_when_it_looks_again(store):
    first, second = ends(store, (0, 1))
    assert first.begin("3 microbatches") == {}
    assert second.begin("2 microbatches") == {0: "3 microbatches"}
    assert first.others() == {1: "2 microbatches"}


def test_those_who_run_the_same_hear_nothing(store):
    chain = ends(store, (0, 1), (1, 2))
    for what in ("a", "a", "b", "a", "a"):
        assert [rank.begin(what) for rank in chain] == [{}, {}, {}]
        assert [rank.others() for rank in chain] == [{}, {}, {}]


@pytest.mark.parametrize("changed", [0, 1])
def test_a_change_on_one_rank_alone_is_seen_by_whoever_comes_second(store, changed):
    chain = ends(store, (0, 1))
    for rank in chain:
        rank.begin("a")
    chain[0].begin("b" if changed == 0 else "a")
    seen = chain[1].begin("b" if changed == 1 else "a")
    assert seen == {0: "b" if changed == 0 else "a"}


def test_each_neighbour_is_compared(store):
    _, middle, _ = chain = ends(store, (0, 1), (1, 2))
    chain[0].begin("left")
    chain[2].begin("right")
    assert middle.begin("middle") == {0: "left", 2: "right"}


def test_one_that_is_ahead_says_what_it_ran_in_the_others_step(store):
    ahead, behind = ends(store, (0, 1))
    for what in ("a", "b", "a", "b", "b", "c"):
        ahead.begin(what)
    seen = [behind.begin(what) for what in ("a", "b", "a", "x")]
    assert seen == [{}, {}, {}, {0: "b"}]


def test_what_is_said_does_not_grow(store):
    chain = ends(store, (0, 1))
    for step in range(100):
        for rank in chain:
            rank.begin(f"{step % 2}")
    assert max(len(store.get(f"(0, 1)/{rank}")) for rank in range(2)) < 50


@pytest.mark.ranks(3)
@pytest.mark.parametrize("communicators", ["separate", "shared"])
def test_the_neighbours_of_an_edge_are_the_ranks_at_its_ends(ranks, communicators):
    config = P2PConfig(pipeline_dtype=torch.float32, communicators=communicators)
    P2PCommunicator(dist.group.WORLD, config).close()
    first, second = (P2PCommunicator(dist.group.WORLD, config) for _ in range(2))
    around = [Edge(stage, stage + 1) for stage in range(2) if ranks.rank in (stage, stage + 1)]
    peers = {one.peer for one in first.neighbours(around).peers}
    assert peers == {rank for rank in range(3) if abs(rank - ranks.rank) == 1}
    # What is said over one communicator is not heard over another, nor what was said over one that is gone.
    first.neighbours(around).begin(f"rank {ranks.rank}")
    ranks.barrier()
    assert second.neighbours(around).begin("the same") == {}
    assert first.neighbours(around).others() == {peer: f"rank {peer}" for peer in peers}
    ranks.barrier()
    for communicator in (first, second):
        communicator.close()


def test_a_store_that_does_not_answer_is_a_typed_error_by_the_deadline_and_later_at_once():
    released = threading.Event()
    store = Plain()
    store.set = lambda *_: released.wait(30.0)
    stuck = Handshake(store, [PeerHandshake.between(0, 1, "pair")], StoreCalls(0.2))
    for limit in (5.0, 0.1):
        began = time.monotonic()
        with pytest.raises(P2PPeerError, match=r"no answer from the store for 0\.2 s before a step"):
            stuck.begin("a step")
        assert time.monotonic() - began < limit
    released.set()
    stuck.calls.end()


def test_a_store_that_is_gone_is_a_typed_error():
    store = Plain()

    def gone(*_):
        raise dist.DistNetworkError("connection reset")

    store.set = gone
    with pytest.raises(P2PPeerError, match=r"the store was lost before a step.*connection reset"):
        Handshake(store, [PeerHandshake.between(0, 1, "pair")], StoreCalls(5.0)).begin("a step")
