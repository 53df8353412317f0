"""The end of groups: destroyed together within a deadline, aborted past it, and never both."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from pipegrid.topology import (
    GroupConnectionError,
    GroupCreationTimeoutError,
    GroupSpec,
    abort_group,
    create_groups,
    destroy_groups,
    discard_groups,
    torch_compat,
)

SECONDS = 30.0
two_ranks = pytest.mark.ranks(2, backend="fake_nccl")  # whose destroy meets the other member, as NCCL's does


def create(*labels):
    specs = [GroupSpec((0, 1), label, shared=False) for label in labels]
    return create_groups(specs, timeout=timedelta(seconds=SECONDS))


@two_ranks
def test_members_that_come_at_different_times_destroy_together(ranks):
    groups = create("a", "b", "c")
    time.sleep(0.3 * ranks.rank)
    began = time.monotonic()
    destroy_groups(groups, seconds=SECONDS)
    assert time.monotonic() - began < SECONDS / 2
    assert not any(map(torch_compat.is_alive, groups.values()))
    ranks.barrier()


@two_ranks
def test_a_member_that_does_not_come_holds_a_destroy_no_longer_than_its_deadline(ranks):
    groups = create("a", "b", "c")
    if ranks.rank == 0:
        began = time.monotonic()
        destroy_groups(groups, seconds=0.3)
        assert 0.3 <= time.monotonic() - began < SECONDS / 2
        deadline = time.monotonic() + SECONDS
        while any(map(torch_compat.is_alive, groups.values())):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    ranks.barrier()
    if ranks.rank == 1:
        discard_groups(groups)
        assert not any(map(torch_compat.is_alive, groups.values()))


@two_ranks
def test_what_torch_has_destroyed_is_not_aborted(ranks):
    (group,) = create("a").values()
    dist.destroy_process_group(group)
    abort_group(group)  # the fake fails the test for an abort of its own
    discard_groups([group])
    destroy_groups([group])
    ranks.barrier()


@two_ranks
def test_a_destroy_under_way_is_seen_from_another_thread(ranks):
    (group,) = create("a").values()
    assert not torch_compat.is_destroying()
    if ranks.rank == 0:
        thread = threading.Thread(target=dist.destroy_process_group, args=(group,))
        thread.start()
        deadline = time.monotonic() + SECONDS
        while not torch_compat.is_destroying():
            assert time.monotonic() < deadline
    ranks.barrier()  # the other member comes now
    if ranks.rank == 1:
        dist.destroy_process_group(group)
    else:
        thread.join(SECONDS)
        assert not torch_compat.is_destroying()


@pytest.mark.ranks(3, backend="fake_nccl")
def test_a_member_that_dies_while_the_backend_connects_does_not_hold_the_others(ranks, monkeypatch):
    helper, dead = torch_compat._c10d._new_process_group_helper, threading.Event()

    def hangs(*given, **options):
        if ranks.rank != 2:  # rank 2 waits in its backend, and then perhaps for the others to say that they connected
            dead.wait()
        return helper(*given, **options)

    monkeypatch.setattr(torch_compat._c10d, "_new_process_group_helper", hangs)
    monkeypatch.setattr(torch_compat, "_is_of_device", lambda backend: ranks.rank != 2)
    bound = dist.group.WORLD.bound_device_id
    began = time.monotonic()
    errors = (GroupCreationTimeoutError, GroupConnectionError) if ranks.rank == 2 else GroupCreationTimeoutError
    with pytest.raises(errors) as raised:
        create_groups([GroupSpec((0, 1, 2), "a")], timeout=timedelta(seconds=1))
    assert time.monotonic() - began < SECONDS / 2
    assert dist.group.WORLD.bound_device_id == bound
    if ranks.rank != 2:
        assert f"rank {ranks.rank} waited 1 s for the backend to connect group 'a' of ranks [0, 1, 2]" in str(
            raised.value
        )
    dead.set()
    ranks.barrier()
