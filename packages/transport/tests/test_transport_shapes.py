"""How a receiver learns what comes, and what happens on both sides where the two disagree."""

import time

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import (
    LaneSpec,
    P2PCommunicator,
    P2PLaneDeadError,
    P2PMismatchError,
    P2PPeerError,
    P2PTimeoutError,
    open_lanes,
)

from .two_ranks import DEADLINE, config

LANE = LaneSpec(0, 1, "there")
SHAPES = [(2, 3), (0,), (), (1, 2, 3, 4), (7,), (2, 0, 2)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("communicators", ["separate", "shared"])
@pytest.mark.parametrize("ahead", [1, 4])
def test_with_headers_shapes_and_dtypes_may_change_with_every_message(ranks, communicators, ahead):
    messages = [
        torch.full(shape, float(n)).to(dtype)
        for n, (shape, dtype) in enumerate((s, d) for s in SHAPES for d in (torch.float32, torch.int16, torch.bool))
    ]
    with open_lanes([LANE], config=config(variable_seq_lengths=True, communicators=communicators)) as lanes:
        lane = lanes[LANE]
        if communicators == "shared":
            ahead = 1
        if ranks.rank == 0:
            for handle in [lane.isend(message) for message in messages]:
                handle.wait()
        else:
            handles = [lane.irecv() for _ in range(ahead)]
            for n, expected in enumerate(messages):
                received = handles.pop(0).result()
                assert (received.shape, received.dtype) == (expected.shape, expected.dtype)
                assert torch.equal(received.detach(), expected)
                if n + ahead < len(messages):
                    handles.append(lane.irecv())
        assert lane.stats.headers == len(messages)


@pytest.mark.ranks(2)
def test_a_long_header_needs_no_more_than_a_short_one(ranks):
    payload = {f"a rather long name for tensor number {n}": torch.full((n,), float(n)) for n in range(100)}
    with open_lanes([LANE], config=config()) as lanes:
        for _ in range(2):
            if ranks.rank == 0:
                lanes[LANE].isend(payload).wait()
            else:
                received = lanes[LANE].irecv().result()
                assert list(received) == list(payload)
                assert all(torch.equal(received[name].detach(), payload[name]) for name in payload)


def both_are_told(ranks, lane, act, text):
    """Both sides of a lane raise the mismatch in time, the lane is dead on both, and says why."""
    began = time.monotonic()
    # On a device group a lane that the other side has ended may be known to be dead before this side's next call.
    known = (P2PMismatchError, P2PLaneDeadError) if lane.mover.streams else P2PMismatchError
    with pytest.raises(known, match=text):
        act()
    assert time.monotonic() - began < DEADLINE + 2.0
    with pytest.raises(P2PLaneDeadError, match="is dead on rank"):
        (lane.isend if ranks.rank == 0 else lane.irecv)(*([torch.ones(2)] if ranks.rank == 0 else []))
    assert isinstance(lane.error, P2PMismatchError)


def send_all(lane, *payloads):
    for handle in [lane.isend(payload) for payload in payloads]:
        handle.wait()


def receive_all(lane, *expectations):
    for expected in expectations:
        lane.irecv(expected).result()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sound", [0, 1, 5])
@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (torch.ones(3), r"float32\[3\]"),
        (torch.ones(2, dtype=torch.float64), r"float64\[2\]"),
        ([torch.ones(2)], r"\[float32\[2\]\]"),
        (None, "is None"),
    ],
    ids=["shape", "dtype", "structure", "none"],
)
def test_a_sender_that_sends_something_else_than_agreed(ranks, sound, sent, text):
    with open_lanes([LANE], config=config()) as lanes:
        lane = lanes[LANE]
        good = [torch.ones(2)] * (1 + sound)
        if ranks.rank == 0:
            send_all(lane, *good)
            both_are_told(ranks, lane, lambda: lane.isend(sent), text)
        else:
            receive_all(lane, *[None] * len(good))
            text = rf"message.*{text}.*\(rank 0 ended lane 0>1.there.\)"
            both_are_told(ranks, lane, lambda: lane.irecv().result(), text)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shapes", ["agreed", "given"])
@pytest.mark.parametrize("sound", [0, 3])
def test_a_receiver_that_expects_another_shape(ranks, shapes, sound):
    with open_lanes([LANE], config=config(shapes=shapes)) as lanes:
        lane = lanes[LANE]
        text = r"rank 1 expects message \d of lane 0>1.there. to be of shape \[3\].*rank 0 announced float32\[2\]"
        if ranks.rank == 0:
            send_all(lane, *[torch.ones(2)] * sound)
            both_are_told(ranks, lane, lambda: send_all(lane, torch.ones(2)), text)
        else:
            receive_all(lane, *[(2,)] * sound)
            both_are_told(ranks, lane, lambda: lane.irecv((3,)).wait(), text)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("given", [True, False])
def test_a_receiver_of_another_dtype(ranks, given):
    # The settings of both ends agree; the message does not keep to them.
    with open_lanes([LANE], config=config(pipeline_dtype=torch.float32)) as lanes:
        lane = lanes[LANE]
        # As if they had been told differently.
        lane.outgoing.dtype = lane.incoming.dtype = [torch.float64, torch.float32][ranks.rank]
        text = r"in torch\.float32, but rank 0 announced float64\[2\]"
        if ranks.rank == 0:
            both_are_told(ranks, lane, lambda: send_all(lane, torch.ones(2, dtype=torch.float64)), text)
        else:
            both_are_told(ranks, lane, lambda: lane.irecv((2,) if given else None).wait(), text)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("agreed", [True, False])
