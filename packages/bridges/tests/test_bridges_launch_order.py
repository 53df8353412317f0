"""On a device group a bridge launches kernels in the order of the calls, whatever has arrived."""

from __future__ import annotations

import time

import pytest
import torch

from pipegrid.bridges import BridgeCommunicator
from pipegrid.transport.config import P2PConfig
from reshard_kit.grids import grid


@pytest.mark.ranks(3, backend="fake_nccl")
def test_a_wait_starts_the_completion_of_its_own_receive_alone(ranks):
    """Rank 1 waits when both tensors have arrived, rank 2 at once: both launch one completion by their first wait."""
    bridge = BridgeCommunicator(grid(0, tp=1), grid(1, tp=2), config=P2PConfig(deadline=20.0, open_deadline=20.0))
    x = torch.arange(16.0).reshape(2, 2, 4)
    if bridge.is_source:
        for n in range(3):
            bridge.isend_forward(x + n).wait()
    else:
        assert torch.equal(bridge.irecv_forward().result().detach(), x)
        receives = [bridge.irecv_forward(), bridge.irecv_forward()]
        if ranks.rank == 1:
            end = time.monotonic() + 10.0
            while any(entry.launch.kind == "p2p" for entry in ranks.fake_device.unfinished()):
                assert time.monotonic() < end
                time.sleep(0.01)
        before = completions(ranks)
        for n, receive in enumerate(receives, start=1):
            assert torch.equal(receive.result().detach(), x + n)
            assert completions(ranks) == before + n
    ranks.barrier()
    bridge.destroy()


def completions(ranks):
    return sum(launch.kind != "p2p" for launch in ranks.fake_device.launches)
