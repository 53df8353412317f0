"""A rank fails under NCCL's rules: every other rank raises the first failure's error within the deadline + 2 s.

Two jobs: replicas of a pipeline, and encoders that feed the copies of a language model over a bridge. Gradients are
reduced while the last backwards run, so lanes, completions and reductions are under way when the failure comes. Beside
exceptions in forwards, the failures are what NCCL reports beside the host: an entry on the failing rank's stream ends
with an error, and the entries of its peers run on until they are aborted.
"""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.schedules import (
    JobFailedError,
    Monitor,
    PipelineConfig,
    PipelineError,
)
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, control_store
from pipegrid.transport import P2PCommunicator

from .kit.models import Wrapped, call

RANKS, WIDTH, MICROBATCHES = 4, 4, 4
DEADLINE, PROMISED = 20.0, 2.0  # seconds; no error here waits for a deadline, so that load does not decide
CAUSE = "injected failure 4711"


def chain(config):
    """Replicas of a pipeline: the communicator, this rank's module, its groups, and whether it is the first stage."""
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    grid.create_pgs(["dp", "pp"])
    communicator = P2PCommunicator(grid.get_pg("pp"), config)
    return communicator, "model", ProcessGroupCollection.from_grid(grid), dist.get_rank() < 2


def bridge(config):
    """The same of encoders on replicas, and of two copies of a language model that complete each other's inputs."""
    dims = ["tp", "dp"]
    grids = {"encoder": HyperCommGrid([1, 2], dims), "language": HyperCommGrid([2, 1], dims, rank_offset=2)}
    for grid in grids.values():
        grid.create_pgs(dims)
    communicator = MultiModulePipelineCommunicator(grids, {"encoder": ["language"]}, config)
    (name,) = (name for name, grid in grids.items() if grid.is_current_rank_in_grid())
    return communicator, name, {name: ProcessGroupCollection.from_grid(grids[name])}, name == "encoder"


def note_the_fault(ranks):
    """When this rank failed first."""
    path = ranks.shared_path / f"fault.{ranks.rank}"
    if not path.exists():
        path.write_text(repr(time.monotonic()))


def fail_together(ranks, failing, first_stage):
    """Before a forward: all of ``failing`` raise when the last one has come, and inputs of each are there."""

    def before(number):
        if number == (1 if first_stage else 0):
            ranks.store.add("failing", 1)
            while ranks.store.add("failing", 0) < len(failing):
                time.sleep(0.001)
            note_the_fault(ranks)
            raise ValueError(CAUSE)

    return before


ENTRIES = {
    "a send": lambda kind, operations: any(operation.kind == "send" for operation in operations),
    "a receive": lambda kind, operations: any(operation.kind == "recv" for operation in operations),
    "a reduction": lambda kind, operations: kind == "allreduce",
    "a completion": lambda kind, operations: kind == "_allgather_base",
}


def break_next(ranks, fits):
    """From the next entry that ``fits`` on, those of its group fail on this rank: NCCL has lost the connection."""
    device, lost = ranks.fake_device, set()
    launch, device.reports_peer_errors = device.launch, True

    def lose():
        note_the_fault(ranks)
        raise dist.DistBackendError(CAUSE)

    def launched(group, kind, operations, run, timeout, **tensors):
        if not lost and fits(kind, operations):
            lost.add(group)
        if group in lost:
            run = lose
        return launch(group, kind, operations, run, timeout, **tensors)

    device.launch = launched


