"""The way of a backend that orders streams, held on a CPU: what the progress thread polls, and what it makes of it.

The backend is gloo behind works that behave as NCCL's do (`Polled`): a wait returns at once, and completion can only
be asked for. NCCL itself is in `test_transport_gpu`.
"""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import (
    LaneSpec,
    P2PConfig,
    P2PError,
    P2PMismatchError,
    P2PPeerError,
    P2PTimeoutError,
    opening,
    wire,
)
from pipegrid.transport.backends.nccl import StreamedLane

THERE, BACK = LaneSpec(0, 1, "there"), LaneSpec(1, 0, "back")
DEADLINE = 20.0


class Polled:
    """A gloo work that completes by itself; waiting for it waits for nothing."""

    def __init__(self, work):
        self.done = False
        self.thread = threading.Thread(target=self._finish, args=(work,), daemon=True)
        self.thread.start()

    def _finish(self, work):
        try:
            work.wait(timedelta(seconds=2 * DEADLINE))
        except RuntimeError:
            return
        self.done = True

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return self.done


class Batch(Polled):
    """The one work of a coalesced batch."""

    def __init__(self, works):
        self.parts = [Polled(work) for work in works]

    def is_completed(self):
        return all(part.is_completed() for part in self.parts)


@pytest.fixture
def streamed(monkeypatch):
    """`open_lanes` over that backend; the number of transfers in each batch that was issued."""
    batches = []
    issue = dist.batch_isend_irecv

    def batch(operations):
        assert len({operation.group for operation in operations}) == 1
        batches.append(len(operations))
        return [Batch(issue(operations))]

    connect = opening._connect

    def connected(*arguments, **options):
        found, groups = connect(*arguments, **options)
        for communicator, _ in found.values():
            communicator.streamed = True
        return found, groups

    monkeypatch.setattr(wire.dist, "batch_isend_irecv", batch)
    monkeypatch.setattr(opening, "_connect", connected)
    return batches


def config(**settings):
    return P2PConfig(**{"deadline": DEADLINE, "open_deadline": DEADLINE, **settings})


def until(condition):
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.001)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("settings", [{}, {"shapes": "header"}, {"communicators": "shared"}, {"strict": True}], ids=str)
def test_messages_arrive_and_end_without_a_wait(ranks, streamed, settings):
    with opening.open_lanes([THERE, BACK], config=config(**settings)) as lanes:
        assert all(isinstance(lane, StreamedLane) for lane in lanes.values())
        mine, theirs = (lanes[THERE], lanes[BACK]) if ranks.rank == 0 else (lanes[BACK], lanes[THERE])
        for n in range(5):
            with lanes.batch():
                sent = mine.isend([torch.full((3,), float(n)), torch.tensor(n)])
                received = theirs.irecv()
            received.synchronize()
            assert [part.tolist() for part in received.result()] == [[n] * 3, n]
            until(sent.is_completed)
            until(lambda: not mine.queue and not theirs.queue)
        assert mine.stats.messages == theirs.stats.messages == 5
        assert mine.stats.transfers == theirs.stats.transfers == 10


@pytest.mark.ranks(2)
def test_on_a_shared_communicator_a_batch_is_one(ranks, streamed):
    with opening.open_lanes([THERE, BACK], config=config(communicators="shared")) as lanes:
        mine, theirs = (lanes[THERE], lanes[BACK]) if ranks.rank == 0 else (lanes[BACK], lanes[THERE])
        del streamed[:]
        with lanes.batch():
            sent = mine.isend([torch.ones(2), torch.ones(3)])
            received = theirs.irecv()
        sent.synchronize()
        received.synchronize()
        assert streamed == [4]


@pytest.mark.ranks(2)
def test_a_wait_does_not_hold_the_host(ranks, streamed):
    with opening.open_lanes([THERE], config=config(), standing={THERE: torch.ones(2)}) as lanes:
        lane = lanes[THERE]
        if ranks.rank == 1:
            handle = lane.irecv()
            handle.wait()
            assert not handle.is_completed()
            assert lane.stats.host_syncs == 0
            ranks.barrier()
            handle.synchronize()
            assert lane.stats.host_syncs == 1
            assert handle.result().tolist() == [1, 1]
        else:
            ranks.barrier()
            lane.isend(torch.ones(2)).synchronize()


@pytest.mark.ranks(2)
def test_a_next_hop_starts_when_the_message_is_there(ranks, streamed):
    with opening.open_lanes([THERE, BACK], config=config()) as lanes:
        if ranks.rank == 0:
            lanes[THERE].isend(torch.ones(2))
            received = lanes[BACK].irecv()
            received.synchronize()
            assert received.result().tolist() == [2, 2]
        else:
            lanes[THERE].irecv().on_done(lambda handle: lanes[BACK].isend(handle.result().detach() + 1))
        ranks.barrier()


@pytest.mark.ranks(2)
def test_what_is_not_done_by_the_deadline_ends_though_a_wait_cannot(ranks, streamed):
    with opening.open_lanes([THERE], config=config(deadline=0.5), standing={THERE: torch.ones(2)}) as lanes:
        lane = lanes[THERE]
        if ranks.rank == 1:
            handle = lane.irecv()
            began = time.monotonic()
            handle.wait()
            with pytest.raises(P2PTimeoutError, match=r"rank 1 waited 0\.5 s"):
                handle.synchronize()
            assert time.monotonic() - began < 0.5 + 15.0
            ranks.barrier()
        else:
            ranks.barrier()
            # An abort wakes nobody on gloo, so the first one may still meet the receive that was given up.
            with pytest.raises(P2PError):
                for _ in range(2):
                    lane.isend(torch.ones(2)).synchronize()


@pytest.mark.ranks(2)
def test_the_other_sides_last_words_end_a_transfer_that_is_under_way(ranks, streamed):
    with opening.open_lanes([THERE], config=config()) as lanes:
        lane = lanes[THERE]
        if ranks.rank == 0:
            lane.isend(torch.ones(2)).synchronize()
            ranks.barrier()
            with pytest.raises(P2PMismatchError):
                lane.isend(torch.ones(3))
        else:
            lane.irecv().synchronize()
            handle = lane.irecv()
            handle.wait()
            ranks.barrier()
            with pytest.raises(P2PMismatchError, match=r"rank 0 ended lane 0>1.*float32\[3\]"):
                handle.synchronize()
        ranks.barrier()


@pytest.mark.ranks(2)
def test_an_abort_ends_it_too(ranks, streamed):
    with opening.open_lanes([THERE], config=config(), standing={THERE: torch.ones(2)}) as lanes:
        if ranks.rank == 0:
            ranks.barrier()
            lanes.abort("out of memory")
        else:
            handle = lanes[THERE].irecv()
            ranks.barrier()
            with pytest.raises(P2PPeerError, match="out of memory"):
                handle.synchronize()
        ranks.barrier()
