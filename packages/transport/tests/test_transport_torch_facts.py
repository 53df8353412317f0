"""What torch's own handles do, as the wire counts on it: a torch version that changes one of these is noticed here.

gloo's facts need no more than a CPU. Those of NCCL are in `test_transport_gpu`.
"""

import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport.backends import wire
from pipegrid.transport.backends.wire import FOREVER

SOON = timedelta(seconds=0.3)
LATE = timedelta(seconds=20)
# A process that is killed with something unread in its socket makes the kernel say "reset" for "closed".
GONE = "(closed|reset) by peer"
over_gloo = pytest.mark.ranks(2, backend="gloo")  # the facts are gloo's; those of the fake NCCL are its own tests


def other(ranks):
    return 1 - ranks.rank


def send(value, peer, tag=0):
    return dist.group.WORLD.send([value], peer, tag)


def receive(buffer, peer, tag=0):
    return dist.group.WORLD.recv([buffer], peer, tag)


@over_gloo
def test_is_completed_stays_false_until_wait(ranks):
    work = send(torch.ones(4), 1) if ranks.rank == 0 else receive(torch.zeros(4), 0)
    ranks.barrier()
    time.sleep(0.1)
    assert not work.is_completed()
    work.wait(LATE)
    assert work.is_completed()


@over_gloo
def test_a_second_wait_does_not_return(ranks):
    work = send(torch.ones(4), 1) if ranks.rank == 0 else receive(torch.zeros(4), 0)
    work.wait(LATE)
    ranks.barrier()
    with pytest.raises(RuntimeError, match="Timed out"):
        work.wait(SOON)


@over_gloo
def test_a_wait_that_times_out_closes_the_connection_at_both_ends_for_all_transfers(ranks):
    buffer = torch.zeros(4)
    mine = receive(buffer, other(ranks), tag=1)
    ranks.barrier()
    if ranks.rank == 0:
        with pytest.raises(RuntimeError, match="Timed out"):
            receive(buffer, 1, tag=2).wait(SOON)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"{GONE}|pair closure"):
        mine.wait(LATE)
    with pytest.raises(RuntimeError, match=rf"{GONE}|pair closure"):
        send(torch.ones(4), other(ranks), tag=3).wait(LATE)
    assert time.monotonic() - began < LATE.total_seconds() / 2


@over_gloo
def test_it_wakes_a_thread_that_waits(ranks):
    # This is how a lane is cut: a receive that nobody will answer, waited for a moment.
    if ranks.rank == 0:
        ended = []
        work = receive(torch.zeros(4), 1, tag=1)

        def wait():
            with pytest.raises(RuntimeError, match="pair closure"):
                work.wait(LATE)
            ended.append(True)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        with pytest.raises(RuntimeError, match="Timed out"):
            receive(torch.zeros(1), 1, tag=2**30).wait(timedelta(milliseconds=1))
        thread.join(LATE.total_seconds() / 2)
        assert ended
    ranks.barrier()


@over_gloo
@pytest.mark.parametrize("way", ["abort", "shutdown"])
def test_abort_and_shutdown_wake_nobody(ranks, way):
    if ranks.rank == 0:
        work = receive(torch.zeros(4), 1)
        thread = threading.Timer(0.1, getattr(dist.group.WORLD, way))
        thread.start()
        with pytest.raises(RuntimeError, match="Timed out"):
            work.wait(timedelta(seconds=0.5))
        thread.join()
    ranks.barrier()


@over_gloo
@pytest.mark.parametrize("elements", [1, 1 << 20])
def test_a_send_of_any_size_is_done_when_its_receive_is_posted(ranks, elements):
    # Of one machine, so the clock is one.
    if ranks.rank == 0:
        work = send(torch.ones(elements), 1)
        ranks.barrier()
        work.wait(LATE)
        ended = time.monotonic()
        ranks.store.wait(["posted"], LATE)
        assert ended > float(ranks.store.get("posted"))
    else:
        ranks.barrier()
        time.sleep(0.5)
        posted = time.monotonic()
        receive(torch.zeros(elements), 0).wait(LATE)
        ranks.store.set("posted", str(posted))


@over_gloo
def test_a_send_whose_work_is_dropped_is_never_delivered(ranks):
    if ranks.rank == 0:
        send(torch.ones(4), 1)
        ranks.barrier()
        ranks.barrier()
    else:
        ranks.barrier()
        with pytest.raises(RuntimeError, match="Timed out"):
            receive(torch.zeros(4), 0).wait(SOON)
        ranks.barrier()


@over_gloo
def test_a_message_that_is_too_short_arrives_silently(ranks):
    if ranks.rank == 0:
        send(torch.ones(2), 1).wait(LATE)
    else:
        buffer = torch.zeros(4)
        receive(buffer, 0).wait(LATE)
        assert buffer.tolist() == [1, 1, 0, 0]


