"""Handles tell the truth, may be waited for again and from any thread, and call back once."""

import gc
import threading
import time
import weakref

import pytest
import torch

from pipegrid.transport import Handle, P2PLaneDeadError, ReceiveHandle, open_lanes

from .two_ranks import BACK, DEADLINE, THERE, config, until


@pytest.mark.ranks(2)
def test_handles_satisfy_the_protocol_and_may_be_waited_for_again(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        handle = lanes[THERE].isend(torch.ones(2)) if ranks.rank == 0 else lanes[THERE].irecv()
        assert isinstance(handle, Handle)
        assert isinstance(handle, ReceiveHandle) == (ranks.rank == 1)
        for _ in range(3):
            handle.wait()
            handle.wait(0.5)
            handle.synchronize()
            assert handle.is_completed()
        assert repr(handle) == f"<{'send' if ranks.rank == 0 else 'receive'} 0 of lane 0>1[there]: done>"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("messages", [1, 3])
def test_is_completed_tells_the_truth_without_a_wait(ranks, messages):
    with open_lanes([THERE], config=config()) as lanes:
        lane = lanes[THERE]
        for _ in range(messages):
            if ranks.rank == 0:
                handle = lane.isend(torch.ones(2))
                ranks.barrier()
                assert not handle.is_completed()  # nobody has posted the receive
                ranks.barrier()
            else:
                ranks.barrier()
                time.sleep(0.02)
                ranks.barrier()
                handle = lane.irecv()
            until(handle.is_completed)
            handle.wait()


@pytest.mark.ranks(2)
def test_a_receive_before_its_send_is_not_completed(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        if ranks.rank == 0:
            ranks.barrier()
            lanes[THERE].isend(torch.ones(2)).wait()
        else:
            handle = lanes[THERE].irecv()
            assert not handle.is_completed()
            assert not handle.is_completed()
            ranks.barrier()
            until(handle.is_completed)
            assert handle.result().tolist() == [1, 1]


@pytest.mark.ranks(2)
def test_sends_that_nobody_waits_for_are_delivered_and_let_go(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        if ranks.rank == 0:
            tensor = torch.full((5,), 3.0)
            alive = weakref.ref(tensor)
            lanes[THERE].isend(tensor)
            del tensor
            until(lambda: gc.collect() is not None and alive() is None)
        else:
            time.sleep(0.2)
            assert lanes[THERE].irecv().result().tolist() == [3.0] * 5
        ranks.barrier()


@pytest.mark.ranks(2)
def test_many_threads_may_wait_for_one_handle(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        lane = lanes[THERE]
        if ranks.rank == 0:
            time.sleep(0.1)
            lane.isend(torch.ones(2)).wait()
            lane.isend(torch.zeros(2)).wait()
        else:
            first, second = lane.irecv(), lane.irecv()
            seen = []
            threads = [
                threading.Thread(target=lambda handle=handle: seen.append(handle.result().sum().item()))
                for handle in (second, first, first, second)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE)
            assert sorted(seen) == [0, 0, 2, 2]


@pytest.mark.ranks(2, backend="gloo")  # on a device only the plan's thread may: see test_transport_streamed
def test_on_done_is_called_once_without_a_wait_and_may_start_the_next_hop(ranks):
    with open_lanes([THERE, BACK], config=config()) as lanes:
        if ranks.rank == 0:
            for n in range(3):
                lanes[THERE].isend(torch.full((2,), float(n))).wait()
            for n in range(3):
                assert lanes[BACK].irecv().result().tolist() == [n + 1.0] * 2
        else:
            calls = []

            def forward(handle):
                calls.append(handle.sequence)
                lanes[BACK].isend(handle.result().detach() + 1)

            for _ in range(3):
                lanes[THERE].irecv().on_done(forward)
            until(lambda: len(calls) == 3)
            assert calls == [0, 1, 2]
        ranks.barrier()


@pytest.mark.ranks(2)
def test_on_done_of_what_is_done_is_called_at_once(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        handle = lanes[THERE].isend(torch.ones(2)) if ranks.rank == 0 else lanes[THERE].irecv()
        handle.synchronize()  # on a device a wait only orders the stream
        calls = []
        handle.on_done(calls.append)
        assert calls == [handle]


@pytest.mark.ranks(2)
def test_a_callback_that_raises_ends_the_lane(ranks):
    with open_lanes([THERE], config=config(), agreed={THERE: torch.ones(2)}) as lanes:
        lane = lanes[THERE]
        if ranks.rank == 0:
            lane.isend(torch.ones(2)).wait()
        else:
            handle = lane.irecv()
            handle.on_done(lambda _: 1 / 0)
            until(lambda: lane.error is not None)
            with pytest.raises(P2PLaneDeadError, match=r"ZeroDivisionError: division by zero \(raised by"):
                lane.irecv()
        ranks.barrier()
