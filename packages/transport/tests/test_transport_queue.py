"""The queues of a lane while several threads look at them."""

from collections import deque

import pytest
import torch

from pipegrid.transport import LaneSpec, P2PUsageError, open_lanes
from pipegrid.transport.lane import endpoint, transfers

from .two_ranks import BACK, THERE, config


class LiveQueue(deque):
    """A queue as another thread may leave it: an iterator of it is out of date at once."""

    def __iter__(self):
        raise RuntimeError("deque mutated during iteration")

    def copy(self):
        return deque(self[index] for index in range(len(self)))


@pytest.fixture
def live_queues(monkeypatch):
    monkeypatch.setattr(transfers, "deque", LiveQueue)
    monkeypatch.setattr(endpoint, "deque", LiveQueue)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("gloo", marks=pytest.mark.ranks(2)),
        pytest.param("fake_nccl", marks=pytest.mark.ranks(2, backend="fake_nccl")),
    ],
)
def test_no_live_queue_is_iterated(ranks, backend, live_queues):
    with open_lanes([THERE, BACK], config=config()) as lanes:
        mine, other = (THERE, BACK) if ranks.rank == 0 else (BACK, THERE)
        receives = [lanes[other].irecv() for _ in range(3)]
        with pytest.raises(P2PUsageError, match="3 receives under way"):
            lanes[other].renew()
        ranks.barrier()  # nothing is sent before, so that all three are under way
        for receive in receives if ranks.rank else ():  # on a serial stream, two ranks that both send first are stuck
            receive.wait()
        sends = [lanes[mine].isend(torch.full((4,), float(number))) for number in range(3)]
        assert [receive.result()[0].item() for receive in receives] == [0, 1, 2]
        for handle in (*sends, *receives):
            handle.synchronize()
        lanes[other].renew()
        lanes[mine].renew()
        ranks.barrier()  # the other side sees its transfers end before it is told
        lanes.abort("enough")


@pytest.mark.ranks(1)
def test_two_threads_that_see_one_end_take_one_transfer(ranks, monkeypatch):
    here = LaneSpec(0, 0, "here")
    waited = []

    class Interrupted(deque):
        def popleft(self):
            taken = super().popleft()
            if waited:  # another thread waits for what this one is about to end
                waited.pop().wait()
            return taken

    monkeypatch.setattr(transfers, "deque", Interrupted)
    with open_lanes([here], config=config()) as lanes:
        lane = lanes[here]
        first, second = lane.irecv(), lane.irecv()
        waited.append(first)
        lane.isend(torch.ones(1)).wait()
        assert list(lane.queue) == [second]
        lane.isend(torch.full((1,), 2.0)).wait()
        assert [first.result().item(), second.result().item()] == [1, 2]
        assert not lane.queue