@pytest.mark.thorough
def test_a_message_that_is_too_long_ends_the_process(tmp_path):
    program = textwrap.dedent(f"""
        import os, sys
        import torch, torch.distributed as dist
        rank = int(sys.argv[1])
        dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 2), rank=rank, world_size=2)
        if rank == 0:
            dist.isend(torch.ones(8), 1).wait()
            sys.stdin.read()  # until the other one is gone
            os._exit(0)
        dist.irecv(torch.zeros(4), 0).wait()
    """)
    both = [
        subprocess.Popen([sys.executable, "-c", program, str(rank)], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        _, text = both[1].communicate(timeout=300)  # most of it imports torch, on a machine that may be busy
        both[0].communicate(timeout=300)
    finally:
        for each in both:
            each.kill()
            each.communicate()
    assert both[1].returncode == -6
    assert b"EnforceNotMet" in text


@over_gloo
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64])
def test_any_dtype_and_no_elements_travel(ranks, dtype):
    for elements in (3, 0):
        values = torch.ones(elements).to(dtype)
        if ranks.rank == 0:
            send(values, 1).wait(LATE)
        else:
            buffer = torch.zeros(elements).to(dtype)
            receive(buffer, 0).wait(LATE)
            assert torch.equal(buffer, values)


@over_gloo
def test_tags_are_lanes_of_their_own_and_order_holds_within_one(ranks):
    if ranks.rank == 0:
        works = [send(torch.full((1,), float(tag * 10 + n)), 1, tag) for tag in (1, 2) for n in range(3)]
        for work in reversed(works):
            work.wait(LATE)
    else:
        buffers = {(tag, n): torch.zeros(1) for tag in (2, 1) for n in range(3)}
        works = [receive(buffer, 0, tag) for (tag, _), buffer in buffers.items()]
        for work in works:
            work.wait(LATE)
        assert {key: buffer.item() for key, buffer in buffers.items()} == {
            (tag, n): tag * 10 + n for tag in (1, 2) for n in range(3)
        }


@over_gloo
def test_there_is_no_sending_to_oneself(ranks):
    with pytest.raises(RuntimeError, match="not connected"):
        send(torch.ones(1), ranks.rank)


@over_gloo
def test_a_peer_that_dies_closes_the_connection_at_once(ranks):
    from pipegrid.testing import Fault

    ranks.plan_fault(Fault("kill", rank=1, at="here"))
    ranks.reach("here")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=GONE):
        receive(torch.zeros(1), 1).wait(LATE)
    assert time.monotonic() - began < LATE.total_seconds() / 2


@over_gloo
def test_a_received_note_can_be_read_after_the_connection_is_closed(ranks):
    # A rank that gives a lane up tells why, and then closes: the other must find the words afterwards.
    if ranks.rank == 0:
        send(torch.full((4,), 7.0), 1, tag=1).wait(LATE)
        with pytest.raises(RuntimeError, match="Timed out"):
            receive(torch.zeros(1), 1, tag=2).wait(timedelta(milliseconds=1))
    else:
        buffer = torch.zeros(4)
        note, data = receive(buffer, 0, tag=1), receive(torch.zeros(4), 0, tag=3)
        with pytest.raises(RuntimeError, match=GONE):
            data.wait(LATE)
        note.wait(timedelta(milliseconds=50))
        assert buffer.tolist() == [7.0] * 4


@over_gloo
def test_a_wait_of_a_hundred_years_is_one(ranks):
    # Gloo adds the bound to the date in nanoseconds: 270 years overflow, and the wait misses its message.
    buffer = torch.zeros(4)
    if ranks.rank == 0:
        ranks.barrier()
        time.sleep(0.3)  # the other side waits
        send(torch.full((4,), 7.0), 1).wait(FOREVER)
    else:
        work = receive(buffer, 0)
        ranks.barrier()
        work.wait(FOREVER)
        assert buffer.tolist() == [7.0] * 4
    assert timedelta(days=20_000) < FOREVER


@pytest.mark.ranks(3, backend="gloo")
def test_the_cut_of_one_connection_ends_what_is_under_way_in_the_whole_group(ranks):
    # So a rank that fails ends its collectives, which have no abort.
    tensors = [torch.ones(1000) for _ in range(3)]
    if ranks.rank:
        dist.broadcast(tensors[0], 0)
        ranks.barrier()
        return
    dist.broadcast(tensors[0], 0)
    works = [
        dist.all_reduce(tensors[0], async_op=True),
        dist.broadcast(tensors[1], 2, async_op=True),
        dist.all_reduce(tensors[2], async_op=True),
    ]
    wire.cut_connection(dist.group.WORLD, 1)
    for work in works:
        with pytest.raises(RuntimeError, match=rf"{GONE}|pair closure"):
            work.wait(LATE)
        assert work.is_completed()
    ranks.barrier()
