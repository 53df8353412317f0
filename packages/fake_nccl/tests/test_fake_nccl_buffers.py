"""Buffers, drains, callers' streams and graphs on the fake NCCL, each with wrong code that it catches."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from .waiting import running, until

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
STREAMS = pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="streams")
NCCL2 = pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="nccl2")
BOTH = pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=pytest.mark.ranks(2, backend="fake_nccl", fake_nccl=m)) for m in ("streams", "nccl2")],
)


def violations(ranks):
    found = list(ranks.fake_device.violations)
    ranks.fake_device.violations.clear()
    return found


# Eager small sends


@STREAMS
@pytest.mark.parametrize("eager_bytes", [0, 64])
def test_the_end_of_a_small_send_does_not_say_that_its_receive_has_come(ranks, eager_bytes):
    """Wrong: the end of a send as the sign that the peer has the data."""
    ranks.fake_device.eager_bytes = eager_bytes
    group = dist.new_group([0, 1])
    if ranks.rank == 0:
        sent = [group.send([torch.full((4,), float(value))], 1, 0) for value in range(3)]
        if eager_bytes:
            assert until(lambda: all(work.is_success() for work in sent))
        else:
            time.sleep(0.2)
            assert not any(work.is_completed() for work in sent)
        ranks.barrier()
        for work in sent:
            work.wait()
    else:
        ranks.barrier()
        for value in range(3):
            x = torch.zeros(4)
            group.recv([x], 0, 0).wait()
            assert x.tolist() == [value] * 4


@STREAMS
@pytest.mark.parametrize(("size", "hangs"), [(4, False), (64, True)], ids=["small", "large"])
def test_both_send_first_is_right_of_small_tensors_and_hangs_with_large_ones(ranks, size, hangs):
    """Wrong: both ranks send, then receive, on one communicator; tried with small tensors only."""
    ranks.fake_device.eager_bytes = 64
    group, other = dist.new_group([0, 1]), 1 - ranks.rank
    sent, x = group.send([torch.ones(size)], other, 0), torch.zeros(size)
    received = group.recv([x], other, 0)
    if hangs:
        time.sleep(0.3)
        assert not sent.is_completed()
        ranks.barrier()
        group.abort()
    else:
        received.wait()
        assert x.tolist() == [1] * size


@STREAMS
def test_a_buffer_takes_only_so_many_bytes_and_is_empty_again_after_the_receives(ranks):
    ranks.fake_device.eager_bytes = 64
    group = dist.new_group([0, 1])
    for _ in range(2):
        if ranks.rank == 0:
            works = [group.send([torch.ones(8)], 1, 0) for _ in range(3)]  # 32 bytes each
            assert until(works[1].is_completed)
            time.sleep(0.1)
            assert not works[2].is_completed()
            ranks.barrier()
            works[2].wait()
            assert until(lambda: not any(group._hidden._buffered.values()))
        else:
            ranks.barrier()
            for _ in range(3):
                group.recv([torch.zeros(8)], 0, 0).wait()
        ranks.barrier()


@STREAMS
def test_a_small_send_that_nobody_receives_leaves_no_thread(ranks):
    ranks.fake_device.eager_bytes = 64
    group = dist.new_group([0, 1])
    if ranks.rank == 0:
        group.send([torch.ones(1)], 1, 0).wait()
    ranks.barrier()


# Drains


@STREAMS
@pytest.mark.parametrize("early", [False, True])
def test_a_receive_before_a_compute_that_its_sender_waits_for_hangs_where_a_compute_drains(ranks, early):
    """Wrong: a receive posted one compute too early, whose sender needs that compute first."""
    device = ranks.fake_device
    there, back = dist.new_group([0, 1]), dist.new_group([0, 1])
    x = torch.zeros(4)
    if ranks.rank == 1:
        there.recv([torch.zeros(4)], 0, 0).wait()
        back.send([torch.ones(4)], 0, 0).wait()
        ranks.barrier()
        return
    device.drains_at_compute, device.waits_hold = True, False

    def step():
        with device.streams.watch():
            received = back.recv([x], 1, 0) if early else None
            y = torch.ones(4) * 2  # drains
            there.send([y], 1, 0)
            received = received or back.recv([x], 1, 0)
            received.wait()
            x.add_(1)

    thread = running(step)
    thread.join(0.5 if early else 20)
    assert thread.is_alive() == early
    if early:
        device.drains_at_compute = False
        there.send([torch.ones(4)], 1, 0)  # what the step has not come to
        thread.join(20)
        assert not thread.is_alive()
        violations(ranks)
        there.abort()  # the step's own send, which comes second
    ranks.barrier()


# Synchronous collectives


@NCCL2
@pytest.mark.parametrize("async_op", [False, True])
def test_a_synchronous_collective_is_on_the_callers_stream_and_an_asynchronous_one_is_not(ranks, async_op):
    """Wrong: the result of an asynchronous collective read without a wait."""
    ranks.fake_device.waits_hold = False
    group = dist.new_group([0, 1])
    options = dist.AllreduceOptions()
    options.asyncOp = async_op
    with ranks.fake_device.streams.watch():
        x = torch.ones(4)
        work = group.allreduce([x], options)
        x.add_(1)
    assert until(work.is_completed)
    races = [text for text in violations(ranks) if text.startswith("race: add_")]
    assert len(races) == async_op


# Graphs


@BOTH
def test_a_captured_message_moves_at_each_replay_with_the_values_of_then(ranks, mode):
    device, group = ranks.fake_device, dist.new_group([0, 1])
    x = torch.zeros(2)
    with device.capture() as graph:
        (group.send if ranks.rank == 0 else group.recv)([x], 1 - ranks.rank, 0).wait()
    assert device.launches == device.launches[:1]
    for value in (1.0, 2.0):
        if ranks.rank == 0:
            x.fill_(value)
        graph.replay()
        device.drain()
        ranks.barrier()
        assert x.tolist() == [value] * 2


@BOTH
def test_a_wait_in_a_capture_says_nothing_of_the_data_even_with_a_timeout(ranks, mode):
    """Wrong: a captured receive that is read once its wait has returned."""
    device, group = ranks.fake_device, dist.new_group([0, 1])
    x = torch.ones(2)
    if ranks.rank == 0:
        with device.capture():
            work = group.recv([x], 1, 0)
            assert work.wait(timedelta(seconds=0.01))
            assert not work.is_completed()
        assert x.isnan().all()
    assert device.unfinished() == []
    group.shutdown()  # nothing is under way
