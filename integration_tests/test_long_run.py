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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("warmup", "steps"),
    [
        pytest.param(50, 240, marks=pytest.mark.ranks(4, deadline=300)),
        pytest.param(1000, 20_000, marks=[pytest.mark.ranks(4, deadline=4 * 3600), pytest.mark.nightly]),
    ],
)
def test_nothing_grows_after_the_warm_up(ranks, warmup, steps):
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    grid.create_pgs(["dp"])
    grid.create_pgs(["pp"])
    groups = ProcessGroupCollection.from_grid(grid)
    number, lane = (grid.coords(ranks.rank)[dim] for dim in ("pp", "dp"))
    config = P2PConfig(pipeline_dtype=torch.float32, strict=ranks.strict_sends, deadline=DEADLINE)
    communicator = P2PCommunicator(grid.get_pg("pp"), config)
    monitor = Monitor(control_store("monitor"), rank=ranks.rank, ranks=range(4), deadline=DEADLINE, interval=0.05)
    plan = lower(one_f_one_b(2, MICROBATCHES))
    generator = torch.Generator().manual_seed(100 + lane)
    stage = Stage(
        plan.graph,
        number,
        Part(number, WIDTH, dtype=torch.float32).to(ranks.device),
        data=lambda _: torch.randn(ROWS, WIDTH, generator=generator).to(ranks.device),
        loss=lambda y: y.square().mean(),
    )
    optimizer = torch.optim.SGD(stage.model.parameters(), lr=1e-3, momentum=0.9)
    runtime = PipelineRuntime(plan, {number: stage}, communicator, monitor=monitor)
    finish = partial(reduce_gradients, stage.model, groups)

    def held_after(count):
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
        before, after = held_after(warmup), held_after(steps)
    finally:
        monitor.close()
        communicator.close()
    # The fake device holds the entries of the last collectives a moment longer.
    objects = OBJECTS if ranks.fake_device is None else 3 * OBJECTS
    threads = {"threads": LANES, "native_threads": LANES}
    after.require_no_more(before, descriptors=0, keys=0, objects=objects, rss=RSS_BYTES, **threads)
