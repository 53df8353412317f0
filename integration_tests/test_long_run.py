"""A watched job of four ranks, step after step with evaluations between: nothing that a process holds grows."""

from __future__ import annotations

import gc
import os
import threading
import time
from functools import partial
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.schedules import (
    Forwarded,
    Monitor,
    PipelineRuntime,
    clip_grad_norm_,
    lower,
    one_f_one_b,
    reduce_gradients,
)
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, control_store
from pipegrid.topology.torch_compat import default_store
from pipegrid.transport import Edge, P2PCommunicator, P2PConfig

MICROBATCHES, ROWS, WIDTH = 3, 4, 16
EVALUATE_EVERY = 10
EDGE = Edge(0, 1)
DEADLINE = 120.0  # late enough for a machine that does other work: no time decides here
# Growth from the end of the warm-up that is not a leak. One tensor kept per step is ten times as many objects in the
# short run; 400 bytes lost per step, outside Python's objects, exceed the memory in the long one.
OBJECTS, RSS_BYTES = 24, 8 * 2**20
LANES = 2  # of a rank; each starts a thread of its own once, when a transfer first outlives its step


class Stage:
    """A linear layer; the first stage makes its lane's data, the second has the loss."""

    def __init__(self, number, lane, device):
        torch.manual_seed(number)
        self.number, self.device = number, device
        self.generator = torch.Generator().manual_seed(100 + lane)
        self.model = nn.Linear(WIDTH, WIDTH).to(device)

    def forward(self, microbatch, inputs):
        if self.number == 0:
            x = torch.randn(ROWS, WIDTH, generator=self.generator).to(self.device)
            return Forwarded({EDGE: torch.tanh(self.model(x))})
        return Forwarded({}, self.model(inputs[EDGE]).square().mean())


def _descriptors():
    """Open descriptors; the monitor's thread holds one more while it reads a store that is a file."""
    time.sleep(0.01)
    return len(list(Path("/proc/self/fd").iterdir()))


@attrs.frozen
class Held:
    """What this process holds between two steps; ``keys`` is the whole job's store."""

    rss: int
    objects: int
    descriptors: int
    threads: int
    native_threads: int
    keys: int

    @classmethod
    def now(cls, ranks):
        """Count between two barriers, while no rank is in a step. A barrier of the test's own would add keys."""
        dist.barrier()
        if ranks.fake_device is not None:
            ranks.fake_device.forget()
        gc.collect()
        held = cls(
            rss=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            objects=len(gc.get_objects()),
            descriptors=min(_descriptors() for _ in range(10)),
            threads=threading.active_count(),
            native_threads=len(list(Path("/proc/self/task").iterdir())),
            keys=default_store().num_keys(),
        )
        dist.barrier()
        return held


def run(ranks, *, warmup, steps):
    """Train for ``warmup`` and ``steps`` more steps; what was held after each."""
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    grid.create_pgs(["dp"])
    grid.create_pgs(["pp"])
    groups = ProcessGroupCollection.from_grid(grid)
    number, lane = (grid.coords(ranks.rank)[dim] for dim in ("pp", "dp"))
    config = P2PConfig(pipeline_dtype=torch.float32, strict=ranks.strict_sends, deadline=DEADLINE)
    communicator = P2PCommunicator(grid.get_pg("pp"), config)
    monitor = Monitor(control_store("monitor"), rank=ranks.rank, ranks=range(4), deadline=DEADLINE, interval=0.05)
    stage = Stage(number, lane, ranks.device)
    optimizer = torch.optim.SGD(stage.model.parameters(), lr=1e-3, momentum=0.9)
    runtime = PipelineRuntime(lower(one_f_one_b(2, MICROBATCHES)), {number: stage}, communicator, monitor=monitor)
    finish = partial(reduce_gradients, stage.model, groups)

    def train(count):
        for step in range(count):
            optimizer.zero_grad()
            runtime.step(finish=finish)
            norm = clip_grad_norm_(stage.model, groups, 1.0)
            optimizer.step()
            if step % EVALUATE_EVERY == 0:
                runtime.eval()
                ranks.report_position(f"step {step}")
        assert norm.isfinite()
        return Held.now(ranks)

    try:
        return train(warmup), train(steps)
    finally:
        monitor.close()
        communicator.close()


def check(ranks, *, warmup, steps):
    before, after = run(ranks, warmup=warmup, steps=steps)
    assert after.descriptors <= before.descriptors, (before, after)
    assert after.keys <= before.keys, (before, after)
    assert after.threads <= before.threads + LANES, (before, after)
    assert after.native_threads <= before.native_threads + LANES, (before, after)
    # The fake device holds the entries of the last collectives a moment longer.
    objects = OBJECTS if ranks.fake_device is None else 3 * OBJECTS
    assert after.objects <= before.objects + objects, (before, after)
    assert after.rss <= before.rss + RSS_BYTES, (before, after)


@pytest.mark.ranks(4, deadline=300)
def test_nothing_grows_in_a_short_run(ranks):
    check(ranks, warmup=50, steps=240)


@pytest.mark.nightly
@pytest.mark.ranks(4, deadline=4 * 3600)
def test_nothing_grows_in_twenty_thousand_steps(ranks):
    check(ranks, warmup=1000, steps=20_000)
