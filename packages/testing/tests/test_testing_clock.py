"""A moved clock, for clocks of Python, waits inside of torch, and the watchdog of the fake GPU."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipegrid.fake_nccl import Nccl2Rules
from pipegrid.testing.clock import moved_clock

pytestmark = pytest.mark.thorough

DAY = 24 * 3600.0


def test_the_clocks_of_python_are_ahead_inside_and_right_again_outside():
    patched, here = (
        (torch._C._distributed_c10d.Work, dist.ProcessGroup, torch._C._distributed_c10d.Backend),
        time.monotonic,
    )
    before = [dict(vars(one)) for one in patched]  # by `getattr`, a method that has lost its binding looks the same
    with moved_clock() as clock:
        monotonic, date = time.monotonic(), time.time()
        clock.move(40 * DAY)
        assert time.monotonic() - monotonic >= 40 * DAY
        assert time.time() - date >= 40 * DAY
    assert time.monotonic is here
    assert time.monotonic() - monotonic < DAY
    assert [dict(vars(one)) for one in patched] == before


def waiting(work, bound):
    """A thread that waits for ``work``, and how that ended."""
    ended = []

    def wait():
        try:
            work.wait(bound)
            ended.append("came")
        except RuntimeError as error:
            ended.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, ended


def until_under_way(clock, count):
    while len(clock._waits) < count:
        time.sleep(0.001)


@pytest.mark.ranks(2, backend="gloo")
def test_a_wait_of_torch_ends_when_its_bound_is_over_and_closes_the_connection_at_both_ends(ranks):
    with moved_clock() as clock:
        group = dist.new_group(backend="gloo")
        threads = []
        for tag, bound in enumerate((timedelta(days=1), timedelta(days=50))):
            work = dist.irecv(torch.zeros(1), group=group, group_src=1 - ranks.rank, tag=tag)
            threads.append(waiting(work, bound))
        until_under_way(clock, 2)
        ranks.barrier()
        clock.move(0.9 * DAY)
        assert clock.ended == []
        ranks.barrier()
        if ranks.rank == 0:
            clock.move(0.2 * DAY)
            assert len(clock.ended) == 1
            assert clock.ended[0].startswith("a wait of 1 day, 0:00:00, which began 1 day, 2:24:0")
        for thread, _ in threads:
            thread.join()
        texts = [text for _, (text,) in threads]
        assert (texts[0] == "Timed out waiting 1 day, 0:00:00 on the moved clock") == (ranks.rank == 0), texts
        assert "came" not in texts
        assert "moved clock" not in texts[1]


@pytest.mark.ranks(2, backend="gloo")
def test_a_wait_with_time_left_outlives_the_weeks(ranks):
    with moved_clock() as clock:
        value = torch.full((1,), float(ranks.rank))
        if ranks.rank == 1:
            thread, ended = waiting(dist.irecv(value, group_src=0), timedelta(days=36_500))
            until_under_way(clock, 1)
            for _ in range(40):
                clock.move(DAY)
            ranks.barrier()
            thread.join()
            assert (ended, value.item(), clock.ended) == (["came"], 0.0, [])
        else:
            ranks.barrier()
            dist.isend(value, group_dst=1).wait(timedelta(days=1))


@pytest.mark.ranks(2, backend="fake_nccl")
def test_the_watchdog_of_the_fake_gpu_sees_an_entry_age_by_the_moved_clock(ranks):
    with moved_clock() as clock:
        group = dist.new_group(timeout=timedelta(minutes=10))
        clock.move(40 * DAY)
        dist.all_reduce(torch.ones(1), group=group)  # young
        assert ranks.fake_device.violations == []
        if ranks.rank == 0:
            work = dist.irecv(torch.zeros(1), group=group, group_src=1)
            clock.move(DAY)
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=60))
            (text,) = ranks.fake_device.violations
            assert "was ended by the watchdog: not done after the group's timeout of 600 s" in text
            ranks.fake_device.violations.clear()
        ranks.barrier()


@pytest.mark.ranks(2, backend="fake_nccl")
def test_a_wait_with_a_bound_of_hours_on_the_fake_gpu_ends_by_the_moved_clock(ranks):
    with moved_clock() as clock:
        group = dist.new_group(timeout=timedelta(days=7))
        if ranks.rank == 0:
            work = dist.irecv(torch.zeros(1), group=group, group_src=1)
            thread, ended = waiting(work, timedelta(hours=5))
            while thread.is_alive() and clock.passed < 1000 * 3600:
                clock.move(1800.0)
                thread.join(0.05)
            assert clock.passed >= 5 * 3600
            assert "is not done after 18000 s" in ended[0]
        ranks.barrier()
        group.abort()


@pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="nccl2")
def test_the_watchdog_of_nccl2_ends_a_process_by_the_moved_clock(ranks):
    """Wrong: an error that is aborted an hour later, where the tick is half an hour."""
    ranks.fake_device.nccl2 = Nccl2Rules(tick=1800.0, grace=0.1)
    ranks.fake_device.reports_peer_errors = ranks.rank == 1
    with moved_clock() as clock:
        group = dist.new_group(timeout=timedelta(days=7))
        work = group.recv([torch.zeros(1)], 1 - ranks.rank, 0)
        while not any(entry.started for entry in ranks.fake_device.unfinished()):
            time.sleep(0.001)
        ranks.barrier()
        if ranks.rank == 0:
            group.abort()
        else:
            while not work.is_completed():
                time.sleep(0.001)
            assert ranks.fake_device.violations == []
            while not ranks.fake_device.violations and clock.passed < 1000 * 3600:
                clock.move(600.0)
                time.sleep(0.02)
            assert clock.passed >= 1800
            (text,) = ranks.fake_device.violations
            assert "not aborted within the watchdog's tick of 1800 s" in text
            ranks.fake_device.violations.clear()
            group.abort()
        ranks.barrier()
