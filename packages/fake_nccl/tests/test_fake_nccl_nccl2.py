"""The fake NCCL by the rules of nccl2, torch 2.15's ``nccl``: what differs from the older backend, each rule once."""

import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipegrid.fake_nccl import Nccl2Group, Nccl2Rules

from .waiting import until

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
NCCL2 = pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="nccl2")
ENDED = "the process was ended by nccl2's watchdog: "


def a_group(ranks, **rules):
    """A group whose watchdog is quick, and whose peers' errors are reported on rank 1."""
    ranks.fake_device.nccl2 = Nccl2Rules(**{"tick": 0.05, "grace": 0.5, **rules})
    ranks.fake_device.reports_peer_errors = ranks.rank == 1
    group = dist.new_group([0, 1])
    assert type(group) is Nccl2Group
    ranks.barrier()
    return group


def fail(ranks, group):
    """An entry of rank 1 that fails, as rank 0 aborts its own; and one that waits behind it."""
    if ranks.rank == 0:
        group.recv([torch.zeros(2)], 1, 0)
        assert until(lambda: any(entry.started for entry in ranks.fake_device.unfinished()))
        ranks.barrier()
        group.abort()
        return None
    failing, behind = (group.recv([torch.zeros(2)], 0, 0) for _ in range(2))
    assert failing.is_success()  # it runs
    ranks.barrier()
    assert until(failing.is_completed)
    return failing, behind


def violations(ranks):
    """What was seen so far, forgotten."""
    found = list(ranks.fake_device.violations)
    ranks.fake_device.violations.clear()
    return found


@NCCL2
def test_a_group_has_the_bindings_of_nccl2(ranks):
    group = a_group(ranks)
    assert not hasattr(group, "_set_default_timeout")
    group.set_timeout(timedelta(hours=1))
    assert group.timeout == 3600


@NCCL2
def test_messages_of_a_batch_are_complete_at_once_and_its_end_counts(ranks):
    group = a_group(ranks)
    group._start_coalescing(CPU)
    assert group._end_coalescing(CPU).is_completed()
    group._start_coalescing(CPU)
    buffer = torch.zeros(2)
    inside = group.send([torch.ones(2)], 1, 0) if ranks.rank == 0 else group.recv([buffer], 0, 0)
    assert inside.is_completed()
    assert inside.wait()
    if ranks.rank == 1:
        assert buffer.isnan().all()
    group._end_coalescing(CPU).wait()
    assert ranks.rank == 0 or buffer.tolist() == [1, 1]


@NCCL2
def test_a_wait_raises_what_is_known_and_an_error_is_that_of_all_unfinished_works(ranks):
    group = a_group(ranks, handling=0)
    works = fail(ranks, group)
    if works is not None:
        failed, behind = works
        assert not failed.is_success()
        assert behind.is_completed()
        assert failed.exception() is group.failure
        assert behind.exception() is not None
        assert failed.get_future_result().wait() == 2
        ranks.fake_device.waits_hold = False
        for work in works:
            with pytest.raises(RuntimeError):
                work.wait()
        group.abort()
    assert violations(ranks) == []
    ranks.barrier()


@NCCL2
def test_an_error_that_is_not_aborted_ends_the_process_at_the_watchdogs_tick(ranks):
    group = a_group(ranks)
    if fail(ranks, group):
        assert until(lambda: ranks.fake_device.violations)
        began = time.monotonic()
        group.abort()  # behind the watchdog, which ends the process first
        assert time.monotonic() - began > 0.2
        (found,) = violations(ranks)
        assert found.startswith(f"{ENDED}entry ")
        assert "not aborted within the watchdog's tick of 0.05 s" in found
    ranks.barrier()


@NCCL2
@pytest.mark.parametrize("rules", [{"tick": 60.0}, {"handling": 0}], ids=str)
def test_an_abort_before_the_tick_or_a_watchdog_that_is_off_ends_nothing(ranks, rules):
    group = a_group(ranks, **rules)
    if fail(ranks, group):
        if "handling" in rules:
            time.sleep(0.2)
        group.abort()
        time.sleep(0.2)
        with pytest.raises(dist.DistBackendError, match="was aborted"):
            group.send([torch.zeros(1)], 0, 0)
    assert violations(ranks) == []
    ranks.barrier()


@NCCL2
def test_a_launch_on_a_group_that_has_failed_ends_the_process(ranks):
    group = a_group(ranks, tick=60.0)
    if fail(ranks, group):
        group.send([torch.zeros(1)], 0, 0)
        group.abort()
        (found,) = violations(ranks)
        assert "which had failed" in found
    ranks.barrier()


