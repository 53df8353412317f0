"""Lanes whose messages of a step are known: from an earlier step with a batch of the same shapes."""

from __future__ import annotations

import gc

import pytest
import torch

from pipegrid.transport import (
    Edge,
    P2PCommunicator,
    P2PConfig,
    P2PError,
    P2PMismatchError,
    P2PTimeoutError,
    P2PUsageError,
)
from pipegrid.transport.config import STEPS_KEPT

from .two_ranks import heard, say


def opened(**settings):
    return P2PCommunicator(None, P2PConfig(variable_seq_lengths=True, shapes="learned", **settings))


def lane_of(communicator):
    """From rank 0 to rank 1."""
    return next(lane for lane in communicator.lanes.values() if lane.spec.source == 0)


def moved(ranks, lane, count):
    """Move ``count`` numbers along the lane; what has arrived."""
    if ranks.rank == 0:
        for handle in [lane.isend(torch.full((2,), float(number))) for number in range(count)]:
            handle.wait()
        return []
    return [lane.irecv().result()[0].item() for _ in range(count)]


def step(ranks, lane, turn, count=3):
    lane.begin_step("a batch" if turn else None, learn=not turn)
    before = lane.received - count * turn
    arrived = moved(ranks, lane, count)
    if not turn:
        lane.learn("a batch")
    return before, arrived


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_the_first_receives_are_posted_as_the_step_begins(ranks, ahead):
    with opened(receives_ahead=ahead) as communicator:
        lane = lane_of(communicator)
        for turn in range(3):
            before, arrived = step(ranks, lane, turn)
            lane.begin_step()
            if ranks.rank == 1:
                assert before == (min(ahead, 3) if turn else 0)
                assert arrived == [0.0, 1.0, 2.0]
                assert lane.received == 3 * (turn + 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [2**14, 2**14 + 1])
def test_the_first_small_receive_of_the_next_step_is_posted_in_the_step_before(ranks, size):
    """Of at most 64 KB; gloo ends a send when its receive is posted."""
    communicator = opened()
    lane, payload = lane_of(communicator), torch.arange(float(size))

    def move():
        return lane.isend(payload).wait() if ranks.rank == 0 else lane.irecv().result()

    for turn in range(2):
        lane.begin_step("a batch" if turn else None, learn=not turn)
        move()
        if not turn:
            lane.learn("a batch")
        lane.begin_step()
    ranks.barrier()
    if ranks.rank == 0:
        lane.begin_step("a batch")
        if size > 2**14:
            with pytest.raises(P2PTimeoutError):
                lane.isend(payload).wait(0.3)
        else:
            lane.isend(payload).wait(30.0)
    ranks.barrier()
    if ranks.rank == 1 and size <= 2**14:
        lane.begin_step("a batch")
        assert torch.equal(move(), payload)
    communicator.close()


@pytest.mark.ranks(2)
def test_receives_that_were_posted_for_one_batch_take_no_message_of_another(ranks):
    with opened() as communicator:
        lane, known = lane_of(communicator), set()
        for turn, size in enumerate([2, 3, 2, 3, 3, 5, 2, 2, 5, 3, 5]):
            batch, payloads = f"rows of {size}", [torch.full((size,), turn + number / 8) for number in range(2)]
            lane.begin_step(batch if size in known else None, learn=size not in known)
            if ranks.rank == 0:
                for handle in [lane.isend(payload) for payload in payloads]:
                    handle.wait()
            else:
                for payload in payloads:
                    assert torch.equal(lane.irecv().result(), payload)
            if size not in known:
                lane.learn(batch)
            known.add(size)
            lane.begin_step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batches", [STEPS_KEPT + 20, 1], ids=["others", "learned anew"])
