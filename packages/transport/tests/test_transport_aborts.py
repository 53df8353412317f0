"""Aborts of device groups wait for the device; a wait for a transfer does not wait for an abort."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from datetime import timedelta

import pytest
import torch

from pipegrid.transport import LaneSpec, P2PConfig, P2PError, open_lanes
from pipegrid.transport.backends import NcclTicket, nccl, warn_of_watchdog
from pipegrid.transport.collectives.waiting import PendingCollectives
from pipegrid.transport.waits.aborts import DeviceAborts, GroupAbortedError, device_aborts

from .two_ranks import until

FROM_1, ALSO_FROM_1, FROM_2 = LaneSpec(1, 0, "a"), LaneSpec(1, 0, "b"), LaneSpec(2, 0, "c")
PLAIN = dict.fromkeys((FROM_1, ALSO_FROM_1, FROM_2), torch.ones(2))
MODES = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.ranks(3, backend="fake_nccl", fake_nccl=mode))
        for mode in ("streams", "serial")
    ],
)


@MODES
def test_the_error_of_a_lane_comes_while_a_kernel_of_another_lane_runs(ranks, mode):
    """Rank 1 fails. Rank 0 aborts the groups of both its lanes, which waits for the kernel that rank 2 ends.

    Until then the device may write to the tensors of the failed receives, and a poll might wait behind the free.
    """
    lanes = open_lanes(PLAIN, config=P2PConfig(deadline=30.0), agreed=PLAIN)
    if ranks.rank == 0:
        late, lost, also_lost = (lanes[spec].irecv() for spec in (FROM_2, FROM_1, ALSO_FROM_1))
        ranks.barrier()
        began = time.monotonic()
        for handle, spec in ((also_lost, ALSO_FROM_1), (lost, FROM_1)):
            (written,) = handle.tensors
            with pytest.raises(P2PError, match="out of memory"):
                handle.wait()
            until(lambda spec=spec: lanes[spec].connection.aborting)
            abort = lanes[spec].connection.aborting
            until(lambda abort=abort, written=written: any(held is written for held in abort.kept))
            assert not late.is_completed()
        assert time.monotonic() - began < 4.0  # the abort itself is given up after 5 s
        ranks.barrier()
        late.synchronize()
        assert late.result().tolist() == [1, 1]
        assert abort.ended.wait(20)
        assert not abort.kept
    else:
        ranks.barrier()
        if ranks.rank == 1:
            lanes.abort("out of memory")
        ranks.barrier()
        if ranks.rank == 2:
            lanes[FROM_2].isend(torch.ones(2)).synchronize()
    ranks.barrier()
    lanes.close()


class Group:
    """A group of a device whose abort drains until ``freed``."""

    def __init__(self):
        self.freed, self.polls = threading.Event(), 0

    def abort(self):
        self.freed.wait()

    def is_completed(self):
        self.polls += 1
        return True

    def exception(self):
        return None


def test_no_work_is_polled_while_an_abort_drains_and_an_aborted_one_raises_the_cause():
    aborted, other = Group(), Group()
    with pytest.MonkeyPatch.context() as patch:
        aborts = DeviceAborts()
        patch.setattr(nccl, "device_aborts", aborts)
        tickets = {group: NcclTicket((group,), group) for group in (aborted, other)}
        assert tickets[aborted].done()
        (abort,) = aborts.start({aborted: aborted.abort}, "rank 3: out of memory")
        assert not tickets[other].done()
        for ask in (tickets[aborted].done, lambda: tickets[aborted].hold(timedelta(seconds=9))):
            with pytest.raises(GroupAbortedError, match="rank 3: out of memory"):
                ask()
        assert (aborted.polls, other.polls) == (1, 0)
        assert aborts.start({aborted: aborted.abort}, "a later cause") == [abort]
        aborted.freed.set()
        assert abort.ended.wait(20)
        assert tickets[other].done()
        with pytest.raises(GroupAbortedError, match="rank 3: out of memory"):
            tickets[aborted].done()


def test_a_pending_collective_keeps_its_group_and_one_that_was_aborted_has_failed():
    pending, group = PendingCollectives(), Group()
    alive = weakref.ref(group)
    pending.add("a sum", group, group)
    del group
    assert alive() is not None
    assert pending.failed() is None
    gc.collect()
    assert alive() is None

    group = Group()
    group.freed.set()
    pending.add("a sum", group, group)
    (abort,) = device_aborts.start({group: group.abort}, "rank 3: out of memory")
    label, error = pending.failed()
    assert label == "a sum"
    assert "rank 3: out of memory" in str(error)
    assert abort.ended.wait(20)


@pytest.mark.parametrize(
    ("backend", "value", "warns"), [("nccl", None, True), ("nccl", "0", False), ("ucc", None, False)]
)
def test_opening_warns_where_torchs_watchdog_would_end_the_process(monkeypatch, backend, value, warns):
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", value)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_watchdog(backend)
    assert [str(one.message).partition(" ")[0] for one in found] == ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] * warns
