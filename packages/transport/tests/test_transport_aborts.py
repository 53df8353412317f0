"""Aborts of device groups wait for the device; a wait for a transfer does not wait for an abort."""

from __future__ import annotations

import time

import pytest
import torch

from pipegrid.transport import LaneSpec, P2PConfig, P2PError, open_lanes

FROM_1, ALSO_FROM_1, FROM_2 = LaneSpec(1, 0, "a"), LaneSpec(1, 0, "b"), LaneSpec(2, 0, "c")
PLAIN = dict.fromkeys((FROM_1, ALSO_FROM_1, FROM_2), torch.ones(2))
MODES = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.ranks(3, backend="fake_nccl", fake_nccl=mode))
        for mode in ("streams", "serial")
    ],
)


@MODES
def test_the_error_of_a_lane_comes_while_a_kernel_of_another_lane_runs(ranks, mode):
    """Rank 1 fails. Rank 0 aborts the groups of both its lanes, which waits for the kernel that rank 2 ends."""
    lanes = open_lanes(PLAIN, config=P2PConfig(deadline=30.0), standing=PLAIN)
    if ranks.rank == 0:
        late, lost, also_lost = (lanes[spec].irecv() for spec in (FROM_2, FROM_1, ALSO_FROM_1))
        ranks.barrier()
        began = time.monotonic()
        for handle in (also_lost, lost):
            with pytest.raises(P2PError, match="out of memory"):
                handle.wait()
        assert time.monotonic() - began < 4.0  # the abort itself is given up after 5 s
        ranks.barrier()
        late.synchronize()
        assert late.result().tolist() == [1, 1]
    else:
        ranks.barrier()
        if ranks.rank == 1:
            lanes.abort("out of memory")
        ranks.barrier()
        if ranks.rank == 2:
            lanes[FROM_2].isend(torch.ones(2)).synchronize()
    ranks.barrier()
    lanes.close()