def test_a_batch_that_is_forgotten_leaves_no_memory_behind(ranks, batches):
    """Of 64 that are kept; a receive of the next step had been posted for each."""
    with opened() as communicator:
        lane, living, count = lane_of(communicator), [], STEPS_KEPT + 20
        for number in range(count):
            batch = f"batch {number % batches}"
            for turn in range(2):
                lane.begin_step(batch if turn else None, learn=not turn)
                if ranks.rank == 0:
                    lane.isend(torch.arange(16.0) + number).wait()
                else:
                    assert torch.equal(lane.irecv().result(), torch.arange(16.0) + number)
                if not turn:
                    lane.learn(batch)
                lane.begin_step()
            living.append(sum(tensor.shape == (16,) and tensor.data_ptr() != 0 for tensor in tensors()))
        assert living[-1] == living[STEPS_KEPT + 2]
        for known in (True, False):  # a batch that is kept, and one that is not
            lane.begin_step(batch if known else None, learn=not known)
            if ranks.rank == 0:
                lane.isend(torch.full((16,), 1.0 + known)).wait()
            else:
                assert lane.irecv().result()[0] == 1.0 + known
            lane.begin_step()


def tensors():
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is torch.Tensor]


@pytest.mark.ranks(2)
def test_a_batch_that_one_rank_alone_had_is_not_known(ranks):
    """A rank of another module may be given other parts of a batch: no step of both had the first one."""
    with opened() as communicator:
        neighbours, lane = communicator.neighbours([Edge(0, 1)]), lane_of(communicator)
        for batch in ("ab"[ranks.rank], "a", "a"):
            say(neighbours, "step", batch)
            arrived = moved(ranks, lane, 2)
            assert heard(neighbours) == {}
            for one in neighbours:
                one.end()
            assert arrived == [0.0, 1.0] * ranks.rank


@pytest.mark.ranks(2)
@pytest.mark.parametrize("settings", [{"strict": True}, {"communicators": "shared"}], ids=["strict", "shared"])
def test_not_where_the_order_of_all_transfers_counts(ranks, settings):
    with opened(receives_ahead=2, **settings) as communicator:
        lane = lane_of(communicator)
        for turn in range(3):
            before, arrived = step(ranks, lane, turn)
            assert ranks.rank == 0 or (before, arrived) == (0, [0.0, 1.0, 2.0])


@pytest.mark.ranks(2)
def test_a_step_with_fewer_messages_is_an_error_where_they_are_received(ranks):
    communicator = opened()
    lane = lane_of(communicator)
    for turn in range(2):
        step(ranks, lane, turn)
    lane.begin_step("a batch")
    moved(ranks, lane, 2)
    if ranks.rank == 1:
        with pytest.raises(P2PUsageError, match=r"shapes is \(3,\) .*, and messages of this step are"):
            lane.irecv((3,))
        with pytest.raises(P2PMismatchError, match="has received 1 messages fewer on lane"):
            lane.begin_step()
    ranks.barrier()
    communicator.abort("the test ends")
    communicator.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strict", [False, True])
def test_strict_mode_shows_an_order_that_receives_ahead_would_hide(ranks, strict):
    """Both ranks send before they receive: without a rendezvous it runs, and strict mode is there to show that."""
    communicator = opened(strict=strict, receives_ahead=1, deadline=2.0)
    lanes = sorted(communicator.lanes.values(), key=lambda lane: lane.spec)
    sent = next(lane for lane in lanes if lane.spec.source == ranks.rank)
    received = next(lane for lane in lanes if lane.spec.destination == ranks.rank)
    lanes, payload = (sent, received), torch.ones(2)

    def in_order():
        first, second = (sent.isend, received.irecv) if ranks.rank == 0 else (received.irecv, sent.isend)
        for verb in (first, second):
            verb(*[payload] * (verb == sent.isend)).wait()

    def senders_first():
        sent.isend(payload).wait()
        received.irecv().wait()

    def run(step, *, known):
        for lane in lanes:
            lane.begin_step("a batch" if known else None, learn=not known)
        step()
        for lane in lanes:
            if not known:
                lane.learn("a batch")
            lane.begin_step()

    run(in_order, known=False)
    run(in_order, known=True)
    if not strict:
        run(senders_first, known=True)
        communicator.close()
        return
    with pytest.raises(P2PError):
        run(senders_first, known=True)
    ranks.barrier()
    communicator.close()
