"""The watchdog and the heartbeat monitor of nccl-legacy on the fake NCCL: wrong code, and the end of the process."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipegrid.fake_nccl import LegacyRules
from pipegrid.fake_nccl.watchdog import DUMP_KEY
from pipegrid.testing.clock import moved_clock

from .waiting import until

pytestmark = pytest.mark.thorough

STREAMS = pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="streams")
LONG = timedelta(days=7)


def violations(ranks, seconds=0.0):
    """What was seen so far, or comes within some seconds; forgotten."""
    end = time.monotonic() + seconds
    while not ranks.fake_device.violations and time.monotonic() < end:
        time.sleep(0.002)
    found = list(ranks.fake_device.violations)
    ranks.fake_device.violations.clear()
    return found


def fail(ranks, group):
    """An entry of rank 1 that fails, since rank 0 aborts its own."""
    ranks.fake_device.reports_peer_errors = ranks.rank == 1
    work = group.recv([torch.zeros(2)], 1 - ranks.rank, 0)
    assert until(lambda: any(entry.started for entry in ranks.fake_device.unfinished()))
    ranks.barrier()
    if ranks.rank == 0:
        group.abort()
    assert until(work.is_completed)


@STREAMS
def test_an_error_that_nobody_aborts_ends_the_process_after_a_minute_and_tells_all_ranks_to_dump(ranks):
    """Wrong: a rank that sees an error and goes on without the group."""
    with moved_clock() as clock:
        group = dist.new_group([0, 1], timeout=LONG)
        fail(ranks, group)
        if ranks.rank == 1:
            clock.move(30.0)
            assert violations(ranks, 0.2) == []
            clock.move(300.0)
            (text,) = violations(ranks, 20)
            assert text.startswith("the process was ended by torch's watchdog: entry 0 (p2p: recv 8 bytes, rank 0)")
            assert text.endswith("failed, and its group was not aborted within 60 s")
            group.abort()
        ranks.barrier()
        assert until(lambda: ranks.fake_device.watchdog._found is not None)  # on both ranks
        assert violations(ranks, 0.2) == []
        clock.move(500.0)
        (text,) = violations(ranks, 20)
        assert text.startswith("the process was ended by torch's heartbeat monitor: 'exception_dump' was in the store")
        ranks.barrier()


@STREAMS
@pytest.mark.parametrize("mode", ["aborted", "off"])
def test_an_abort_in_time_or_a_watchdog_that_is_off_ends_nothing(ranks, mode):
    with moved_clock() as clock:
        if mode == "off":
            ranks.fake_device.watchdog.rules = LegacyRules(handling=0)
        group = dist.new_group([0, 1], timeout=LONG)
        fail(ranks, group)
        if mode == "aborted":
            group.abort()
        clock.move(120.0)
        assert violations(ranks, 0.3) == []
        group.abort()
        ranks.barrier()


@STREAMS
@pytest.mark.parametrize("deleted", [False, True])
def test_a_dump_key_of_an_attempt_before_ends_every_process_unless_it_is_deleted_in_time(ranks, deleted):
    """Wrong: a restart over the store of the attempt before, with the key that its watchdog left."""
    watchdog = ranks.fake_device.watchdog
    store, watchdog.store = watchdog.store, None
    with moved_clock() as clock:
        if ranks.rank == 0:
            store.set(DUMP_KEY, "of the attempt before")
            if deleted:
                store.delete_key(DUMP_KEY)
        ranks.barrier()
        watchdog.store = store  # the processes of this attempt begin
        clock.move(2.0)
        time.sleep(0.2)
        clock.move(600.0)
        dist.all_reduce(torch.ones(1))  # steps go on meanwhile
        assert len(violations(ranks, 0.5 if deleted else 20)) == (0 if deleted else 1)
        ranks.barrier()


@pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="nccl2")
def test_nccl2_writes_no_dump_key_and_reads_none(ranks):
    watchdog = ranks.fake_device.watchdog
    if ranks.rank == 0:
        watchdog.store.set(DUMP_KEY, "1")
    ranks.barrier()
    with moved_clock() as clock:
        clock.move(3600.0)
        assert violations(ranks, 0.3) == []
    ranks.barrier()


@STREAMS
def test_a_wait_past_its_timeout_aborts_the_group(ranks):
    """Wrong: a wait with a timeout as a poll, which is tried again."""
    group = dist.new_group([0, 1])
    if ranks.rank == 0:
        work = group.recv([torch.zeros(1)], 1, 0)
        with pytest.raises(dist.DistBackendError, match="is not done after 0.1 s"):
            work.wait(timedelta(seconds=0.1))
        with pytest.raises(dist.DistBackendError, match="was aborted"):
            work.wait(timedelta(seconds=20))
        with pytest.raises(dist.DistBackendError, match="was aborted on rank 0"):
            group.recv([torch.zeros(1)], 1, 0)
    ranks.barrier()
