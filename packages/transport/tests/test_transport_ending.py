"""The end of device lanes by programs that do not close them: dropped, or destroyed by torch."""

import gc
import time

import pytest
import torch
import torch.distributed as dist

from pipegrid.fake_nccl import FakeGroup
from pipegrid.topology import torch_compat
from pipegrid.transport import LaneSpec, open_lanes

from .two_ranks import DEADLINE, THERE, config, until

STANDING = torch.empty(4, device="meta")
LATE_SECONDS = 0.5


def opened(*specs, **settings):
    return open_lanes(specs, config=config(**settings), agreed=dict.fromkeys(specs, STANDING))


def carry(lane, rank):
    handle = lane.isend(torch.ones(4)) if rank == lane.spec.source else lane.irecv()
    handle.wait()
    handle.synchronize()


@pytest.mark.ranks(2, backend="fake_nccl")
def test_dropped_lanes_are_aborted_and_hold_nobody(ranks, monkeypatch):
    destroyed, shutdown = [], FakeGroup.shutdown

    def noted(group):
        if not group.aborted:
            destroyed.append(group.group_name)
        shutdown(group)

    lanes = opened(THERE)
    group = lanes[THERE].group
    carry(lanes[THERE], ranks.rank)
    ranks.barrier()
    if ranks.rank == 0:
        monkeypatch.setattr(FakeGroup, "shutdown", noted)
        began = time.monotonic()
        del lanes
        gc.collect()
        assert time.monotonic() - began < DEADLINE / 2
        until(lambda: group.aborted)
        until(lambda: not torch_compat.is_alive(group))
        assert destroyed == []
    ranks.barrier()  # the other side has its lanes all the while
    if ranks.rank == 1:
        lanes.abort("the other side dropped its lanes")
        lanes.close()


@pytest.mark.ranks(2, backend="fake_nccl")
def test_a_peer_that_leaves_after_torch_destroyed_all_groups_is_no_failure(ranks):
    lanes = opened(THERE)
    group = lanes[THERE].group
    carry(lanes[THERE], ranks.rank)
    wire = lanes[THERE].wire
    ranks.barrier()
    dist.destroy_process_group()
    if ranks.rank == 1:
        wire.cut()  # as the end of the process does
    else:
        until(lambda: lanes.failed)  # the fake fails the test for an abort
    lanes.close()
    assert group.aborted
    assert not group._end._aborted.is_set()


@pytest.mark.ranks(3, backend="fake_nccl")
def test_a_peer_that_leaves_while_torch_destroys_other_groups_is_no_failure(ranks):
    # Torch destroys by name, latest first: rank 1 has ended its group with rank 2 and waits for rank 0.
    first, second = LaneSpec(0, 1, "there"), LaneSpec(1, 2, "there")
    mine = [spec for spec in (first, second) if ranks.rank in spec.pair]
    lanes = opened(*mine)
    for spec in mine:
        carry(lanes[spec], ranks.rank)
    ranks.barrier()
    if ranks.rank == 2:
        dist.destroy_process_group(lanes[second].group)
        lanes[second].wire.cut()
    if ranks.rank == 0:
        time.sleep(LATE_SECONDS)  # rank 1 has lost rank 2 meanwhile, and is in the destroy of the group with this one
    dist.destroy_process_group()
    lanes.close()


@pytest.mark.ranks(2, backend="fake_nccl")
def test_a_side_that_failed_is_not_waited_for(ranks):
    lanes = opened(THERE, deadline=300.0)
    ranks.barrier()
    began = time.monotonic()
    if ranks.rank == 0:
        lanes.abort("a failure elsewhere")
        ranks.barrier()
    else:
        until(lambda: lanes[THERE].wire.has_end_notice())
        assert lanes.failed
        ranks.barrier()
    lanes.close()
    assert lanes.failed
    assert time.monotonic() - began < 60
