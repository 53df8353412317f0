"""The way of a backend that orders streams, held on a CPU: what the progress thread polls, and what it makes of it.

The backend is gloo behind works that behave as NCCL's do (`Polled`): a wait returns at once, and completion can only
be asked for. NCCL itself is in `test_transport_gpu`.
"""

import contextlib
import threading
import time
from datetime import timedelta

import pytest
import torch

from pipegrid.transport import (
    P2PError,
    P2PMismatchError,
    P2PPeerError,
    P2PTimeoutError,
)
from pipegrid.transport.backends import GlooMover, Mover
from pipegrid.transport.control import connector, opening

from .two_ranks import BACK, DEADLINE, THERE, config, until

PLAIN = dict.fromkeys((THERE, BACK), torch.ones(2))
over_gloo = pytest.mark.ranks(2, backend="gloo")  # `Polled` makes gloo's works those of a device group


class Polled:
    """A gloo ticket that completes by itself, for every message of a batch; ordering after it blocks no thread."""

    def __init__(self, tickets):
        self.ended = [False] * len(tickets)
        for index, ticket in enumerate(tickets):
            threading.Thread(target=self._finish, args=(index, ticket), daemon=True).start()

    def _finish(self, index, ticket):
        with contextlib.suppress(RuntimeError):
            ticket.hold(timedelta(seconds=2 * DEADLINE))
            self.ended[index] = True

    def order(self):
        pass

    def done(self):
        return all(self.ended)

    def hold(self, timeout):
        until(self.done)


@pytest.fixture
def streamed(monkeypatch):
    """`open_lanes` over that mover; the number of tensors in each batch that was started."""
    batches = []

    class StreamMover(GlooMover):
        streams = True

        def start(self, operations):
            batches.append(sum(len(tensors) for _, tensors, *_ in operations))
            return [Polled([GlooMover.start_one(self, *operation) for operation in operations])] * len(operations)

        start_one, starter = Mover.start_one, Mover.starter

    monkeypatch.setattr(connector, "GlooMover", StreamMover)
    return batches


@over_gloo
@pytest.mark.parametrize("settings", [{}, {"shapes": "header"}, {"communicators": "shared"}, {"strict": True}], ids=str)
def test_messages_arrive_and_end_without_a_wait(ranks, streamed, settings):
    with opening.open_lanes([THERE, BACK], config=config(**settings)) as lanes:
        assert all(lane.mover.streams for lane in lanes.values())
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


@over_gloo
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


@over_gloo
def test_a_wait_does_not_hold_the_host(ranks, streamed):
    with opening.open_lanes([THERE], config=config(), agreed={THERE: torch.ones(2)}) as lanes:
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


@over_gloo
def test_the_end_is_seen_though_nobody_waits_and_the_next_hop_starts_on_the_plans_thread(ranks, streamed):
    with opening.open_lanes([THERE, BACK], config=config(), agreed=PLAIN) as lanes:
        if ranks.rank == 0:
            lanes[THERE].isend(torch.ones(2))
            received = lanes[BACK].irecv()
            received.synchronize()
            assert received.result().tolist() == [2, 2]
        else:
            came = []
            lanes[THERE].irecv().on_done(came.append)
            until(lambda: came)
            lanes[BACK].isend(came[0].result().detach() + 1).synchronize()
        ranks.barrier()


@over_gloo
def test_a_callback_may_not_start_a_transfer(ranks, streamed):
    """The progress thread of each rank would launch kernels in an order of its own."""
    with opening.open_lanes([THERE, BACK], config=config(), agreed=PLAIN) as lanes:
        if ranks.rank == 0:
            lanes[THERE].isend(torch.ones(2)).synchronize()
        else:
            lanes[THERE].irecv().on_done(lambda handle: lanes[BACK].isend(torch.ones(2)))
            until(lambda: lanes[THERE].error is not None)
            assert "only the thread that runs the plan" in str(lanes[THERE].error)
        ranks.barrier()


@over_gloo
def test_what_is_not_done_by_the_deadline_ends_though_a_wait_cannot(ranks, streamed):
    with opening.open_lanes([THERE], config=config(deadline=0.5), agreed={THERE: torch.ones(2)}) as lanes:
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


@over_gloo
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
            with pytest.raises(P2PMismatchError, match=r"float32\[3\].*rank 0 ended lane 0>1"):
                handle.synchronize()
        ranks.barrier()


@over_gloo
def test_an_abort_ends_it_too(ranks, streamed):
    with opening.open_lanes([THERE], config=config(), agreed={THERE: torch.ones(2)}) as lanes:
        if ranks.rank == 0:
            ranks.barrier()
            lanes.abort("out of memory")
        else:
            handle = lanes[THERE].irecv()
            ranks.barrier()
            with pytest.raises(P2PPeerError, match="out of memory"):
                handle.synchronize()
        ranks.barrier()


class Aborted:
    """The ticket of a work that another thread aborts while a stream is ordered after it: it looks done."""

    def __init__(self, lane):
        self.lane = lane

    def order(self):
        self.lane.ending.take_error(P2PPeerError("rank 0 ended lane 0>1"))  # the first part of an end

    def done(self):
        return True


@over_gloo
@pytest.mark.parametrize("verb", [pytest.param("wait", marks=pytest.mark.nightly), "is_completed"])
def test_an_aborted_transfer_that_looks_done_has_failed(ranks, streamed, verb):
    with opening.open_lanes([THERE], config=config(), agreed={THERE: torch.ones(2)}) as lanes:
        if ranks.rank == 1:
            lane = lanes[THERE]
            handle = lane.irecv()
            handle.ticket = Aborted(lane)
            if verb == "is_completed":
                handle.ticket.order()
                assert handle.is_completed()
            with pytest.raises(P2PPeerError, match="rank 0 ended"):
                handle.wait()
        ranks.barrier()
