"""What the settings of a communicator change."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import Edge, LaneSpec, P2PCommunicator, P2PMismatchError, P2PUsageError
from pipegrid.transport.lane.batch import Submitter
from pipegrid.transport.messages.handle import Transfer

from .stages import FORWARD, SHAPE, activation, assert_received, config, gradient


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
        with pytest.raises(P2PMismatchError, match="agreed"):
            P2PCommunicator(dist.group.WORLD, config(), tensor_shape=(2, ranks.rank))

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize(
        ("settings", "text"),
        [({"pipeline_dtype": None}, "pipeline_dtype is None"), ({"shapes": "header"}, "shapes are 'header'")],
    )
    def test_a_shape_that_stands_needs_a_dtype_and_cannot_vary(self, ranks, settings, text):
        with pytest.raises(P2PUsageError, match=rf"^tensor_shape is \(2, 3\), but {text}"):
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

    @pytest.mark.ranks(2, fake_nccl="streams")  # in turn, `irecv` itself would wait for the header
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


class TestBatches:
    @pytest.mark.ranks(2)
    @pytest.mark.parametrize(
        ("settings", "one_batch"),
        [
            ({"batch_p2p_comm": True}, True),
            ({"batch_p2p_comm": False}, False),
            ({"batch_p2p_comm": False, "strict": True}, True),
            ({"batch_p2p_comm": False, "communicators": "shared"}, True),
        ],
        ids=["batched", "unbatched", "strict", "shared"],
    )
    def test_a_verb_posts_its_messages_together_as_configured(self, ranks, monkeypatch, settings, one_batch):
        started = []
        submit = Submitter.submit_pending

        def submit_pending(submitter, transfers, *, together):
            started.append((len(transfers), together))
            submit(submitter, transfers, together=together)

        monkeypatch.setattr(Submitter, "submit_pending", submit_pending)
        communicator = P2PCommunicator(dist.group.WORLD, config(**settings), tensor_shape=SHAPE)
        for verb in (communicator.send_forward_recv_forward, communicator.send_backward_recv_backward):
            started.clear()
            verb(activation(ranks.rank), True, SHAPE)
            assert started == [(2, one_batch)]
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
