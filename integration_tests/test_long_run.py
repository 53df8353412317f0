"""A watched job of four ranks, step after step with evaluations between: nothing that a process holds grows."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pipegrid.schedules import (
    Monitor,
    PipelineRuntime,
    clip_grad_norm_,
    lower,
    one_f_one_b,
    reduce_gradients,
)
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, control_store
from pipegrid.transport import P2PCommunicator, P2PConfig

from .kit.held import Held
from .kit.models import Part
from .kit.stages import Stage

MICROBATCHES, ROWS, WIDTH = 3, 4, 16
EVALUATE_EVERY = 10
DEADLINE = 120.0  # late enough for a machine that does other work: no time decides here
# Growth from the end of the warm-up that is not a leak. One tensor kept per step is ten times as many objects in the
# short run; 400 bytes lost per step, outside Python's objects, exceed the memory in the long one.
OBJECTS, RSS_BYTES = 24, 8 * 2**20
LANES = 2  # of a rank; each starts a thread of its own once, when a transfer first outlives its step


def stage_of(graph, number, lane, device):
    """A linear layer; the first stage makes its lane's data, the second has the loss."""
    generator = torch.Generator().manual_seed(100 + lane)
    return Stage(
        graph,
        number,
        Part(number, WIDTH, dtype=torch.float32).to(device),
        data=lambda _: torch.randn(ROWS, WIDTH, generator=generator).to(device),
        loss=lambda y: y.square().mean(),
    )


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
    plan = lower(one_f_one_b(2, MICROBATCHES))
    stage = stage_of(plan.graph, number, lane, ranks.device)
    optimizer = torch.optim.SGD(stage.model.parameters(), lr=1e-3, momentum=0.9)
    runtime = PipelineRuntime(plan, {number: stage}, communicator, monitor=monitor)
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
    # The fake device holds the entries of the last collectives a moment longer.
    objects = OBJECTS if ranks.fake_device is None else 3 * OBJECTS
    threads = {"threads": LANES, "native_threads": LANES}
    after.require_no_more(before, descriptors=0, keys=0, objects=objects, rss=RSS_BYTES, **threads)


@pytest.mark.ranks(4, deadline=300)
def test_nothing_grows_in_a_short_run(ranks):
    check(ranks, warmup=50, steps=240)


@pytest.mark.nightly
@pytest.mark.ranks(4, deadline=4 * 3600)
def test_nothing_grows_in_twenty_thousand_steps(ranks):
    check(ranks, warmup=1000, steps=20_000)
