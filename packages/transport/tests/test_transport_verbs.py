"""Every verb of the communicator on real ranks, against what arithmetic says; and what is refused."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import (
    Direction,
    Edge,
    LaneSpec,
    P2PCommunicator,
    P2PConfig,
    P2PError,
    P2PMismatchError,
    P2PTimeoutError,
    P2PUsageError,
    PipelineCommunicator,
    is_single_shape,
    open_lanes,
)

from .stages import in_turn, on_one_stream
from .two_ranks import equal, values


def value(rank, shape=(2, 3), dtype=torch.float32):
    return torch.full(shape, rank + 1, dtype=dtype)


def communicator(ranks, **options):
    options.setdefault("pipeline_dtype", torch.float32)
    return P2PCommunicator(dist.group.WORLD, P2PConfig(strict=ranks.strict_sends, **options))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("batch", [True, False], ids=["batched", "unbatched"])
def test_the_blocking_verbs_move_activations_on_and_gradients_back(ranks, batch):
    pipe = communicator(ranks, batch_p2p_comm=batch)
    assert isinstance(pipe, PipelineCommunicator)
    me, last, one_stream = ranks.rank, ranks.world_size - 1, on_one_stream(ranks)
    assert (pipe.current_stage, pipe.total_stages) == (me, ranks.world_size)
    assert (pipe.is_pp_first_stage, pipe.is_pp_last_stage) == (me == 0, me == last)
    assert (pipe.next_rank, pipe.prev_rank) == ((me + 1) % ranks.world_size, (me - 1) % ranks.world_size)
    for _ in range(3):
        x = pipe.recv_forward((2, 3), me == 0)
        assert x is None if me == 0 else torch.equal(x, value(me - 1)) and x.requires_grad
        g = pipe.send_forward_recv_backward(value(me), (2, 3), me == last)
        assert g is None if me == last else torch.equal(g, -value(me + 1))
        pipe.send_backward(-value(me), me == 0)
        x = pipe.recv_forward((2, 3), me == 0)
        assert x is None if me == 0 else torch.equal(x, value(me - 1))
        pipe.send_forward(value(me), me == last)
        if one_stream:  # the fused verb over there receives before it sends
            pipe.send_forward(value(me), me == last)
        g = pipe.recv_backward((2, 3), me == last)
        assert g is None if me == last else torch.equal(g, -value(me + 1))
        x = pipe.send_backward_recv_forward(-value(me), (2, 3), me == 0)
        assert x is None if me == 0 else torch.equal(x, value(me - 1))
        if not one_stream:
            pipe.send_forward(value(me), me == last)
    pipe.close()


@pytest.mark.ranks(2, 3)
def test_a_list_of_shapes_receives_a_list(ranks):
    pipe = communicator(ranks)
    me, last = ranks.rank, ranks.world_size - 1
    for _ in range(2):
        x = pipe.recv_forward([(2, 3), (4,)], me == 0)
        assert x is None if me == 0 else [tuple(t.shape) for t in x] == [(2, 3), (4,)]
        pipe.send_forward([value(me), value(me, (4,))], me == last)
    pipe.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("shared", ["separate", "shared"])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_ring_verbs_wrap_around_and_never_mix_directions(ranks, overlap, shared):
    """With two ranks the next and the previous one are the same: activations must not be taken for gradients."""
    pipe = communicator(ranks, communicators=shared)
    size, me = ranks.world_size, ranks.rank
    with in_turn(ranks, pipe):
        ring(pipe, size, me, overlap)
    pipe.close()


def ring(pipe, size, me, overlap):
    for _ in range(3):
        x, g = pipe.send_forward_backward_recv_forward_backward(value(me), -value(me), True, True, (2, 3))
        assert torch.equal(x, value((me - 1) % size))
        assert torch.equal(g, -value((me + 1) % size))
        x = pipe.send_forward_recv_forward(value(me), True, (2, 3), overlap_p2p_comm=overlap)
        if overlap:
            x, handles = x
            assert set(handles) == {"send_next", "recv_prev"}
            for handle in handles.values():
                handle.wait()
                handle.wait()
                assert handle.is_completed()
        assert torch.equal(x, value((me - 1) % size))
        g = pipe.send_backward_recv_backward(-value(me), True, (2, 3), overlap_p2p_comm=overlap)
        if overlap:
            g, handles = g
            assert set(handles) == {"send_prev", "recv_next"}
            handles["recv_next"].wait()
            handles["send_prev"].wait()
        assert torch.equal(g, -value((me + 1) % size))


PAYLOADS = [
    torch.arange(6, dtype=torch.int64),
    torch.tensor([True, False]),
    values((2, 1, 3, 1, 2), torch.float64),
    torch.tensor(3.5),
    torch.empty(0, 4),
    values((3,), torch.bfloat16),
    {"x": values((2, 2)), "mask": torch.tensor([1, 2]), "none": None},
    [values((1,)), None, (values((2,)), torch.tensor([7]))],
    None,
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("index", range(len(PAYLOADS)))
def test_any_structure_arrives_as_it_was_sent(ranks, index):
    spec = LaneSpec(0, 1, "structure")
    with open_lanes([spec], config=P2PConfig(strict=ranks.strict_sends, deadline=20)) as lanes:
        for _ in range(3):
            if ranks.rank == 0:
                lanes[spec].isend(PAYLOADS[index]).wait()
            else:
                assert equal(PAYLOADS[index], lanes[spec].irecv().result())
        if ranks.rank == 0:
            assert lanes[spec].stats.headers <= 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("vary", [True, False])
def test_a_thousand_messages_with_random_waits_arrive_in_order(ranks, vary):
    """Both directions at once; the bytes are compared."""
    there, back = LaneSpec(0, 1, "there"), LaneSpec(1, 0, "back")
    sizes = random.Random(7)
    rows = [sizes.randrange(50) if vary else 16 for _ in range(1000)]
    mine, theirs = (there, back) if ranks.rank == 0 else (back, there)
    waits = random.Random(ranks.rank)
    config = P2PConfig(variable_seq_lengths=vary, strict=False, deadline=30)
    with open_lanes([there, back], config=config) as lanes, in_turn(ranks, lanes):
        sent, received = [], []
        for number, size in enumerate(rows):
            with lanes.batch(by_lane=True) if on_one_stream(ranks) else nullcontext():
                sent.append(lanes[mine].isend(torch.full((size, 2), float(number + 10_000 * ranks.rank))))
                received.append(lanes[theirs].irecv())
            while received and waits.random() < 0.5:
                check(received, number=number + 1 - len(received), rank=1 - ranks.rank, rows=rows)
        while received:
            check(received, number=len(rows) - len(received), rank=1 - ranks.rank, rows=rows)
        for handle in sent:
            handle.wait()


def check(received, *, number, rank, rows):
    arrived = received.pop(0).result()
    assert torch.equal(arrived.detach(), torch.full((rows[number], 2), float(number + 10_000 * rank)))


@pytest.mark.ranks(2)
def test_a_batch_issues_both_directions_at_once(ranks):
    there, back = LaneSpec(0, 1, "there"), LaneSpec(1, 0, "back")
    mine, theirs = (there, back) if ranks.rank == 0 else (back, there)
    with open_lanes([there, back], config=P2PConfig(strict=True, deadline=20)) as lanes, in_turn(ranks, lanes):
        for number in range(5):
            with lanes.batch(by_lane=on_one_stream(ranks)):
                handle = lanes[mine].isend(torch.full((2,), float(number)))
                arriving = lanes[theirs].irecv()
            handle.wait()
            assert arriving.result().tolist() == [number, number]


@pytest.mark.ranks(2)
def test_strict_mode_turns_a_wrong_order_into_a_timeout(ranks):
    """Both sides send first: buffered sends would survive it, a rendezvous does not."""
    there, back = LaneSpec(0, 1, "there"), LaneSpec(1, 0, "back")
    mine = there if ranks.rank == 0 else back
    with open_lanes([there, back], config=P2PConfig(strict=True, deadline=2)) as lanes:
        with pytest.raises(P2PError):
            lanes[mine].isend(torch.ones(2)).wait()
        ranks.barrier()


@pytest.mark.ranks(1)
def test_a_lane_to_oneself_copies(ranks):
    spec = LaneSpec(0, 0, "self")
    with open_lanes([spec]) as lanes:
        x = torch.randn(3, requires_grad=True)
        handle = lanes[spec].irecv()
        assert not handle.is_completed()
        lanes[spec].isend(x.detach())
        received = handle.result()
        assert torch.equal(received.detach(), x.detach())
        assert received.requires_grad
        assert received.data_ptr() != x.data_ptr()


@pytest.mark.ranks(2)
def test_another_shape_than_agreed_is_a_mismatch_on_both_sides(ranks):
    spec = LaneSpec(0, 1, "shapes")
    with open_lanes([spec], config=P2PConfig(deadline=10)) as lanes:
        if ranks.rank == 0:
            lanes[spec].isend(torch.ones(2, 3)).wait()
            with pytest.raises(P2PMismatchError, match=r"2, 4"):
                lanes[spec].isend(torch.ones(2, 4)).wait()
        else:
            assert lanes[spec].irecv().result().shape == (2, 3)
            with pytest.raises(P2PMismatchError):
                lanes[spec].irecv().wait()
        ranks.barrier()


@pytest.mark.ranks(2)
def test_a_receive_that_nobody_sends_times_out_and_the_lane_is_dead(ranks):
    spec = LaneSpec(0, 1, "silent")
    with open_lanes([spec], config=P2PConfig(deadline=1.0)) as lanes:
        if ranks.rank == 1:
            began = time.monotonic()
            with pytest.raises(P2PTimeoutError, match=r"rank 1 waited .* message 0 of lane .* no answer from rank 0"):
                lanes[spec].irecv().wait()
            assert time.monotonic() - began < 1.0 + 15.0
            with pytest.raises(RuntimeError, match="silent"):
                lanes[spec].irecv()
        ranks.barrier()


@pytest.mark.ranks(2)
def test_what_cannot_be_sent_is_refused_before_anything_is_sent(ranks):
    pipe = communicator(ranks, deadline=10)
    edge = Edge(0, 1)
    if ranks.rank == 0:
        for payload, text in (
            (torch.ones(3, 2).t(), "contiguous"),
            (torch.ones(2, dtype=torch.float64), "float64"),
            ({"x": 3}, "int"),
        ):
            with pytest.raises(P2PUsageError, match=text):
                pipe.isend(payload, edge=edge, direction=Direction.FORWARD)
        with pytest.raises(P2PUsageError, match="the edge is 0>2; it must be an Edge of this pipeline"):
            pipe.isend(torch.ones(1), edge=Edge(0, 2), direction=Direction.FORWARD)
        pipe.isend(torch.ones(2), edge=edge, direction=Direction.FORWARD).wait()
    else:
        assert pipe.irecv(edge=edge, direction=Direction.FORWARD).result().tolist() == [1, 1]
    pipe.close()


@pytest.mark.ranks(2)
def test_the_seeds_texts_stand_in_the_errors(ranks):
    pipe = P2PCommunicator(dist.group.WORLD, P2PConfig())
    with pytest.raises(P2PUsageError, match="pipeline_dtype must be provided if recv_prev is True"):
        pipe.recv_forward((1,), is_first_stage=False)
    with pytest.raises(P2PUsageError, match="dtype must be provided if recv_next is True"):
        pipe.recv_backward((1,), is_last_stage=False)
    pipe.close()
    pipe = P2PCommunicator(dist.group.WORLD, P2PConfig(pipeline_dtype=torch.float32, shapes="given"))
    with pytest.raises(P2PUsageError, match=r"tensor_shape must be specified if recv_prev is True\."):
        pipe.recv_forward(None, is_first_stage=False)
    pipe.close()


def test_one_shape_or_several():
    assert is_single_shape((2, 3))
    assert is_single_shape(torch.Size([2, 3]))
    assert not is_single_shape([(2, 3)])
    assert not is_single_shape([torch.Size([2])])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"deadline": 0}, "deadline is 0; it must be seconds above 0 and of at most 31536000"),
        ({"pipeline_dtype": "float32"}, "pipeline_dtype is 'float32'; it must be a torch.dtype or None"),
        ({"shapes": "guess"}, "shapes is 'guess'"),
        ({"variable_seq_lengths": True, "shapes": "agreed"}, "which fixes them, but variable_seq_lengths is True"),
        ({"batch_p2p_comm": 1}, "batch_p2p_comm is 1; it must be True or False"),
    ],
)
def test_settings_are_checked_at_birth(options, text):
    with pytest.raises(P2PUsageError, match=text):
        P2PConfig(**options)
