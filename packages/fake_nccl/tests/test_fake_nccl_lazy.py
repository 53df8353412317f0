"""The fake NCCL by the rules of nccl-lazy: what differs from nccl2, each rule with wrong code that it catches."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipegrid.fake_nccl import LazyGroup

from .waiting import until

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
LAZY = pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="lazy")
BOTH = pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=pytest.mark.ranks(2, backend="fake_nccl", fake_nccl=m)) for m in ("nccl2", "lazy")],
)
SHORT = timedelta(seconds=0.5)


def batch(group, *operations):
    """One batch of (verb, tensor, peer)."""
    group._start_coalescing(CPU)
    for verb, tensor, peer in operations:
        getattr(group, verb)([tensor], peer, 0)
    return group._end_coalescing(CPU)


def violations(ranks):
    found = list(ranks.fake_device.violations)
    ranks.fake_device.violations.clear()
    return found


@LAZY
def test_lone_messages_are_on_a_communicator_of_the_pair_and_batches_on_the_groups(ranks):
    group, other = dist.new_group([0, 1]), 1 - ranks.rank
    assert type(group) is LazyGroup
    x, y = torch.full((2,), float(ranks.rank)), torch.zeros(2)
    for verb, tensor in (("send", x), ("recv", y)) if ranks.rank == 0 else (("recv", y), ("send", x)):
        getattr(group, verb)([tensor], other, 0).wait()
    assert y.tolist() == [other] * 2
    batch(group, ("send", x, other), ("recv", y, other)).wait()
    dist.all_reduce(y, group=group)
    assert [launch.group for launch in ranks.fake_device.launches] == [
        *[f"{group.group_name}/0-1/0"] * 2,
        *[group.group_name] * 2,
    ]


@pytest.mark.ranks(3, backend="fake_nccl", fake_nccl="lazy")
def test_messages_of_two_peers_do_not_wait_for_each_other(ranks):
    group = dist.new_group([0, 1, 2])
    x = torch.zeros(1)
    if ranks.rank == 0:
        first = group.recv([x], 1, 0)
        group.recv([torch.zeros(1)], 2, 0).wait()
        assert not first.is_completed()
        ranks.barrier()
        first.wait()
    elif ranks.rank == 1:
        pair = group._pair(0)  # connected, and silent
        ranks.barrier()
        pair.send([x], 0, 0).wait()
    else:
        group.send([x], 0, 0).wait()
        ranks.barrier()


@LAZY
def test_the_first_lone_message_holds_the_host_until_the_peer_has_come_to_one(ranks):
    group = dist.new_group([0, 1])
    if ranks.rank == 0:
        began = time.monotonic()
        group.send([torch.ones(1)], 1, 0)
        assert time.monotonic() - began > 0.2
    else:
        time.sleep(0.4)
        group.recv([torch.zeros(1)], 0, 0).wait()


@BOTH
def test_a_batch_never_meets_a_lone_message(ranks, mode):
    """Wrong: one end of a message in a batch, the other end alone; right by the rules of nccl2."""
    impatient = mode == "lazy" and ranks.rank == 1  # the batch of rank 0 must outlive the wait of rank 1
    group = dist.new_group([0, 1], timeout=SHORT if impatient else timedelta(seconds=60))
    if ranks.rank == 0:
        work = batch(group, ("send", torch.ones(2), 1))
        if mode == "nccl2":
            work.wait()
        else:
            ranks.barrier()
            assert not work.is_completed()
            group.abort()
    elif mode == "nccl2":
        group.recv([torch.zeros(2)], 0, 0).wait()
    else:
        with pytest.raises(dist.DistBackendError, match=r"rank 1, .*0-1/0: ranks \[0\] did not come .* within 0.5 s"):
            group.recv([torch.zeros(2)], 0, 0)
        ranks.barrier()


@BOTH
def test_a_lone_message_is_not_ordered_after_a_batch(ranks, mode):
    """Wrong: what a batch receives is sent on alone without a wait; right on nccl2's one stream."""
    group = dist.new_group([0, 1])
    x = torch.ones(2)
    if ranks.rank == 0:
        ranks.fake_device.waits_hold = False
        received = batch(group, ("recv", x, 1))
        sent = group.send([x], 1, 0)
        assert until(lambda: received.is_completed() and sent.is_completed())
    else:
        batch(group, ("send", x, 0)).wait()
        group.recv([x], 0, 0).wait()
    found = violations(ranks)
    races = [text for text in found if text.startswith("race: entry 1 (p2p)")]
    assert len(races) == (mode == "lazy" and ranks.rank == 0), found


@pytest.mark.ranks(3, backend="fake_nccl", fake_nccl="lazy")
def test_a_rank_with_more_pairs_of_the_same_ranks_in_their_groups_never_meets_its_peer(ranks):
    """Wrong: lone messages in groups of two ranks, which are (0, 1) in each, with different numbers of groups."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2], timeout=SHORT)]
    x = torch.ones(1)
    if ranks.rank < 2:
        (groups[0].send if ranks.rank == 0 else groups[0].recv)([x], 1 - ranks.rank, 0).wait()
    if ranks.rank > 0:
        there = 3 - ranks.rank
        with pytest.raises(dist.DistBackendError, match=rf"0-1/{int(ranks.rank == 1)}: ranks \[{there}\] did not come"):
            (groups[1].send if ranks.rank == 1 else groups[1].recv)([x], there - 1, 0)
    ranks.barrier()


@LAZY
def test_an_abort_of_the_group_waits_for_a_lone_message_that_is_under_way(ranks):
    """Wrong: a group's abort to end its lone messages; the primary goes first, and its free waits for them."""
    group = dist.new_group([0, 1])
    pair = group._pair(1 - ranks.rank)
    if ranks.rank == 0:
        work = group.recv([torch.zeros(1)], 1, 0)
        aborting = threading.Thread(target=group.abort, daemon=True)
        aborting.start()
        aborting.join(0.3)
        assert aborting.is_alive()
        pair.abort()
        aborting.join(10)
        assert not aborting.is_alive()
        assert work.is_completed()
        with pytest.raises(dist.DistBackendError, match="was aborted on rank 0"):
            group.send([torch.zeros(1)], 1, 0)
    ranks.barrier()
