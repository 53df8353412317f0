"""A rank fails in the middle of a backward while others wait in the reduction of gradients: all name it, and its error.

Two replicas of two stages. Rank 3, on the last stage, fails in its last backward when rank 2 has finished its own, so
that rank 2 waits for it in the reduction. Rank 1 waits for its gradient on a lane, rank 0 for rank 1 in a reduction.
Each that fails leaves a record of its own.
"""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
import torch
from torch import nn

from pipegrid.schedules import (
    JobFailedError,
    Monitor,
    PipelineConfig,
    PipelineError,
)
from pipegrid.testing import Fault, InjectedFault
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, control_store
from pipegrid.transport import P2PCommunicator

from .kit.models import Wrapped, call, forward_step
from .kit.reach import Reach

RANKS, WIDTH, MICROBATCHES, FAILING, WAITING = 4, 4, 3, 3, 2
DEADLINE = 6.0


class AtTheLastBackward:
    """On the failing rank: fail in the last backward, once the waiting rank has ended its own."""

    def __init__(self, ranks):
        self.ranks, self.left, self.armed = ranks, MICROBATCHES, False

    def __call__(self):
        self.left -= 1
        if self.left or not self.armed:
            return
        if self.ranks.rank == WAITING:
            self.ranks.store.set("waits", "1")
        elif self.ranks.rank == FAILING:
            while not self.ranks.store.check(["waits"]):
                time.sleep(0.01)
            time.sleep(0.3)  # until it waits indeed; the outcome is the same if it does not yet
            self.ranks.reach("the last backward")

    def arm(self):
        self.left, self.armed = MICROBATCHES, True


BACKENDS = {
    "gloo": {"backend": "gloo"},
    "streams": {"backend": "fake_nccl", "fake_nccl": "streams"},
    "serial": {"backend": "fake_nccl", "fake_nccl": "serial"},
}
OFTEN = [("gloo", "kill", "alone"), ("serial", "raise", "watched")]  # the others run at night
CASES = [
    pytest.param(
        fault,
        watched == "watched",
        marks=[
            pytest.mark.ranks(RANKS, deadline=120, **BACKENDS[backend]),
            *([] if (backend, fault, watched) in OFTEN else [pytest.mark.nightly]),
        ],
        id=f"{backend}-{fault}-{watched}",
    )
    for backend in BACKENDS
    for fault in ("kill", "raise")
    for watched in ("watched", "alone")
]


@pytest.mark.parametrize(("fault", "watched"), CASES)
def test_every_rank_names_the_rank_that_failed_while_others_reduced(ranks, fault, watched):
    monitor = None
    if watched:
        monitor = Monitor(control_store("monitor"), rank=ranks.rank, ranks=range(RANKS), deadline=DEADLINE)
    folder = ranks.shared_path / "failures"
    config = PipelineConfig(
        pipeline_dtype=torch.float32, deadline=DEADLINE, grad_bucket_bytes=1, monitor=monitor, failure_dir=folder
    )
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    grid.create_pgs(["dp", "pp"])
    communicator = P2PCommunicator(grid.get_pg("pp"), config)
    fault_place = AtTheLastBackward(ranks)
    layers = nn.Linear(WIDTH, WIDTH), Reach(fault_place), nn.Linear(WIDTH, WIDTH)
    step = partial(
        call,
        model=Wrapped(nn.Sequential(*layers), config),
        count=MICROBATCHES,
        forward_step_func=partial(forward_step, data=lambda _: torch.ones(2, 1, WIDTH)),
        p2p_communicator=communicator,
        pg_collection=ProcessGroupCollection.from_grid(grid),
    )
    step()
    ranks.barrier()
    fault_place.arm()
    ranks.plan_fault(Fault(fault, rank=FAILING, at="the last backward"))
    with pytest.raises((PipelineError, JobFailedError)) as caught:
        step()
        step()  # of a rank that had nothing more to exchange
    first = str(caught.value).splitlines()[0]
    assert f"rank {FAILING}" in first
    (record,) = map(json.loads, (path.read_text() for path in folder.glob(f"rank{ranks.rank}*.json")))
    assert first.partition(": ")[2][:200] in record["first_failure"] or record["first_failure"] in first
    assert record["place"].startswith(f"position {ranks.rank // 2}, ")
    assert sum(lane["sent"] + lane["received"] > MICROBATCHES for lane in record["lanes"].values()) == 2
    if fault == "raise":
        assert InjectedFault.__name__ in first
        ranks.barrier()
    if monitor is not None:
        monitor.close()
    communicator.close()
