"""One rank of a large world that does not exist otherwise, over torch's fake backend: lanes open, send and receive."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipegrid.transport import Direction, Edge, LaneSpec, P2PCommunicator, P2PConfig, P2PUsageError, open_lanes

SHAPE, RANK, WORLD = (2, 3), 100, 512
config = partial(P2PConfig, pipeline_dtype=torch.float32, deadline=20.0, open_deadline=20.0)


@pytest.fixture(autouse=True, params=[FakeStore, dist.HashStore], ids=["fake store", "hash store"])
def _world(request):
    dist.init_process_group("fake", store=request.param(), rank=RANK, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "settings",
    [{}, {"communicators": "shared"}, {"strict": True}, {"shapes": "header"}, {"staged": True}, {"shapes": "given"}],
    ids=str,
)
def test_a_communicator_opens_at_once_and_its_verbs_return(settings):
    began = time.monotonic()
    communicator = P2PCommunicator(None, config(**settings))
    assert (communicator.current_stage, communicator.total_stages, len(communicator.lanes)) == (RANK, WORLD, 4)
    for _ in range(3):
        received = communicator.recv_forward(SHAPE)
        assert (tuple(received.shape), received.dtype, received.requires_grad) == (SHAPE, torch.float32, True)
        assert received.eq(0).all()
        gradient = communicator.send_forward_recv_backward(received.detach() + 1, SHAPE)
        assert tuple(gradient.shape) == SHAPE
        communicator.send_backward(gradient)
    lane = communicator.lane(Edge(RANK - 1, RANK), Direction.FORWARD)
    assert (lane.stats.messages, lane.stats.bytes) == (3, 3 * 24)
    communicator.close()
    assert time.monotonic() - began < 20
    assert len(dist.distributed_c10d._world.pg_map) == 1  # the default group


def test_shapes_that_are_fixed_at_opening_serve_receives_without_any():
    with P2PCommunicator(None, config(), tensor_shape=SHAPE).lanes as lanes:
        (lane,) = (one for one in lanes.values() if one.spec == LaneSpec(RANK - 1, RANK, "forward"))
        handles = [lane.irecv() for _ in range(3)]
        assert all(handle.is_completed() for handle in handles)
        assert lanes.neighbours([RANK - 1, RANK + 1]) == []


@pytest.mark.parametrize("settings", [{}, {"shapes": "header"}], ids=str)
def test_a_receive_whose_shape_only_another_rank_knows_is_an_error_and_no_wait(settings):
    with P2PCommunicator(None, config(**settings)).lanes as lanes:
        lane = lanes[LaneSpec(RANK - 1, RANK, "forward")]
        with pytest.raises(P2PUsageError, match=r"in a dry run, where no rank announces shapes; give tensor_shape"):
            lane.irecv()
        assert lane.irecv(SHAPE).result().shape == SHAPE


def test_a_received_shape_without_a_dtype_is_an_error():
    lanes = open_lanes([LaneSpec(0, RANK)], config=config(pipeline_dtype=None))
    with pytest.raises(P2PUsageError, match=r"needs pipeline_dtype; it is None"):
        lanes[LaneSpec(0, RANK)].irecv(SHAPE)
    lanes.close()


def test_lists_of_tensors_have_the_shapes_that_the_receive_gives():
    with open_lanes([LaneSpec(0, RANK)], config=config(variable_seq_lengths=True)) as lanes:
        first, nothing, second = lanes[LaneSpec(0, RANK)].irecv([(4, 1), None, (2,)]).result()
        assert (first.shape, nothing, second.shape) == ((4, 1), None, (2,))


def test_lanes_over_a_backend_with_peers_are_an_error_and_no_wait():
    began = time.monotonic()
    with pytest.raises(P2PUsageError, match=r"a dry run: they do not exist"):
        open_lanes([LaneSpec(0, RANK)], config=config(), backend="gloo")
    assert time.monotonic() - began < 5
