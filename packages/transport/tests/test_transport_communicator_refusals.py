"""What a communicator refuses, before anything is opened or sent."""

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import Edge, P2PCommunicator, P2PLaneDeadError, P2PUsageError

from .stages import BACKWARD, FORWARD, SHAPE, activation, assert_received, config, gradient, in_turn


def assert_nothing_moved(communicator):
    assert all(lane.stats.messages == 0 and not lane.queue for lane in communicator.lanes.values())


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
        assert_nothing_moved(communicator)

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("communicator", [{"shapes": "given"}], indirect=True)
    def test_a_receive_needs_a_shape_where_shapes_are_given(self, ranks, communicator):
        with pytest.raises(ValueError, match=r"tensor_shape must be specified if recv_prev is True.*seq_length"):
            communicator.recv_forward(None, False)
        with pytest.raises(RuntimeError, match="tensor_shape must be specified if recv_next is True"):
            communicator.recv_backward(None, False)
        with pytest.raises(RuntimeError, match="tensor_shape must be specified on a receive"):
            communicator.irecv(edge=Edge(0, 1), direction=FORWARD if ranks.rank else BACKWARD)
        with pytest.raises(RuntimeError, match="tensor_shape must be specified if recv_next is True"):
            communicator.send_forward_recv_backward(activation(0), None, False)
        assert_nothing_moved(communicator)

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
            (3.0, "a payload contains a float"),
        ],
    )
    def test_what_cannot_be_sent_is_refused_before_anything_is(self, ranks, communicator, tensor, text):
        for steady in (0, 1, 2):
            with pytest.raises(P2PUsageError, match=text):
                communicator.send_forward_recv_forward(tensor, True, SHAPE)
            with pytest.raises(P2PUsageError, match="shapes of a receive are"):
                communicator.send_forward_recv_forward(activation(ranks.rank), True, "a shape")
            # Nothing was sent or posted, so the next exchange is in step.
            received = communicator.send_forward_recv_forward(activation(ranks.rank, steady), True, SHAPE)
            assert_received(received, activation(1 - ranks.rank, steady))

    @pytest.mark.ranks(2, fake_nccl="streams")  # in turn, `irecv` itself would wait for the header
    def test_an_abort_is_told_to_the_neighbours(self, ranks, communicator):
        if ranks.rank == 0:
            ranks.barrier()
            communicator.abort("the loss is nan at step 3")
            with pytest.raises(P2PLaneDeadError, match="the loss is nan at step 3.*aborted on rank 0"):
                communicator.send_forward(activation(0))
        else:
            handle = communicator.irecv(edge=Edge(0, 1), direction=FORWARD)
            ranks.barrier()
            with pytest.raises(ConnectionError, match=r"^the loss is nan at step 3 \(rank 0 ended lane 0>1"):
                handle.wait()
        ranks.barrier()

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize("device", ["meta"])
    def test_a_device_without_a_backend_is_refused(self, ranks, device):
        with pytest.raises(P2PUsageError, match="backend 'none' does not move tensors of meta"):
            P2PCommunicator(dist.group.WORLD, config(), device=device)


class TestWhatIsNone:
    """Arguments that are nothing of the kind are refused before anything is opened or sent."""

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize(
        ("error", "text", "arguments"),
        [
            (P2PUsageError, "pp_group is 'x'; it must be None or a group", {"pp_group": "x"}),
            (P2PUsageError, r"tensor_shape is \(2, -1\); it must be one shape", {"tensor_shape": (2, -1)}),
            (P2PUsageError, "tensor_shape is 3; it must be one shape", {"tensor_shape": 3}),
            (P2PUsageError, "placement is '01'; it must be a list or tuple", {"placement": "01"}),
            (P2PUsageError, r"placement\[0\] is 0.0; it must be an integer", {"placement": (0.0, 1.0)}),
            (RuntimeError, "gpu0", {"device": "gpu0"}),
            (P2PUsageError, r"the config is {'strict': True}; it must be", {"config": {"strict": True}}),
        ],
    )
    def test_of_the_constructor(self, ranks, error, text, arguments):
        with pytest.raises(error, match=text):
            P2PCommunicator(**{"pp_group": dist.group.WORLD, "config": config(), **arguments})

    @pytest.mark.ranks(3)
    def test_a_group_that_this_rank_is_not_in(self, ranks):
        group = dist.new_group([0, 1])
        if ranks.rank == 2:
            with pytest.raises(P2PUsageError, match="it must be None or a group that this rank 2 is in"):
                P2PCommunicator(group, config())
        else:
            P2PCommunicator(group, config()).close()

    @pytest.mark.ranks(2)
    def test_no_group_is_the_world(self, ranks):
        communicator = P2PCommunicator(None, config())
        assert communicator.pp_group is dist.group.WORLD
        with in_turn(ranks, communicator):
            received = communicator.send_forward_recv_forward(activation(ranks.rank), True, SHAPE)
        assert_received(received, activation(1 - ranks.rank))
        communicator.close()

    @pytest.mark.ranks(3)
    def test_a_rank_of_no_stage_has_a_device_and_no_neighbours(self, ranks):
        communicator = P2PCommunicator(dist.group.WORLD, config(), placement=(0, 1))
        assert communicator.device == torch.device("cpu")
        if ranks.rank == 2:
            assert communicator.recv_forward(SHAPE, True) is None
            with pytest.raises(P2PUsageError, match=r"lane 1>2\[forward\], which the placement \(0, 1\) does not have"):
                communicator.recv_forward(SHAPE)
        communicator.close()

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize("edge", [(0, 1), "0>1", None])
    def test_an_edge(self, ranks, communicator, edge):
        with pytest.raises(P2PUsageError, match=r"it must be an Edge of this pipeline, such as Edge\(0, 1\)"):
            communicator.irecv(edge=edge, direction=FORWARD)

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("direction", ["forward", "F"])
    def test_a_direction(self, ranks, communicator, direction):
        # A text was taken for backward, and sent an activation on the lane of gradients.
        with pytest.raises(P2PUsageError, match=r"it must be Direction\.FORWARD or Direction\.BACKWARD"):
            communicator.isend(activation(0), edge=Edge(0, 1), direction=direction)
        assert_nothing_moved(communicator)
