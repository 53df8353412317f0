"""Groups that complete in stream order, held on a CPU by the fake NCCL of pipegrid-testing."""

import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipegrid.testing import Fault
from pipegrid.transport import (
    Direction,
    Edge,
    LaneSpec,
    P2PCommunicator,
    P2PError,
    P2PPeerError,
    open_lanes,
)
from pipegrid.transport.backends import NcclTicket
from pipegrid.transport.backends.wire import ControlWire
from pipegrid.transport.lane import batch, endpoint
from pipegrid.transport.lane import lane as lane_module
from pipegrid.transport.waits.wait_lock import BackgroundThread

from .two_ranks import DEADLINE, THERE, config, on_device_groups, until

two_ranks = pytest.mark.ranks(2, backend="fake_nccl")


@on_device_groups
def test_close_loses_nothing_that_was_sent(ranks, backend):
    size = 2**26 if backend == "nccl" else 2**10  # 256 MB take a GPU a while
    lanes = open_lanes([THERE], config=config(), agreed={THERE: torch.empty(size, device="meta")})
    if ranks.rank == 0:
        lanes[THERE].isend(torch.full((size,), 3.0, device=ranks.device))
        lanes.close()
    else:
        received = lanes[THERE].irecv()
        time.sleep(0.3)  # the sender is in close()
        assert received.result().eq(3.0).all()
        lanes.close()


class OverForty:
    """A work of gloo on a clock that passes 40 days in each wait of a thread beside the program."""

    def __init__(self, work):
        self.work = work

    def wait(self, timeout):
        if isinstance(threading.current_thread(), BackgroundThread) and timeout < timedelta(days=40):
            raise RuntimeError(f"Timed out waiting {timeout} for recv operation to complete")
        return self.work.wait(timeout)


@pytest.mark.parametrize("shapes", ["agreed", "header"])
@two_ranks
def test_lanes_outlive_forty_days(ranks, monkeypatch, shapes):
    receive = ControlWire.receive
    monkeypatch.setattr(ControlWire, "receive", lambda self, *given: OverForty(receive(self, *given)))
    with open_lanes([THERE], config=config(shapes=shapes)) as lanes:
        for n in range(3):
            if ranks.rank == 0:
                lanes[THERE].isend(torch.full((4,), float(n))).wait()
            else:
                received = lanes[THERE].irecv()
                received.is_completed()  # the lane's own thread waits for the header from here on
                assert received.result().tolist() == [n] * 4
            ranks.barrier()


@two_ranks
def test_a_rank_that_fails_closes_at_once(ranks):
    began = time.monotonic()
    if ranks.rank == 0:
        with (
            pytest.raises(ZeroDivisionError),
            open_lanes([THERE], config=config(deadline=60.0), agreed={THERE: torch.ones(4)}) as lanes,
        ):
            lanes[THERE].isend(torch.ones(4))
            _ = 1 / 0
        assert time.monotonic() - began < DEADLINE
    else:
        with open_lanes([THERE], config=config(deadline=60.0), agreed={THERE: torch.ones(4)}) as lanes:
            until(lambda: lanes[THERE].wire.has_end_notice())
    ranks.barrier()


@on_device_groups
def test_buffers_are_released_once_waited_for_and_used_again(ranks, backend):
    del backend
    with open_lanes([THERE], config=config(), agreed={THERE: torch.ones(4)}) as lanes:
        lane = lanes[THERE]
        for n in range(4):
            if ranks.rank == 0:
                lane.isend(torch.full((4,), float(n), device=ranks.device)).wait()
            else:
                handle = lane.irecv()
                handle.wait()
                assert handle.result().tolist() == [n] * 4
                handle.release()
        ranks.barrier()
        assert lane.stats.allocations <= 1


@two_ranks
def test_groups_are_aborted_at_the_same_time(ranks):
    """Each abort waits for the entries of all groups, as a free on a device does: one by one they would hang."""
    specs = [LaneSpec(0, 1, str(n)) for n in range(3)]
    with open_lanes(specs, config=config(), agreed=dict.fromkeys(specs, torch.ones(4))) as lanes:
        if ranks.rank == 0:
            handles = [lanes[spec].isend(torch.ones(4)) for spec in specs]
            began = time.monotonic()
            lanes.abort("loss is nan")
            assert time.monotonic() - began < DEADLINE / 2
            for handle in handles:
                with pytest.raises(P2PError, match="^loss is nan"):
                    handle.wait()
        else:
            until(lambda: lanes[specs[0]].wire.has_end_notice())
        ranks.barrier()


@two_ranks
def test_a_work_that_completed_with_an_error_is_a_typed_error(ranks):
    with open_lanes([THERE], config=config(), agreed={THERE: torch.ones(4)}) as lanes:
        if ranks.rank == 1:
            handle = lanes[THERE].irecv()
            lanes[THERE].group.abort()
            with pytest.raises(P2PPeerError, match="lost rank 0 while receiving message 0"):
                handle.synchronize()
            assert handle.is_completed()
        ranks.barrier()


