"""What a lane refuses, and that it lives on."""

import pytest
import torch

from pipegrid.transport import P2PUsageError, open_lanes
from pipegrid.transport.lane import endpoint

from .two_ranks import THERE, config


class TestUse:
    @pytest.mark.ranks(2)
    def test_each_end_has_its_verb(self, ranks):
        with open_lanes([THERE], config=config()) as lanes:
            if ranks.rank == 0:
                with pytest.raises(P2PUsageError, match=r"rank 0 cannot receive on lane 0>1.*it is the source"):
                    lanes[THERE].irecv()
            else:
                with pytest.raises(P2PUsageError, match=r"rank 1 cannot send on lane 0>1.*it is the destination"):
                    lanes[THERE].isend(torch.ones(1))
            ranks.barrier()

    @pytest.mark.ranks(2)
    @pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
    def test_what_cannot_be_sent_is_refused_and_the_lane_lives(self, ranks):
        with open_lanes([THERE], config=config(pipeline_dtype=torch.float32)) as lanes:
            lane = lanes[THERE]
            if ranks.rank == 0:
                for _ in range(2):  # before and after the shape stands
                    for wrong in (
                        torch.ones(2, 2).t(),
                        torch.ones(2, dtype=torch.float64),
                        torch.ones(2, device="meta"),
                        torch.nested.nested_tensor([torch.ones(2)]),
                    ):
                        with pytest.raises(P2PUsageError):
                            lane.isend(wrong)
                    lane.isend(torch.ones(2)).wait()
            else:
                for _ in range(2):
                    assert lane.irecv((2,)).result().tolist() == [1, 1]

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize(
        ("right", "wrong"),
        [
            (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
            (torch.tensor([2.0]), torch.tensor([1 + 2j]).conj().imag),
        ],
        ids=["conjugate", "negative"],
    )
    def test_a_view_that_changes_values_is_refused_and_the_lane_lives(self, ranks, right, wrong):
        with open_lanes([THERE], config=config()) as lanes:
            for _ in range(3):  # before and after the shape stands
                if ranks.rank == 0:
                    with pytest.raises(P2PUsageError, match="whose memory differs from its values"):
                        lanes[THERE].isend(wrong)
                    lanes[THERE].isend(right).wait()
                else:
                    assert lanes[THERE].irecv().result().tolist() == right.tolist()

    @pytest.mark.ranks(2)
    def test_a_send_that_torch_cannot_see_as_bytes_costs_no_message(self, ranks, monkeypatch):
        def cannot(tensors, device):
            raise RuntimeError("no view of it")

        with open_lanes([THERE], config=config()) as lanes:
            for value in (1.0, 2.0):
                if ranks.rank == 0:
                    with monkeypatch.context() as patch, pytest.raises(P2PUsageError, match="bytes: no view of it"):
                        patch.setattr(endpoint, "carried", cannot)
                        lanes[THERE].isend([torch.zeros(2)])
                    lanes[THERE].isend([torch.full((2,), value)]).wait()
                else:
                    handle = lanes[THERE].irecv()
                    assert handle.result()[0].tolist() == [value, value]
                    assert handle.sequence == value - 1

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), 1e10])
    def test_a_timeout_is_a_time(self, ranks, timeout):
        with open_lanes([THERE], config=config()) as lanes:
            handle = lanes[THERE].isend(torch.ones(1)) if ranks.rank == 0 else lanes[THERE].irecv()
            ranks.barrier()
            with pytest.raises(P2PUsageError, match="the timeout of a wait is .*; it must be above 0"):
                handle.wait(timeout)
            handle.wait()