@NCCL2
def test_a_wait_with_a_timeout_that_passes_ends_the_process(ranks):
    group = a_group(ranks)
    if ranks.rank == 0:
        work = group.recv([torch.zeros(1)], 1, 0)
        time.sleep(0.2)
        ender = threading.Timer(0.3, group.abort)
        ender.start()
        with pytest.raises(RuntimeError, match="was aborted"):
            work.wait(timedelta(seconds=0.1))  # from the launch on
        ender.join()
        (found,) = violations(ranks)
        assert found.startswith(f"{ENDED}Work.wait(0.1 s)")
    ranks.barrier()


@NCCL2
def test_a_shutdown_waits_for_an_entry_under_way_which_is_a_violation(ranks):
    """Its work ends well: it is not cut."""
    group, there = a_group(ranks), a_group(ranks)
    if ranks.rank == 0:
        x = torch.zeros(2)
        work = group.recv([x], 1, 0)
        ending = threading.Thread(target=group.shutdown, daemon=True)
        ending.start()
        ending.join(0.3)
        assert ending.is_alive()
        there.send([torch.ones(2)], 1, 0)
        ending.join(20)
        assert not ending.is_alive()
        assert work.exception() is None
        assert x.tolist() == [1, 1]
        (found,) = violations(ranks)
        assert "was destroyed with entry 0 (p2p: recv 8 bytes, rank 1)" in found
    else:
        there.recv([torch.zeros(2)], 0, 0).wait()
        group.send([torch.ones(2)], 0, 0).wait()
        group.shutdown()
        assert violations(ranks) == []
    ranks.barrier()


@NCCL2
def test_a_shutdown_after_an_abort_returns_at_once(ranks):
    group = a_group(ranks)
    if ranks.rank == 0:
        group.recv([torch.zeros(1)], 1, 0)
        group.abort()
        group.shutdown()
    assert violations(ranks) == []
    ranks.barrier()


@pytest.mark.ranks(2, backend="fake_nccl")
def test_a_wait_for_the_device_waits_for_the_entries_of_its_groups(ranks):
    group = dist.new_group([0, 1])
    x = torch.ones(2)
    if ranks.rank == 0:
        device = ranks.fake_device
        group.recv([x], 1, 0)
        waiting = threading.Thread(target=device.streams.synchronize, daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        ranks.barrier()
        waiting.join(20)
        assert x.tolist() == [1, 1]
        assert device.unfinished() == []
    else:
        ranks.barrier()
        group.send([x], 0, 0).wait()
    ranks.barrier()


@NCCL2
@pytest.mark.parametrize("by", ["a wait", "a launch"])
def test_an_idle_group_keeps_what_it_sent_until_a_wait_or_its_next_launch(ranks, by):
    group = a_group(ranks)
    if ranks.rank == 1:
        for _ in range(2):
            group.recv([torch.zeros(4)], 0, 0).wait()
        return
    sent = torch.ones(4)
    gone = weakref.ref(sent)
    work = group.send([sent], 1, 0)
    del sent
    assert until(work.is_completed)
    assert gone() is not None
    if by == "a wait":
        work.wait()
        del work
        assert gone() is None
    work = group.send([torch.zeros(4)], 1, 0)
    assert until(lambda: gone() is None)
    work.wait()


@pytest.mark.parametrize(
    ("mode", "batched", "holds"),
    [
        pytest.param(mode, *case, marks=pytest.mark.ranks(2, backend="fake_nccl", fake_nccl=mode))
        for mode, case in [
            *(("nccl2", case) for case in ((True, "nothing"), (True, "work"), (False, "nothing"), (False, "work"))),
            ("streams", (True, "nothing")),
        ]
    ],
)
def test_memory_of_a_receive_that_is_freed_before_its_end(ranks, mode, batched, holds):
    """The work of a lone one holds it, that of a batch does not; in the other backend the group does."""
    group, there = dist.new_group([0, 1]), dist.new_group([0, 1])
    if ranks.rank == 0:
        there.recv([torch.zeros(1)], 1, 0).wait()
        group.send([torch.ones(4)], 1, 0).wait()
    else:
        if batched:
            group._start_coalescing(CPU)
        buffer = torch.zeros(4)
        work = group.recv([buffer], 0, 0)
        if batched:
            work = group._end_coalescing(CPU)
        del buffer
        if holds == "nothing":
            del work
        there.send([torch.ones(1)], 0, 0).wait()
        assert until(lambda: not ranks.fake_device.unfinished())
        found = violations(ranks)
        assert len(found) == (mode == "nccl2" and (batched or holds == "nothing"))
        assert all("memory of a receive of 16 bytes from rank 0" in text for text in found)
    ranks.barrier()