@two_ranks
def test_torchs_own_timeout_lies_far_beyond_the_deadline(ranks):
    with open_lanes([THERE], config=config(), agreed={THERE: torch.ones(4)}) as lanes:
        assert lanes[THERE].group.timeout > 24 * 3600


@on_device_groups
def test_a_killed_peer_is_seen_at_once_though_nobody_waits_in_the_backend(ranks, backend):
    del backend
    ranks.plan_fault(Fault("kill", rank=1, at="now"))
    with open_lanes([THERE], config=config(deadline=60.0), agreed={THERE: torch.ones(4)}) as lanes:
        ranks.reach("now")
        began = time.monotonic()
        until(lambda: lanes[THERE].error is not None)
        assert time.monotonic() - began < DEADLINE / 2
        assert "lost rank 1" in str(lanes[THERE].error)


@two_ranks
def test_many_receives_wait_for_their_headers_in_order(ranks):
    with open_lanes([THERE], config=config(shapes="header")) as lanes:
        lane, count = lanes[THERE], 20
        if ranks.rank == 0:
            handles = [lane.isend(torch.full((n,), float(n))) for n in range(count)]
        else:
            handles = [lane.irecv() for _ in range(count)]
            handles[3].is_completed()  # has the lane's thread take headers
            assert [handle.result().tolist() for handle in handles] == [[n] * n for n in range(count)]
        for handle in handles:
            handle.synchronize()


@two_ranks
def test_a_header_outlives_a_send_that_ends_before_its_receive_is_posted(ranks, monkeypatch):
    """As a small send does over NCCL, which has buffers for it."""
    payload = torch.ones(3)
    with open_lanes([THERE], config=config(shapes="header")) as lanes:
        lane = lanes[THERE]
        if ranks.rank == 0:
            with monkeypatch.context() as patched:
                patched.setattr(NcclTicket, "done", lambda ticket: True)
                lane.isend(payload)
                until(lambda: not lane.queue)
            ranks.barrier()
        else:
            ranks.barrier()
            time.sleep(0.3)  # the sender is in close()
            received = lane.irecv()
            received.synchronize()
            assert received.result().tolist() == [1, 1, 1]


@pytest.mark.ranks(2)
def test_buffers_of_a_header_are_allocated_under_the_stream_that_posted_the_receive(ranks, monkeypatch):
    """The header is taken by another thread, whose current stream is not the caller's."""
    streams, allocated = [], []

    @contextmanager
    def working_on(stream):
        streams.append(stream)
        yield
        streams.pop()

    with open_lanes([THERE], config=config(shapes="header")) as lanes:
        if ranks.rank == 0:
            ranks.barrier()
            lanes[THERE].isend(torch.ones(3)).wait()
        else:
            caller = SimpleNamespace(device=torch.device("cpu"))
            monkeypatch.setattr(lane_module, "current_stream", lambda device: caller)
            for module in (batch, endpoint):
                monkeypatch.setattr(module, "working_on", working_on)
            take = lane_module.ReceiveBuffers.take
            monkeypatch.setattr(
                lane_module.ReceiveBuffers, "take", lambda buffers: (allocated.append(list(streams)), take(buffers))[1]
            )
            handle = lanes[THERE].irecv()
            ranks.barrier()
            until(handle.is_completed)
            assert allocated
            assert all(caller in under for under in allocated)
        ranks.barrier()


@pytest.mark.ranks(3)
def test_lanes_that_the_plan_does_not_use_are_not_opened(ranks):
    traffic = [(Edge(0, 1), Direction.FORWARD), (Edge(1, 2), Direction.FORWARD), (Edge(0, 1), Direction.BACKWARD)]
    communicator = P2PCommunicator(dist.group.WORLD, config(pipeline_dtype=torch.float32), traffic=traffic)
    expected = {LaneSpec(0, 1, "forward"), LaneSpec(1, 2, "forward"), LaneSpec(1, 0, "backward")}
    assert set(communicator.lanes) == {spec for spec in expected if ranks.rank in spec.pair}
    if ranks.rank == 1:
        with pytest.raises(P2PError, match=r"edge 1>2 needs lane 2>1\[backward\], which the argument traffic left"):
            communicator.irecv(edge=Edge(1, 2), direction=Direction.BACKWARD)
        assert communicator.recv_forward((2,)).tolist() == [1, 1]
    elif ranks.rank == 0:
        communicator.send_forward(torch.ones(2))
    assert [one.peer for one in communicator.neighbours([Edge(1, 2)] if ranks.rank else [Edge(0, 1)])]
    communicator.close()