CAUSES = {
    "a send": "P2P(Peer|LaneDead)Error: rank . lost rank . while",
    "a receive": "P2P(Peer|LaneDead)Error: rank . lost rank . while",
    "a reduction": "a reduction of gradients failed",
    "a completion": "CollectiveFailedError: rank 2, bridge encoder>language",
    "two forwards": f"ValueError: {CAUSE}",
    "a group of the program": f"ValueError: {CAUSE}",
}
CASES = [
    (chain, "a send", [0]),
    (chain, "a receive", [3]),
    (chain, "a reduction", [1]),
    (chain, "two forwards", [0, 3]),
    (chain, "a group of the program", [1]),
    (bridge, "a send", [0]),
    (bridge, "a receive", [3]),
    (bridge, "a reduction", [1]),
    (bridge, "a completion", [2]),
    (bridge, "two forwards", [1, 2]),
]
OFTEN = [  # the others run at night
    ("streams", bridge, "a completion"),
    ("serial", chain, "a reduction"),
    ("streams", chain, "a group of the program"),
]


def cases():
    for mode in ("streams", "serial"):
        on = pytest.mark.ranks(RANKS, backend="fake_nccl", fake_nccl=mode, deadline=120)
        for job, what, failing in CASES:
            marks = [on] if (mode, job, what) in OFTEN else [on, pytest.mark.nightly]
            yield pytest.param(job, what, failing, marks=marks, id=f"{job.__name__}-{what}-{mode}")


@pytest.mark.parametrize(("job", "what", "failing"), list(cases()))
def test_every_rank_raises_the_first_failure_within_the_deadline(ranks, device, job, what, failing):
    with device.streams.watch():
        monitor = Monitor(
            control_store("monitor"), rank=ranks.rank, ranks=range(RANKS), deadline=DEADLINE, device=ranks.device
        )
        config = PipelineConfig(pipeline_dtype=torch.float32, deadline=DEADLINE, grad_bucket_bytes=1, monitor=monitor)
        communicator, name, groups, first_stage = job(config)
        model = Wrapped(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), config)
        before = None  # called with the number of each forward

        def forward_step(iterator, model):
            number = next(iterator)
            if before is not None:
                before(number)
            received = model.received.values() if isinstance(model.received, dict) else model.received
            x = next((tensor for tensor in received if tensor is not None), torch.ones(2, 1, WIDTH))
            y = model(x)
            return ({name: y} if name == "encoder" else y), lambda y: (y.square().mean(), None)

        def step():
            given = {"p2p_communicator": communicator, "pg_collection": groups}
            call(model=model, count=MICROBATCHES, forward_step_func=forward_step, **given)

        step()
        # Ranks 0 and 1 hold copies of one stage; a rank that fails leaves the other one alone in a collective.
        groups_of_copies = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        own = next(group for group in groups_of_copies if group is not dist.GroupMember.NON_GROUP_MEMBER)
        ranks.barrier()
        if ranks.rank in failing and what in ENTRIES:
            break_next(ranks, ENTRIES[what])
        elif ranks.rank in failing:
            before = fail_together(ranks, failing, first_stage)
        elif what == "a group of the program":
            before = lambda number: dist.all_reduce(torch.ones(1), group=own, async_op=True)
        with pytest.raises((PipelineError, JobFailedError)) as caught:
            step()
            step()  # of a rank that had nothing more to exchange
        ended = time.monotonic()
        ranks.store.set(f"error/{ranks.rank}", f"{caught.type.__name__}: {caught.value}")
        ranks.barrier()
        texts = [ranks.store.get(f"error/{rank}").decode() for rank in range(RANKS)]
        (first,) = {text.splitlines()[0].partition(": ")[2] for text in texts if text.startswith("PipelineError")}
        assert all(first in text for text in texts)
        assert any(re.search(rf"\brank {rank}\b", first) for rank in failing)
        assert re.search(CAUSES[what], first)
        began = min(float(path.read_text()) for path in ranks.shared_path.glob("fault.*"))
        assert ended - began <= DEADLINE + PROMISED
        limit = time.monotonic() + DEADLINE
        while device.unfinished() and time.monotonic() < limit:
            time.sleep(0.01)
        assert not device.unfinished()  # every group was aborted, so that every abort has returned
        monitor.close()
        communicator.destroy() if job is bridge else communicator.close()
