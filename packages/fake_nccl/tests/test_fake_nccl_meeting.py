"""Members of a group of the fake NCCL that do not come, to connect or to its end: wrong code, and how it is caught."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipegrid.testing.clock import moved_clock

from .waiting import ended, running

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
SHORT = timedelta(seconds=0.5)
EVERY = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.ranks(3, backend="fake_nccl", fake_nccl=mode))
        for mode in ("streams", "nccl2", "lazy")
    ],
)
PAIR = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.ranks(2, backend="fake_nccl", fake_nccl=mode))
        for mode in ("streams", "nccl2", "lazy")
    ],
)


@EVERY
def test_a_group_that_a_member_does_not_make_ends_at_its_deadline_and_names_the_member(ranks, mode):
    if ranks.rank != 1:
        with pytest.raises(dist.DistBackendError, match=rf"rank {ranks.rank}, .*: ranks \[1\] did not come to connect"):
            dist.new_group([0, 1, 2], timeout=SHORT)
    ranks.barrier()


@pytest.mark.parametrize(  # groups of the others are connected when they are made
    "mode",
    [pytest.param(m, marks=pytest.mark.ranks(3, backend="fake_nccl", fake_nccl=m)) for m in ("streams", "legacy")],
)
def test_an_eager_connect_of_some_members_names_the_others(ranks, mode):
    group = dist.new_group([0, 1, 2], timeout=SHORT)
    if ranks.rank == 2:
        with pytest.raises(dist.DistBackendError, match=r"ranks \[0, 1\] did not come to connect within 0.5 s"):
            group.eager_connect_single_device(CPU)
        assert group.connected == []
    ranks.barrier()


@PAIR
def test_a_deadline_of_hours_is_over_when_the_clock_has_moved(ranks, mode):
    with moved_clock() as clock:
        texts = []

        def connect():
            try:
                dist.new_group([0, 1], timeout=timedelta(hours=3))
            except dist.DistBackendError as error:
                texts.append(str(error))

        if ranks.rank == 0:
            connecting = running(connect)
            while not ended(connecting, 0.05) and clock.passed < 1000 * 3600:
                clock.move(1800.0)
            assert clock.passed >= 3 * 3600
            (text,) = texts
            assert "ranks [1] did not come to connect within 10800 s" in text
        ranks.barrier()


@pytest.mark.ranks(3, backend="fake_nccl", fake_nccl="nccl2")
@pytest.mark.parametrize("order", ["connecting", "not modelled", "a batch for each peer"])
def test_a_first_batch_connects_with_all_of_its_peers(ranks, order):
    """Wrong: a batch with two peers, one of which comes to it only after the other one's message has ended."""
    device, group = ranks.fake_device, dist.new_group([0, 1, 2], timeout=timedelta(minutes=5))
    tensors = []  # which a batch does not hold
    batches = {
        0: [[("send", 1), ("send", 2)]],
        1: [[("recv", 0)], [("send", 2)]],
        2: [[("recv", 0), ("recv", 1)]],
    }[ranks.rank]
    if order == "a batch for each peer":
        batches = [[message] for each in batches for message in each]
    for connects in [False] * (order != "connecting") + [True] * (order != "not modelled"):
        device.connects_in_batches = connects
        for messages in batches:
            group._start_coalescing(CPU)
            for verb, peer in messages:
                tensors.append(torch.zeros(1))
                getattr(group, verb)(tensors[-1:], peer, 0)
            work = group._end_coalescing(CPU)
            if order == "connecting":
                ended(running(work.entry.ended.wait), 0.5)
                assert not work.is_completed()
                ranks.barrier()
                group.abort()
                ranks.barrier()
                return
            work.wait()
    while device.unfinished():
        time.sleep(0.002)
    ranks.barrier()


@PAIR
def test_a_destroy_of_one_member_hangs_until_the_other_one_comes(ranks, mode):
    group = dist.new_group([0, 1])
    if ranks.rank == 0:
        ending = running(group.shutdown)
        assert not ended(ending, 0.3)
        ranks.barrier()
        assert ended(ending)
    else:
        ranks.barrier()
        group.shutdown()
    ranks.barrier()


@PAIR
def test_a_destroy_that_the_other_member_never_comes_to_ends_by_an_abort(ranks, mode):
    group = dist.new_group([0, 1])
    if ranks.rank == 0:
        ending = running(group.shutdown)
        time.sleep(0.1)
        assert not ended(ending, 0.1)
        group.abort()
        assert ended(ending)
        group.shutdown()  # meets no one
        assert ranks.fake_device.violations == []
    ranks.barrier()


@PAIR
def test_an_abort_after_a_destroy_is_a_violation(ranks, mode):
    group = dist.new_group([0, 1])
    group.shutdown()
    group.abort()
    (text,) = ranks.fake_device.violations
    assert "after its destroy" in text
    ranks.fake_device.violations.clear()


@pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="lazy")
def test_a_lazy_destroy_meets_the_peer_of_each_pair_before_the_group(ranks):
    group = dist.new_group([0, 1])
    pair = group._pair(1 - ranks.rank)
    if ranks.rank == 0:
        ending = running(group.shutdown)
        assert not ended(ending, 0.2)
        ranks.barrier()
        assert not ended(ending, 0.2)  # the pair has met, the primary has not
        ranks.barrier()
        assert ended(ending)
    else:
        ranks.barrier()
        pair.shutdown()
        ranks.barrier()
        group.shutdown()
    ranks.barrier()
