"""Receives that a lane keeps posted ahead: a sender need not wait for a receiver that is late."""

import contextlib
from functools import partial

import pytest
import torch

from pipegrid.transport import LaneSpec, P2PConfig, P2PUsageError, open_lanes

THERE, BACK = LaneSpec(0, 1, "there"), LaneSpec(1, 0, "back")
DEADLINE = 20.0
AHEAD = 3
config = partial(P2PConfig, deadline=DEADLINE, open_deadline=DEADLINE, receives_ahead=AHEAD)
over_gloo = pytest.mark.ranks(2, backend="gloo")  # on device groups receives_ahead does nothing


def exchange(lane, value, **options):
    """One message of a lane; what arrived, on the receiver."""
    if lane.rank == lane.spec.source:
        lane.isend(torch.full((2,), float(value))).wait()
        return [value, value]
    return lane.irecv(**options).result().tolist()


@over_gloo
@pytest.mark.parametrize("communicators", ["separate", "shared"])
def test_messages_keep_their_order(ranks, communicators):
    with open_lanes([THERE, BACK], config=config(communicators=communicators)) as lanes:
        for n in range(12):
            with lanes.batch() if n % 3 else contextlib.nullcontext():
                mine, theirs = (THERE, BACK) if ranks.rank == 0 else (BACK, THERE)
                sent, received = lanes[mine].isend(torch.full((2,), float(n))), lanes[theirs].irecv()
            assert received.result().tolist() == [n, n]
            sent.wait()


@pytest.mark.ranks(2)
def test_a_lane_that_has_just_become_steady_shares_a_batch_with_one_that_has_not(ranks):
    with open_lanes([THERE, BACK], config=config()) as lanes:
        for n in range(2):
            assert exchange(lanes[THERE], n) == [n, n]
        for n in range(2, 6):
            with lanes.batch():
                if ranks.rank == 0:
                    sent, received = lanes[THERE].isend(torch.full((2,), float(n))), lanes[BACK].irecv()
                else:
                    received, sent = lanes[THERE].irecv(), lanes[BACK].isend(torch.full((2,), float(n)))
            assert received.result().tolist() == [n, n]
            sent.wait()


@over_gloo
def test_sends_end_before_their_receives_are_asked_for(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        lane = lanes[THERE]
        for n in range(2):
            exchange(lane, n)
        ranks.barrier()
        if ranks.rank == 0:
            for n in range(2, 2 + AHEAD):
                lane.isend(torch.full((2,), float(n))).wait(DEADLINE / 2)
        ranks.barrier()
        if ranks.rank == 1:
            assert [lane.irecv().result().tolist() for _ in range(AHEAD)] == [[n, n] for n in range(2, 2 + AHEAD)]


@over_gloo
def test_each_costs_a_buffer(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        lane = lanes[THERE]
        for n in range(6):
            exchange(lane, n)
        if ranks.rank == 1:
            assert (lane.stats.messages, lane.stats.transfers, lane.stats.live) == (6, 6, 6)
            assert lane.stats.bytes == 6 * 8
            assert lane.stats.allocations == 6 + AHEAD


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("settings", "payload"),
    [
        ({"strict": True}, torch.ones(2)),
        ({"communicators": "shared"}, torch.ones(2)),
        ({"shapes": "header"}, torch.ones(2)),
        ({}, [torch.ones(2)]),
        ({}, torch.ones(0)),
    ],
    ids=["strict", "shared", "headers", "list", "empty"],
)
def test_elsewhere_none_is_posted_ahead(ranks, settings, payload):
    with open_lanes([THERE, BACK], config=config(**settings)) as lanes:
        lane = lanes[THERE]
        for _ in range(5):
            (lane.isend(payload) if ranks.rank == 0 else lane.irecv()).wait()
        assert lane.stats.allocations == (0 if ranks.rank == 0 else 5)


@pytest.mark.ranks(2)
def test_a_receive_of_another_form_gets_what_was_posted_before(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        lane = lanes[THERE]
        for n in range(6):
            if ranks.rank == 0:
                exchange(lane, n)
            elif n % 2:
                (received,) = lane.irecv([(2,)]).result()
                assert received.tolist() == [n, n]
            else:
                assert exchange(lane, n) == [n, n]
        assert lane.stats.bytes == 6 * 8


@pytest.mark.ranks(2)
def test_renewed_shapes_leave_old_receives_behind(ranks):
    """More often than there are epochs to tell apart on a communicator that lanes share."""
    with open_lanes([THERE], config=config()) as lanes:
        lane = lanes[THERE]
        for size in range(1, 20):
            for n in range(3):
                if ranks.rank == 0:
                    lane.isend(torch.full((size,), float(n))).wait()
                else:
                    assert lane.irecv().result().tolist() == [n] * size
            lane.renew()


@pytest.mark.parametrize("value", [-1, 1.0, True, None, 1025])
def test_is_a_count(value):
    with pytest.raises(P2PUsageError, match="receives_ahead is .* an integer of 0 to 1024"):
        P2PConfig(receives_ahead=value)
