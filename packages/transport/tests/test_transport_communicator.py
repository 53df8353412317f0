"""Every verb of P2PCommunicator against what must arrive, on 2, 3, 4 and 8 stages."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import P2PCommunicator

from .stages import MODES, SHAPE, activation, assert_received, config, gradient, in_turn, on_one_stream

SHAPES = [(), (0,), (3,), (2, 0), (2, 3), (1, 2, 3), (2, 1, 3, 2), (2, 1, 1, 2, 3)]


def assert_every_verb_delivers(ranks, communicator, activation, gradient, shapes=SHAPE):
    """Call all nine verbs, with what ``activation`` and ``gradient`` make for a stage and a microbatch; `in_turn`."""
    me, count = communicator.current_stage, communicator.total_stages
    first, last = communicator.is_pp_first_stage, communicator.is_pp_last_stage
    before, after = (me - 1) % count, (me + 1) % count
    kept = []

    def expect(received, expected):
        assert_received(received, expected)
        kept.append((received, expected))

    # Down the pipeline, and back up.
    expect(communicator.recv_forward(shapes, first), None if first else activation(before, 0))
    communicator.send_forward(activation(me, 0), last)
    expect(communicator.recv_backward(shapes, last), None if last else gradient(after, 0))
    communicator.send_backward(gradient(me, 0), first)

    # Both at once between two neighbours, one pair after the other.
    for left in range(count - 1):
        if me == left:
            expect(communicator.send_forward_recv_backward(activation(me, 1), shapes, last), gradient(after, 2))
        elif me == left + 1:
            expect(communicator.recv_forward(shapes, first), activation(before, 1))
            communicator.send_backward(gradient(me, 2), first)
    for right in range(1, count):
        if me == right:
            expect(communicator.send_backward_recv_forward(gradient(me, 3), shapes, first), activation(before, 4))
        elif me == right - 1 and not on_one_stream(ranks):
            expect(communicator.recv_backward(shapes, last), gradient(after, 3))
            communicator.send_forward(activation(me, 4), last)
        elif me == right - 1:  # the order of lanes, which the fused verb keeps
            communicator.send_forward(activation(me, 4), last)
            expect(communicator.recv_backward(shapes, last), gradient(after, 3))
    expect(communicator.send_forward_recv_backward(activation(me, 0), shapes, True), None)
    expect(communicator.send_backward_recv_forward(gradient(me, 0), shapes, True), None)

    # All round the ring, the way from the last stage to the first included.
    expect(communicator.send_forward_recv_forward(activation(me, 5), True, shapes), activation(before, 5))
    expect(communicator.send_backward_recv_backward(gradient(me, 6), True, shapes), gradient(after, 6))
    verb = communicator.send_forward_backward_recv_forward_backward
    expect(verb(activation(me, 7), gradient(me, 7), True, True, shapes), (activation(before, 7), gradient(after, 7)))

    # Not everybody sends and receives.
    sending, receiving = (activation(me, 8) if me == 0 else None), me == 1 % count
    received = communicator.send_forward_recv_forward(sending, receiving, shapes)
    expect(received, activation(before, 8) if receiving else None)
    expect(verb(None, gradient(me, 9), False, True, shapes), (None, gradient(after, 9)))

    # What came is the caller's own: no later message has touched it.
    for received, expected in kept:
        assert_received(received, expected)


@pytest.mark.few(12)
@MODES
@pytest.mark.ranks(2, 3, 4, 8)
def test_every_verb_delivers_what_was_sent(ranks, communicator):
    assert_every_verb_delivers(ranks, communicator, activation, gradient)


STAGES = pytest.mark.parametrize(
    "stages",
    [
        pytest.param(2, marks=pytest.mark.ranks(2)),
        *(pytest.param(n, marks=[pytest.mark.ranks(n), pytest.mark.nightly]) for n in (3, 4, 8)),
    ],
)
BATCHED = pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])


@STAGES
@BATCHED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_every_verb_delivers_tensors_of_every_dtype_and_number_of_dimensions(ranks, stages, batched, dtype):
    communicator = P2PCommunicator(dist.group.WORLD, config(pipeline_dtype=dtype, batch_p2p_comm=batched))
    for shape in SHAPES:
        form = {"shape": shape, "dtype": dtype}
        made = partial(activation, **form), partial(gradient, **form)
        with in_turn(ranks, communicator):
            assert_every_verb_delivers(ranks, communicator, *made, shape)
        communicator.renew_shapes()
    communicator.close()


@pytest.mark.pairs
@STAGES
@BATCHED
@pytest.mark.parametrize("varying", [False, True], ids=["agreed", "variable"])
@pytest.mark.parametrize(
    ("structure", "shapes"),
    [
        (lambda one, more: [one, None, more], [SHAPE, None, (4,)]),
        (lambda one, more: [None, more, one], None),
        (lambda one, more: {"hidden": one, "mask": None, "rows": more}, None),
        (lambda one, more: ({"x": [one, None]}, more), None),
        (lambda one, more: [None], None),
    ],
    ids=["list of shapes", "list", "dict", "nested", "nothing but None"],
)
def test_every_verb_delivers_lists_and_dicts_with_none(ranks, stages, batched, varying, structure, shapes):
    settings = {"variable_seq_lengths": varying, "batch_p2p_comm": batched}
    communicator = P2PCommunicator(dist.group.WORLD, config(**settings))

    def of(make):
        return lambda stage, microbatch: structure(
            make(stage, microbatch), make(stage, microbatch, (4,), dtype=torch.int64)
        )

    with in_turn(ranks, communicator):
        assert_every_verb_delivers(ranks, communicator, of(activation), of(gradient), shapes)
    communicator.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "communicator",
    [{"batch_p2p_comm": True}, {"batch_p2p_comm": False}, {"variable_seq_lengths": True}],
    ids=["batched", "unbatched", "variable"],
    indirect=True,
)
def test_overlapped_verbs_return_handles_by_name(ranks, communicator):
    me, count = communicator.current_stage, communicator.total_stages
    for microbatch in range(3):
        x, handles = communicator.send_forward_recv_forward(activation(me, microbatch), True, SHAPE, True)
        assert set(handles) == {"send_next", "recv_prev"}
        g, more = communicator.send_backward_recv_backward(gradient(me, microbatch), True, SHAPE, overlap_p2p_comm=True)
        assert set(more) == {"send_prev", "recv_next"}
        for handle in (*handles.values(), *more.values()):
            handle.wait()
            handle.wait()
        assert_received(x, activation((me - 1) % count, microbatch))
        assert_received(g, gradient((me + 1) % count, microbatch))
    assert communicator.send_forward_recv_forward(None, False, SHAPE, overlap_p2p_comm=True) == (None, {})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("communicator", [{"pipeline_dtype": None, "shapes": "header"}], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_any_dtype_and_number_of_dimensions(ranks, communicator, dtype):
    for shape in SHAPES:
        if communicator.is_pp_first_stage:
            gradient_back = communicator.send_forward_recv_backward(activation(0, 1, shape, dtype))
            assert_received(gradient_back, activation(1, 2, shape, dtype))
        else:
            assert_received(communicator.recv_forward(), activation(0, 1, shape, dtype))
            communicator.send_backward(activation(1, 2, shape, dtype))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_the_dtype_of_the_pipeline(ranks, dtype):
    communicator = P2PCommunicator(dist.group.WORLD, config(pipeline_dtype=dtype))
    with in_turn(ranks, communicator):
        received = communicator.send_forward_recv_forward(activation(ranks.rank, 0, SHAPE, dtype), True, SHAPE)
    assert_received(received, activation(1 - ranks.rank, 0, SHAPE, dtype))
    communicator.close()


@pytest.mark.ranks(2)
@MODES
def test_a_list_of_shapes_gives_a_list_one_shape_a_tensor(ranks, communicator):
    two = [activation(0), activation(0, 1, (4,))]
    if ranks.rank == 0:
        communicator.send_forward(two)
        assert communicator.recv_backward([SHAPE, None])[1] is None
    else:
        assert_received(communicator.recv_forward([SHAPE, (4,)]), two)
        communicator.send_backward([gradient(1), None])


@pytest.mark.ranks(2)
def test_a_tensor_may_be_received_as_a_list_of_one_and_back(ranks, communicator):
    if ranks.rank == 0:
        communicator.send_forward(activation(0))
        assert_received(communicator.recv_backward(SHAPE), gradient(1))
    else:
        (received,) = communicator.recv_forward([SHAPE])
        assert_received(received, activation(0))
        communicator.send_backward([gradient(1)])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("communicator", [{"variable_seq_lengths": True}], indirect=True)
def test_lengths_that_vary_with_the_unknown_shape_of_get_tensor_shapes(ranks, communicator):
    if ranks.rank == 0:
        for length in (3, 1, 0, 5):
            communicator.send_forward([activation(0, 0, (length, 2))])
    else:
        for length in (3, 1, 0, 5):
            (received,) = communicator.recv_forward([()])
            assert_received(received, activation(0, 0, (length, 2)))