@pytest.mark.parametrize("sent", [torch.float64, torch.float16, torch.int32])
def test_a_message_of_another_dtype_than_agreed(ranks, agreed, sent):
    # Of as many bytes or more or fewer: gloo would take each for the other.
    shapes = {LANE: torch.empty(2, device="meta")} if agreed else None
    with open_lanes([LANE], config=config(), agreed=shapes) as lanes:
        lane = lanes[LANE]
        text = rf"message 2 of lane 0>1.there. is {str(sent)[6:]}\[2\], but float32\[2\] was announced to rank 1"
        if ranks.rank == 0:
            send_all(lane, torch.ones(2), torch.ones(2))
            ranks.barrier()  # the receiver is through: on a device a sender's wait does not tell
            both_are_told(ranks, lane, lambda: lane.isend(torch.ones(2, dtype=sent)), text)
        else:
            receive_all(lane, (2,), (2,))
            ranks.barrier()
            both_are_told(ranks, lane, lambda: lane.irecv((2,)).result(), text + r".*\(rank 0 ended lane 0>1.there.\)")


@pytest.mark.ranks(2)
def test_renewals_at_two_messages(ranks):
    with open_lanes([LANE], config=config()) as lanes:
        lane = lanes[LANE]
        text = r"rank 1 waits for message 1 of lane 0>1.there., but rank 0 announced message 2; call renew\(\) on both"
        if ranks.rank == 0:
            send_all(lane, torch.ones(2))
            lane.isend(torch.ones(2))
            lane.renew()
            both_are_told(ranks, lane, lane.isend(torch.ones(3)).wait, text)
        else:
            receive_all(lane, None)
            lane.renew()
            both_are_told(ranks, lane, lane.irecv().wait, text)


@pytest.mark.ranks(2)
def test_lists_of_other_lengths_where_shapes_vary(ranks):
    with open_lanes([LANE], config=config(shapes="header")) as lanes:
        lane = lanes[LANE]
        text = r"to be of shape \[\[\], \[\]\], but rank 0 announced \[float32\[2\]\]"
        if ranks.rank == 0:
            both_are_told(ranks, lane, lambda: send_all(lane, [torch.ones(2)]), text)
        else:
            both_are_told(ranks, lane, lambda: lane.irecv([(), ()]).wait(), text)


def deadline_of_one_of_them(ranks, act):
    """Nobody's message meets the other's receive: whose deadline is first tells the other, who raises its words."""
    with pytest.raises((P2PTimeoutError, P2PPeerError)) as found:
        act()
    ranks.barrier()
    error = found.value
    waited = ranks.rank if isinstance(error, P2PTimeoutError) else 1 - ranks.rank
    assert f"rank {waited} waited 1 s for" in str(error)
    assert "message 1 of lane 0>1[there]" in str(error)


@pytest.mark.ranks(2, backend="gloo")  # whose tags tell epochs apart
@pytest.mark.parametrize("renews", [0, 1], ids=["sender", "receiver"])
def test_renewed_by_one_side_only_ends_at_a_deadline_and_overflows_nothing(ranks, renews):
    # The receiver has posted the old size where the sender renewed, and waits for a header where it did itself.
    with open_lanes([LANE], config=config(deadline=1.0)) as lanes:
        lane = lanes[LANE]
        send_all(lane, torch.ones(2)) if ranks.rank == 0 else receive_all(lane, None)
        if ranks.rank == renews:
            lane.renew()
        message = torch.ones(200 if renews == 0 else 2)
        deadline_of_one_of_them(ranks, lambda: send_all(lane, message) if ranks.rank == 0 else receive_all(lane, None))


@pytest.mark.ranks(3)
def test_in_a_pipeline_the_other_lanes_live_on(ranks):
    settings = config(pipeline_dtype=torch.float32)
    communicator = P2PCommunicator(dist.group.WORLD, settings)
    if ranks.rank == 1:
        with pytest.raises(P2PMismatchError):
            communicator.recv_forward((3,))
    elif ranks.rank == 0:
        with pytest.raises(P2PMismatchError):
            communicator.send_forward(torch.ones(2))
    if ranks.rank == 1:
        communicator.send_forward(torch.ones(4))
    elif ranks.rank == 2:
        assert communicator.recv_forward((4,)).tolist() == [1] * 4
    communicator.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shapes", ["agreed", "header"])
@pytest.mark.parametrize("options", [{}, {"strict": True}, {"communicators": "shared"}], ids=str)
def test_a_note_travels_with_the_header(ranks, shapes, options):
    with open_lanes([LANE], config=config(shapes=shapes, **options)) as lanes:
        lane = lanes[LANE]
        for number in range(3):
            announced = number == 0 or shapes == "header"
            note = f"of {number if announced else 0}"
            if ranks.rank == 0:
                lane.isend(torch.ones(2), note=note if announced else None).wait()
            else:
                receive = lane.irecv()
                assert torch.equal(receive.result(), torch.ones(2))
                assert receive.note == note
        assert lane.stats.headers == (1 if shapes == "agreed" else 3)
        dist.barrier()
        if shapes == "agreed" and ranks.rank == 0:
            with pytest.raises(P2PMismatchError):
                lane.isend(torch.ones(2), note="another")
