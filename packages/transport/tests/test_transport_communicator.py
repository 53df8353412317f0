"""Every verb of P2PCommunicator against what must arrive, on 2, 3, 4 and 8 stages."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import (
    Direction,
    Edge,
    LaneSpec,
    LaneSpecError,
    P2PCommunicator,
    P2PConfig,
    P2PConfigError,
    P2PLaneDeadError,
    P2PMismatchError,
    P2PPayloadError,
    P2PUsageError,
    PipelineCommunicator,
    issue,
    remote_lane,
    wire,
)
from pipegrid.transport.handle import Transfer

DEADLINE = 30.0
SHAPE = (2, 3)
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def config(**settings):
    return P2PConfig(**{
        "pipeline_dtype": torch.float32, "deadline": DEADLINE, "open_deadline": DEADLINE, **settings,
    })  # fmt: skip


@pytest.fixture
def communicator(request, ranks):
    settings = getattr(request, "param", {})
    made = P2PCommunicator(dist.group.WORLD, config(**settings))
    yield made
    made.close()


MODES = pytest.mark.parametrize(
    "communicator",
    [
        {"batch_p2p_comm": True},
        {"batch_p2p_comm": False},
        {"communicators": "shared"},
        {"communicators": "shared", "batch_p2p_comm": False},
        {"strict": True},
        {"strict": True, "batch_p2p_comm": False},
        {"variable_seq_lengths": True, "pipeline_dtype": None},
        {"batch_p2p_sync": True, "shapes": "given"},
    ],
    ids=["batched", "unbatched", "shared", "shared-unbatched", "strict", "strict-unbatched", "variable", "given"],
    indirect=True,
)


def activation(stage, microbatch=0, shape=SHAPE, dtype=torch.float32):
    """What stage ``stage`` sends on: every value tells where it is from."""
    values = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return (values + 100 * stage + 10 * microbatch).to(dtype)


def gradient(stage, microbatch=0, shape=SHAPE, dtype=torch.float32):
    return -activation(stage, microbatch, shape, dtype) - 1


def assert_received(tensor, expected):
    assert tensor.dtype is expected.dtype
    assert tensor.shape == expected.shape
    assert torch.equal(tensor.detach(), expected)
    assert tensor.requires_grad == expected.dtype.is_floating_point
    assert tensor.is_leaf


@MODES
@pytest.mark.ranks(2, 3, 4, 8)
def test_every_verb_delivers_what_was_sent(ranks, communicator):
    me, count = communicator.current_stage, communicator.total_stages
    first, last = communicator.is_pp_first_stage, communicator.is_pp_last_stage
    before, after = (me - 1) % count, (me + 1) % count

    # Down the pipeline, and back up.
    received = communicator.recv_forward(SHAPE, first)
    assert (received is None) if first else (assert_received(received, activation(before)) is None)
    communicator.send_forward(activation(me), last)
    received = communicator.recv_backward(SHAPE, last)
    assert (received is None) if last else (assert_received(received, gradient(after)) is None)
    communicator.send_backward(gradient(me), first)

    # Both at once between two neighbours, one pair after the other.
    for left in range(count - 1):
        if me == left:
            received = communicator.send_forward_recv_backward(activation(me, 1), SHAPE, last)
            assert_received(received, gradient(after, 2))
        elif me == left + 1:
            communicator.recv_forward(SHAPE, first)
            communicator.send_backward(gradient(me, 2), first)
    for right in range(1, count):
        if me == right:
            received = communicator.send_backward_recv_forward(gradient(me, 3), SHAPE, first)
            assert_received(received, activation(before, 4))
        elif me == right - 1:
            communicator.recv_backward(SHAPE, last)
            communicator.send_forward(activation(me, 4), last)
    assert communicator.send_forward_recv_backward(activation(me), SHAPE, True) is None
    assert communicator.send_backward_recv_forward(gradient(me), SHAPE, True) is None

    # All round the ring, the way from the last stage to the first included.
    received = communicator.send_forward_recv_forward(activation(me, 5), True, SHAPE)
    assert_received(received, activation(before, 5))
    received = communicator.send_backward_recv_backward(gradient(me, 6), True, SHAPE)
    assert_received(received, gradient(after, 6))
    x, g = communicator.send_forward_backward_recv_forward_backward(
        activation(me, 7), gradient(me, 7), True, True, SHAPE
    )
    assert_received(x, activation(before, 7))
    assert_received(g, gradient(after, 7))

    # Not everybody sends and receives.
    sending, receiving = (activation(me, 8) if me == 0 else None), me == 1 % count
    received = communicator.send_forward_recv_forward(sending, receiving, SHAPE)
    assert received is None if not receiving else assert_received(received, activation(0, 8)) is None
    x, g = communicator.send_forward_backward_recv_forward_backward(None, gradient(me, 9), False, True, SHAPE)
    assert x is None
    assert_received(g, gradient(after, 9))


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
    for shape in [(), (0,), (3,), (2, 0), (2, 3), (1, 2, 3), (2, 1, 3, 2), (2, 1, 1, 2, 3)]:
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
        received = communicator.recv_forward([SHAPE, (4,)])
        assert type(received) is list
        for got, expected in zip(received, two, strict=True):
            assert_received(got, expected)
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


class TestEdges:
    @pytest.mark.ranks(3)
    @MODES
    def test_stages_lie_on_ranks_in_turn(self, ranks, communicator):
        # Two chunks: stages 0, 3 on rank 0; 1, 4 on rank 1; 2, 5 on rank 2.
        me, edges = ranks.rank, [Edge(stage, stage + 1) for stage in range(5)]
        with communicator.batch():
            sends = [
                communicator.isend(activation(edge.source), edge=edge, direction=FORWARD)
                for edge in edges
                if edge.source % 3 == me
            ] + [
                communicator.isend(gradient(edge.destination), edge=edge, direction=BACKWARD)
                for edge in edges
                if edge.destination % 3 == me
            ]
            receives = [
                (communicator.irecv(edge=edge, direction=FORWARD, shapes=SHAPE), activation(edge.source))
                for edge in edges
                if edge.destination % 3 == me
            ] + [
                (communicator.irecv(edge=edge, direction=BACKWARD, shapes=SHAPE), gradient(edge.destination))
                for edge in edges
                if edge.source % 3 == me
            ]
        for handle, expected in receives:
            assert_received(handle.result(), expected)
        for handle in sends:
            handle.wait()

    @pytest.mark.ranks(2)
    def test_a_v_shaped_placement(self, ranks):
        placement = (0, 1, 1, 0)
        communicator = P2PCommunicator(dist.group.WORLD, config(), placement=placement)
        assert communicator.is_pp_first_stage == communicator.is_pp_last_stage == (ranks.rank == 0)
        for source in range(3):
            edge = Edge(source, source + 1)
            ends = [placement[source], placement[source + 1]]
            for direction in (FORWARD, BACKWARD):
                sender, receiver = ends if direction is FORWARD else reversed(ends)
                handle = None
                if sender == ranks.rank:
                    handle = communicator.isend(activation(source), edge=edge, direction=direction)
                if receiver == ranks.rank:
                    assert_received(communicator.irecv(edge=edge, direction=direction).result(), activation(source))
                if handle is not None:
                    handle.wait()
        with pytest.raises(P2PUsageError, match=r"edge 3>4 does not lead from a stage of 4 to the next"):
            communicator.irecv(edge=Edge(3, 4), direction=FORWARD)
        communicator.close()

    @pytest.mark.ranks(3)
    def test_that_are_none_or_of_others_are_refused(self, ranks, communicator):
        for edge in (Edge(0, 2), Edge(1, 0), Edge(-1, 0)):
            with pytest.raises(P2PUsageError, match=f"edge {edge} does not lead"):
                communicator.isend(activation(0), edge=edge, direction=FORWARD)
        if ranks.rank == 2:
            with pytest.raises(P2PUsageError, match="edge 0>1 runs between ranks 0 and 1; this is rank 2"):
                communicator.irecv(edge=Edge(0, 1), direction=FORWARD)
        if ranks.rank == 0:
            with pytest.raises(P2PUsageError, match="rank 0 cannot receive on lane 0>1"):
                communicator.irecv(edge=Edge(0, 1), direction=FORWARD)

    @pytest.mark.ranks(1)
    def test_one_stage_talks_to_itself(self, ranks, communicator):
        assert communicator.is_pp_first_stage
        assert communicator.is_pp_last_stage
        received = communicator.send_forward_recv_forward(activation(0), True, SHAPE)
        assert_received(received, activation(0))
        sent = communicator.isend(gradient(1), edge=Edge(0, 1), direction=BACKWARD)
        assert_received(communicator.irecv(edge=Edge(0, 1), direction=BACKWARD).result(), gradient(1))
        sent.wait()


class TestPlace:
    @pytest.mark.ranks(4)
    def test_neighbours_are_cyclic_global_ranks_of_the_group(self, ranks):
        members = [[3, 1], [0, 2]]
        mine = next(group for group in members if ranks.rank in group)
        groups = [dist.new_group(group, sort_ranks=False) for group in members]
        group = groups[members.index(mine)]
        communicator = P2PCommunicator(group, config(virtual_pipeline_model_parallel_size=2))
        place = mine.index(ranks.rank)
        assert communicator.current_stage == place
        assert communicator.total_stages == 2
        assert communicator.next_rank == communicator.prev_rank == mine[1 - place]
        assert communicator.is_pp_first_stage == (place == 0)
        assert communicator.is_pp_last_stage == (place == 1)
        assert communicator.virtual_pipeline_model_parallel_size == 2
        assert communicator.device == torch.device("cpu")
        received = communicator.send_forward_recv_forward(activation(ranks.rank), True, SHAPE)
        assert_received(received, activation(mine[1 - place]))
        communicator.close()

    @pytest.mark.ranks(2)
    def test_it_is_what_schedules_ask_for(self, ranks, communicator):
        assert isinstance(communicator, PipelineCommunicator)

    @pytest.mark.ranks(3)
    def test_every_lane_is_there_before_the_first_step(self, ranks, communicator):
        me, after, before = ranks.rank, (ranks.rank + 1) % 3, (ranks.rank - 1) % 3
        assert set(communicator.lanes) == {
            LaneSpec(me, after, "forward"), LaneSpec(before, me, "forward"),
            LaneSpec(me, before, "backward"), LaneSpec(after, me, "backward"),
        }  # fmt: skip


class TestConfiguration:
    @pytest.mark.ranks(2)
    def test_any_object_with_the_attributes_does(self, ranks):
        calls = []
        timer = SimpleNamespace(start=lambda: calls.append("start"), stop=lambda: calls.append("stop"))

        def timers(name, **level):
            calls.append((name, level))
            return timer

        theirs = SimpleNamespace(
            pipeline_dtype=torch.float32, variable_seq_lengths=False, batch_p2p_comm=False, batch_p2p_sync=True,
            overlap_p2p_comm=True, virtual_pipeline_model_parallel_size=None, timers=timers, hidden_size=3,
        )  # fmt: skip
        communicator = P2PCommunicator(dist.group.WORLD, theirs)
        if ranks.rank == 0:
            communicator.send_forward(activation(0), False)
            assert calls == [("forward-send", {"log_level": 2}), "start", ("forward-send", {}), "stop"]
        else:
            communicator.recv_forward(SHAPE, False)
            assert calls[0] == ("forward-recv", {"log_level": 2})
        communicator.close()

    @pytest.mark.ranks(2)
    def test_a_shape_that_stands_needs_no_header(self, ranks):
        communicator = P2PCommunicator(dist.group.WORLD, config(), tensor_shape=SHAPE)
        received = communicator.send_forward_recv_forward(activation(ranks.rank), True, SHAPE)
        assert_received(received, activation(1 - ranks.rank))
        assert sum(lane.stats.headers for lane in communicator.lanes.values()) == 0
        communicator.close()

    @pytest.mark.ranks(2)
    def test_a_shape_that_stands_must_stand_on_both_sides(self, ranks):
        with pytest.raises(P2PMismatchError, match="standing"):
            P2PCommunicator(dist.group.WORLD, config(), tensor_shape=(2, ranks.rank))

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize("settings", [{"pipeline_dtype": None}, {"shapes": "header"}])
    def test_a_shape_that_stands_needs_a_dtype_and_cannot_vary(self, ranks, settings):
        with pytest.raises(P2PConfigError, match=r"tensor_shape \(2, 3\) fixes the messages"):
            P2PCommunicator(dist.group.WORLD, config(**settings), tensor_shape=SHAPE)

    @pytest.mark.ranks(2)
    def test_renewed_shapes_are_agreed_anew(self, ranks, communicator):
        for shape in (SHAPE, (4,), ()):
            for microbatch in range(2):
                received = communicator.send_forward_recv_forward(
                    activation(ranks.rank, microbatch, shape), True, shape
                )
                assert_received(received, activation(1 - ranks.rank, microbatch, shape))
            ranks.barrier()
            communicator.renew_shapes()
        stats = communicator.lanes[LaneSpec(0, 1, "forward")].stats
        assert stats.messages == stats.transfers == 6
        assert stats.bytes == 2 * 4 * (6 + 4 + 1)
        assert stats.headers == 3

    @pytest.mark.ranks(2)
    def test_renew_is_refused_where_shapes_vary_or_receives_are_under_way(self, ranks, communicator):
        varying = P2PCommunicator(dist.group.WORLD, config(variable_seq_lengths=True))
        with pytest.raises(P2PUsageError, match="nothing to renew"):
            varying.renew_shapes()
        varying.close()
        edge = Edge(0, 1)
        if ranks.rank == 0:
            ranks.barrier()
            communicator.isend(activation(0), edge=edge, direction=FORWARD).wait()
        else:
            handle = communicator.irecv(edge=edge, direction=FORWARD)
            with pytest.raises(P2PUsageError, match="1 receives under way"):
                communicator.renew_shapes()
            ranks.barrier()
            handle.wait()


class TestErrors:
    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("communicator", [{"pipeline_dtype": None}], indirect=True)
    def test_a_receive_needs_a_dtype(self, ranks, communicator):
        forward = pytest.raises(RuntimeError, match="pipeline_dtype must be provided if recv_prev is True")
        with forward:
            communicator.recv_forward(SHAPE, False)
        with forward:
            communicator.send_backward_recv_forward(gradient(0), SHAPE, False)
        with forward:
            communicator.send_forward_recv_forward(activation(0), True, SHAPE)
        backward = pytest.raises(RuntimeError, match="dtype must be provided if recv_next is True")
        with backward:
            communicator.recv_backward(SHAPE, False)
        with backward:
            communicator.send_forward_recv_backward(activation(0), SHAPE, False)
        with backward:
            communicator.send_backward_recv_backward(gradient(0), True, SHAPE)
        with backward:
            communicator.send_forward_backward_recv_forward_backward(None, None, False, True, SHAPE)

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("communicator", [{"shapes": "given"}], indirect=True)
    def test_a_receive_needs_a_shape_where_shapes_are_given(self, ranks, communicator):
        with pytest.raises(ValueError, match=r"tensor_shape must be specified if recv_prev is True.*seq_length"):
            communicator.recv_forward(None, False)
        with pytest.raises(RuntimeError, match="tensor_shape must be specified if recv_next is True"):
            communicator.recv_backward(None, False)
        with pytest.raises(RuntimeError, match="tensor_shape must be specified on a receive"):
            communicator.irecv(edge=Edge(0, 1), direction=FORWARD if ranks.rank else BACKWARD)

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize(
        "communicator",
        [{"batch_p2p_comm": True}, {"batch_p2p_comm": False}, {"batch_p2p_comm": False, "strict": True}],
        ids=["batched", "unbatched", "strict"],
        indirect=True,
    )
    @pytest.mark.parametrize(
        ("tensor", "text"),
        [
            (torch.ones(3, 2).t(), "not contiguous"),
            (torch.ones(2, 3, dtype=torch.float64), "but pipeline_dtype is torch.float32"),
            (torch.ones(2, 3, device="meta"), "moves tensors of device cpu, got one of meta"),
            (3.0, "a payload holds a float"),
        ],
    )
    def test_what_cannot_be_sent_is_refused_before_anything_is(self, ranks, communicator, tensor, text):
        for steady in (0, 1, 2):
            with pytest.raises(P2PPayloadError, match=text):
                communicator.send_forward_recv_forward(tensor, True, SHAPE)
            with pytest.raises(P2PUsageError, match="shapes of a receive are"):
                communicator.send_forward_recv_forward(activation(ranks.rank), True, "a shape")
            # Nothing was sent or posted, so the next exchange is in step.
            received = communicator.send_forward_recv_forward(activation(ranks.rank, steady), True, SHAPE)
            assert_received(received, activation(1 - ranks.rank, steady))

    @pytest.mark.ranks(2)
    def test_an_abort_is_told_to_the_neighbours(self, ranks, communicator):
        if ranks.rank == 0:
            ranks.barrier()
            communicator.abort("the loss is nan at step 3")
            with pytest.raises(P2PLaneDeadError, match="aborted on rank 0: the loss is nan"):
                communicator.send_forward(activation(0))
        else:
            handle = communicator.irecv(edge=Edge(0, 1), direction=FORWARD)
            ranks.barrier()
            with pytest.raises(ConnectionError, match=r"rank 0 ended lane 0>1.*the loss is nan at step 3"):
                handle.wait()
        ranks.barrier()

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize("device", ["meta"])
    def test_a_device_without_a_backend_is_refused(self, ranks, device):
        with pytest.raises(P2PConfigError, match="lanes for device meta need a backend"):
            P2PCommunicator(dist.group.WORLD, config(), device=device)


class TestBatches:
    @pytest.mark.ranks(2)
    @pytest.mark.parametrize(
        ("settings", "sizes"),
        [
            ({"batch_p2p_comm": True}, [2]),
            ({"batch_p2p_comm": False}, [1, 1]),
            ({"batch_p2p_comm": False, "strict": True}, [2]),
            ({"batch_p2p_comm": False, "communicators": "shared"}, [2]),
        ],
        ids=["batched", "unbatched", "strict", "shared"],
    )
    def test_a_verb_posts_its_messages_together_as_configured(self, ranks, monkeypatch, settings, sizes):
        posted = []

        def post(parcels):
            posted.append(len(parcels))
            return wire.post(parcels)

        for module in (issue, remote_lane):
            monkeypatch.setattr(module, "post", post)
        communicator = P2PCommunicator(dist.group.WORLD, config(**settings), tensor_shape=SHAPE)
        for verb in (communicator.send_forward_recv_forward, communicator.send_backward_recv_backward):
            posted.clear()
            verb(activation(ranks.rank), True, SHAPE)
            assert [size for size in posted if size] == sizes
        communicator.close()

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("communicator", [{"batch_p2p_sync": True}, {"batch_p2p_sync": False}], indirect=True)
    def test_the_host_is_held_where_that_is_configured(self, ranks, communicator, monkeypatch):
        held = []
        monkeypatch.setattr(Transfer, "synchronize", lambda transfer, timeout=None: held.append(transfer.sending))
        communicator.send_forward_recv_forward(activation(ranks.rank), True, SHAPE)
        assert held == ([False, True] if communicator.config.batch_p2p_sync else [])

    @pytest.mark.ranks(1)
    def test_is_not_entered_while_it_is_under_way(self, ranks, communicator):
        batch = communicator.batch()
        for _ in range(2):  # one after the other is fine
            with batch:
                sent = communicator.isend(activation(0), edge=Edge(0, 1), direction=FORWARD)
                with pytest.raises(P2PUsageError, match=r"under way already; call batch\(\) again"), batch:
                    pass
                assert sent.sequence == -1
            sent.wait()


class TestWhatIsNone:
    """Arguments that are nothing of the kind are refused before anything is opened or sent."""

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize(
        ("error", "text", "arguments"),
        [
            (P2PConfigError, "pp_group is 'x'; it must be a process group that this rank", {"pp_group": "x"}),
            (P2PConfigError, r"tensor_shape is \(2, -1\); it must be one shape", {"tensor_shape": (2, -1)}),
            (P2PConfigError, "tensor_shape is 3; it must be one shape", {"tensor_shape": 3}),
            (LaneSpecError, "the placement '01' must give each of two or more stages an index", {"placement": "01"}),
            (LaneSpecError, r"the placement \(0.0, 1.0\) must give", {"placement": (0.0, 1.0)}),
            (P2PConfigError, "the device is 'gpu0', which torch does not know", {"device": "gpu0"}),
            (P2PConfigError, r"the config is a dict; give P2PConfig\(\*\*config\)", {"config": {"strict": True}}),
        ],
    )
    def test_of_the_constructor(self, ranks, error, text, arguments):
        with pytest.raises(error, match=text):
            P2PCommunicator(**{"pp_group": dist.group.WORLD, "config": config(), **arguments})

    @pytest.mark.ranks(3)
    def test_a_group_that_this_rank_is_not_in(self, ranks):
        group = dist.new_group([0, 1])
        if ranks.rank == 2:
            with pytest.raises(P2PConfigError, match=r"that this rank \(2\) is in.*on its members only"):
                P2PCommunicator(group, config())
        else:
            P2PCommunicator(group, config()).close()

    @pytest.mark.ranks(2)
    def test_no_group_is_the_world(self, ranks):
        communicator = P2PCommunicator(None, config())
        assert communicator.pp_group is dist.group.WORLD
        received = communicator.send_forward_recv_forward(activation(ranks.rank), True, SHAPE)
        assert_received(received, activation(1 - ranks.rank))
        communicator.close()

    @pytest.mark.ranks(3)
    def test_a_rank_of_no_stage_has_a_device_and_no_neighbours(self, ranks):
        communicator = P2PCommunicator(dist.group.WORLD, config(), placement=(0, 1))
        assert communicator.device == torch.device("cpu")
        if ranks.rank == 2:
            assert communicator.recv_forward(SHAPE, True) is None
            with pytest.raises(P2PUsageError, match=r"placement \(0, 1\) has no forward traffic from rank 1 to 2"):
                communicator.recv_forward(SHAPE)
        communicator.close()

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize("edge", [(0, 1), [0, 1], "0>1", None])
    def test_an_edge(self, ranks, communicator, edge):
        with pytest.raises(P2PUsageError, match=r"it must be an Edge such as Edge\(0, 1\)"):
            communicator.irecv(edge=edge, direction=FORWARD)

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("direction", ["forward", "F", ["F"]])
    def test_a_direction(self, ranks, communicator, direction):
        # A text was taken for backward, and sent an activation on the lane of gradients.
        with pytest.raises(P2PUsageError, match=r"it must be Direction\.FORWARD or Direction\.BACKWARD"):
            communicator.isend(activation(0), edge=Edge(0, 1), direction=direction)
        assert all(lane.stats.messages == 0 for lane in communicator.lanes.values())

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize("flag", ["no", "", 0, None])
    def test_a_flag(self, ranks, communicator, flag):
        verbs = {
            "is_first_stage": [
                lambda: communicator.recv_forward(SHAPE, flag),
                lambda: communicator.send_backward(gradient(0), flag),
                lambda: communicator.send_backward_recv_forward(gradient(0), SHAPE, flag),
            ],
            "is_last_stage": [
                lambda: communicator.recv_backward(SHAPE, flag),
                lambda: communicator.send_forward(activation(0), flag),
                lambda: communicator.send_forward_recv_backward(activation(0), SHAPE, flag),
            ],
            "recv_prev": [
                lambda: communicator.send_forward_recv_forward(activation(0), flag, SHAPE),
                lambda: communicator.send_forward_backward_recv_forward_backward(
                    activation(0), None, flag, False, SHAPE
                ),
            ],
            "recv_next": [
                lambda: communicator.send_backward_recv_backward(gradient(0), flag, SHAPE),
                lambda: communicator.send_forward_backward_recv_forward_backward(
                    activation(0), None, False, flag, SHAPE
                ),
            ],
            "overlap_p2p_comm": [
                lambda: communicator.send_forward_recv_forward(activation(0), False, SHAPE, flag),
                lambda: communicator.send_backward_recv_backward(gradient(0), False, SHAPE, flag),
            ],
        }
        for name, calls in verbs.items():
            for call in calls:
                with pytest.raises(P2PUsageError, match=f"{name} is {flag!r}; it must be True or False"):
                    call()
        assert all(lane.stats.messages == 0 for lane in communicator.lanes.values())


@pytest.mark.ranks(2)
def test_shapes_are_renewed_on_all_lanes_or_on_none(ranks, communicator):
    verb = communicator.send_forward_backward_recv_forward_backward
    verb(activation(0), gradient(0), True, True, SHAPE)
    edge = Edge(0, 1)
    if ranks.rank == 1:
        handle = communicator.irecv(edge=edge, direction=FORWARD)
        with pytest.raises(P2PUsageError, match=r"1 receives under way; wait for them before renew\(\)"):
            communicator.renew_shapes()
        ranks.barrier()
        handle.wait()
    else:
        ranks.barrier()
        communicator.isend(activation(0), edge=edge, direction=FORWARD).wait()
    # What was agreed on holds on every lane, since the renewal was refused as a whole.
    x, g = verb(activation(ranks.rank), gradient(ranks.rank), True, True, SHAPE)
    assert_received(x, activation(1 - ranks.rank))
    assert_received(g, gradient(1 - ranks.rank))
    communicator.renew_shapes()
    x, _ = verb(activation(0, 0, (4,)), gradient(0, 0, (4,)), True, True, (4,))
    assert_received(x, activation(0, 0, (4,)))
