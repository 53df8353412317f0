"""The lane from a rank to itself."""

import threading

import pytest
import torch

from pipegrid.transport import (
    LaneSpec,
    P2PError,
    P2PLaneDeadError,
    P2PMismatchError,
    P2PTimeoutError,
    open_lanes,
)

from .two_ranks import config, equal


class TestLocalLane:
    HERE = LaneSpec(0, 0, "here")

    @pytest.mark.ranks(1)
    def test_is_a_copy_with_the_same_rules(self, ranks):
        with open_lanes([self.HERE], config=config()) as lanes:
            lane = lanes[self.HERE]
            assert lane.group is None
            early = lane.irecv((2,))
            assert not early.is_completed()
            tensor = torch.ones(2)
            lane.isend(tensor).wait()
            tensor.zero_()
            assert early.is_completed()
            assert early.result().tolist() == [1, 1]
            assert early.result().requires_grad
            lane.isend(torch.full((2,), 2.0))
            lane.isend(torch.full((2,), 3.0))
            assert [lane.irecv().result()[0].item() for _ in range(2)] == [2, 3]
            assert lane.stats.messages == 6

    @pytest.mark.ranks(1)
    def test_refuses_another_shape(self, ranks):
        with open_lanes([self.HERE], config=config()) as lanes:
            lanes[self.HERE].isend(torch.ones(2))
            with pytest.raises(P2PMismatchError, match=r"message 1 of lane 0>0\[here\] is float32\[3\]"):
                lanes[self.HERE].isend(torch.ones(3))
        with open_lanes([self.HERE], config=config()) as lanes:
            handle = lanes[self.HERE].irecv((3,))
            with pytest.raises(P2PMismatchError, match=r"shape \[3\].*announced float32\[2\]"):
                lanes[self.HERE].isend(torch.ones(2))
            with pytest.raises(P2PMismatchError):
                handle.wait()

    @pytest.mark.ranks(1)
    def test_a_receive_that_nobody_answers_ends_at_the_deadline(self, ranks):
        with open_lanes([self.HERE], config=config()) as lanes:
            with pytest.raises(P2PTimeoutError, match=r"rank 0 waited 0\.1 s for receiving message 0"):
                lanes[self.HERE].irecv().wait(0.1)
            with pytest.raises(P2PLaneDeadError, match="dead on rank 0"):
                lanes[self.HERE].isend(torch.ones(1))

    @pytest.mark.ranks(1)
    def test_shapes_may_vary(self, ranks):
        with open_lanes([self.HERE], config=config(shapes="header")) as lanes:
            lane = lanes[self.HERE]
            for payload in [torch.ones(n) for n in range(3)]:
                lane.isend(payload)
                assert equal(payload, lane.irecv().result())

    @pytest.mark.ranks(1)
    def test_a_next_hop_starts_when_the_message_comes(self, ranks):
        with open_lanes([self.HERE], config=config()) as lanes:
            came = []
            lanes[self.HERE].irecv().on_done(lambda handle: came.append(handle.result().item()))
            assert not came
            lanes[self.HERE].isend(torch.tensor(4.0))
            assert came == [4.0]

    @pytest.mark.ranks(1)
    def test_a_receive_that_starts_while_the_lane_ends_ends_with_it(self, ranks):
        """It has seen a sound lane, and comes to its queue after the end has walked it."""
        with open_lanes([self.HERE], config=config()) as lanes:
            lane = lanes[self.HERE]
            admit, admitted, queued, walked = lane.incoming.admit, *(threading.Event() for _ in range(3))

            def admit_late(transfer):
                admit(transfer)
                admitted.set()
                assert walked.wait(10)

            def hold_the_end(_):
                walked.set()
                assert queued.wait(10)

            lane.irecv().on_done(hold_the_end)
            lane.incoming.admit = admit_late
            found, raised = [], []

            def receive():
                found.append(lane.irecv())
                queued.set()

            def wait():
                try:
                    found[0].wait(5)
                except P2PError as error:
                    raised.append(str(error))

            receiving = threading.Thread(target=receive, daemon=True)
            receiving.start()
            assert admitted.wait(10)
            lanes.abort("out of memory")
            receiving.join(10)
            waiting = threading.Thread(target=wait, daemon=True)
            waiting.start()
            waiting.join(10)
            assert raised
            assert "out of memory" in raised[0]
