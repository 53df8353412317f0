"""A watched job under NCCL's rules over forty days of a moved clock: nothing ends it, nothing grows, and late failures
are early ones."""

from __future__ import annotations

import re
import time
import tracemalloc

import pytest
import torch
import torch.distributed as dist

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.schedules import (
    Monitor,
    PipelineError,
    PipelineRuntime,
    clip_grad_norm_,
    lower,
    multi_module_1f1b,
    one_f_one_b,
    reduce_gradients,
)
from pipegrid.testing.clock import moved_clock
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, control_store
from pipegrid.topology.torch_compat import default_store
from pipegrid.training import Attempt
from pipegrid.transport import P2PCommunicator, P2PConfig

from .kit.held import MALLOC, Held
from .kit.models import Part
from .kit.stages import Stage

DAYS, HOUR = 40, 3600.0
MICROBATCHES, ROWS, WIDTH = 2, 2, 4
DEADLINE = 120.0  # of the moved clock, too: no time of the machine decides
# Growth that is not a leak: free lists fill over some hundred steps. One object, descriptor or key lost in each step is
# more in the short run already; 16 bytes of the C++ below, in the long one.
OBJECTS, TRACED_BYTES, RSS_BYTES = 72, 2**17, 8 * 2**20
THREADS = 2  # a lane starts one of its own when a transfer first outlives its step
pytestmark = pytest.mark.skipif(not hasattr(MALLOC, "mallinfo2"), reason="the C library is no glibc 2.33 or newer")


def stage_of(graph, number, before):
    """A linear layer on the sum of its inputs; the last stage has the loss."""
    return Stage(
        graph,
        number,
        Part(number, WIDTH, dtype=torch.float32),
        data=lambda microbatch: torch.full((ROWS, 1, WIDTH), 0.1 * microbatch),
        loss=lambda y: y.square().mean(),
        before=before,
    )


class Job:
    """Two ranks, one stage each, over lanes of a pipeline or over a bridge; an attempt guards its steps."""

    def __init__(self, ranks, kind, clock, before=lambda microbatch: None):
        config = P2PConfig(pipeline_dtype=torch.float32, deadline=DEADLINE, strict=ranks.strict_sends)
        self.clock, self.label = clock, f"{kind} {default_store().add('jobs', 1) // 3}"
        if kind == "lanes":
            grids = {"model": HyperCommGrid([1, 2], ["dp", "pp"])}
            plan, self.communicator = lower(one_f_one_b(2, MICROBATCHES)), P2PCommunicator(dist.group.WORLD, config)
        else:
            grids = {name: HyperCommGrid([1], ["dp"], rank_offset=r) for r, name in enumerate(("encoder", "language"))}
            self.communicator = MultiModulePipelineCommunicator(grids, {"encoder": ["language"]}, config)
            plan = lower(multi_module_1f1b(self.communicator.graph, MICROBATCHES))
        for grid in grids.values():
            grid.create_pg("dp")
        (name,) = (name for name, grid in grids.items() if grid.is_current_rank_in_grid())
        self.monitor = Monitor(control_store(self.label), rank=ranks.rank, ranks=range(2), deadline=DEADLINE)
        stage = stage_of(plan.graph, ranks.rank, before)
        self.models, self.groups = {name: stage.model}, {name: ProcessGroupCollection.from_grid(grids[name])}
        self.runtime = PipelineRuntime(plan, {ranks.rank: stage}, self.communicator, monitor=self.monitor)
        self.attempt = Attempt(ranks.shared_path / self.label.replace(" ", "-"), monitor=self.monitor)
        self.done = 0

    def __enter__(self):
        self.attempt.__enter__()
        self.attempt.begin(0)
        return self

    def __exit__(self, *error):
        try:
            self.attempt.__exit__(*error)
        finally:
            self.monitor.close()
            (getattr(self.communicator, "destroy", None) or self.communicator.close)()

    def train(self, steps, *, seconds):
        """Train, and let ``seconds`` pass after each step, while no rank is in one."""
        for _ in range(steps):
            for model in self.models.values():
                model.zero_grad()
            self.runtime.step(finish=lambda: reduce_gradients(self.models, self.groups, loss_lanes=1))
            assert clip_grad_norm_(self.models, self.groups, 1.0).isfinite()
            self.done += 1
            assert not self.attempt.completed(self.done)
            dist.barrier()
            self.clock.move(seconds)
            dist.barrier()


def live(ranks, kind, *, warmup, steps, malloc):
    """Forty days of steps after a warm-up: nothing grows (``malloc``: that figure's bound), and no wait ends early."""
    tracemalloc.start()
    with moved_clock() as clock, Job(ranks, kind, clock) as job:
        job.train(warmup, seconds=1.0)
        before = Held.now(ranks)
        # The fake has an entry for each storage until it is told to forget: no round makes more than the warm-up.
        rounds = max(10, -(-steps // warmup))
        for _ in range(rounds):
            job.train(steps // rounds, seconds=DAYS * 24 * HOUR / steps)
            ranks.fake_device.forget()
            ranks.report_position(f"day {clock.passed / HOUR / 24:.1f}")
        after = Held.now(ranks)
        assert clock.passed >= DAYS * 24 * HOUR
        assert clock.ended == []
    tracemalloc.stop()
    # Without what the C library holds free: with it, 50,000 steps add 18 MB on a busy machine, 2 MB on an idle one.
    after.require_no_more(
        before,
        used=RSS_BYTES,
        malloc=malloc,
        traced=TRACED_BYTES,
        objects=OBJECTS,
        descriptors=0,
        threads=THREADS,
        native_threads=THREADS,
        keys=0,
    )
    return before, after


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["lanes", "bridge"])
@pytest.mark.ranks(2, backend="fake_nccl", deadline=300)
def test_nothing_grows_or_ends_in_forty_days(ranks, kind):
    live(ranks, kind, warmup=40, steps=300, malloc=RSS_BYTES)


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "steps"), [("lanes", 50_000), ("bridge", 10_000)])
@pytest.mark.ranks(2, backend="fake_nccl", deadline=6 * 3600)
def test_nothing_grows_or_ends_in_fifty_thousand_steps(ranks, kind, steps):
    live(ranks, kind, warmup=1000, steps=steps, malloc=3 * 2**18)


def raises(job):
    """The forward of a stage fails."""
    del job
    raise RuntimeError("injected failure 4711")


def is_late(job):
    """The forward of a stage takes longer than the deadline."""
    for _ in range(int(DEADLINE / 0.02)):
        job.clock.move(DEADLINE / 10)
        job.monitor.check()
        time.sleep(0.02)


def fail(ranks, kind, fault, hours):
    """Rank 0 fails in the fourth step, after that many hours: error class, first line, seconds of the machine."""
    jobs = []

    def before(microbatch):
        if ranks.rank == 0 and jobs[0].done == 3 and microbatch == 0:  # nothing is under way that could be late, too
            fault(jobs[0])

    def run(clock):
        with Job(ranks, kind, clock, before) as job:
            jobs.append(job)
            job.train(3, seconds=hours * HOUR / 3)
            assert clock.ended == []
            began.append(time.perf_counter())
            job.train(1, seconds=0.0)

    began = []
    with moved_clock() as clock, pytest.raises(PipelineError) as found:
        run(clock)
    first, _, rest = str(found.value).partition("\n")
    # Rank 1 may have ended before its first action, or before it told its place in the step.
    places = r"\n  rank 0: position 0, step .*\n  rank 1: (position 1, (step|before)|between steps)"
    assert re.search(places, rest), rest
    return type(found.value), re.sub(r"\d+(\.\d+)?", "#", first), time.perf_counter() - began[0]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (raises, "rank #, stage #, microbatch #: RuntimeError: injected failure #"),
        (
            is_late,
            "rank # has been at position #, step # of #: #F# for # s; the deadline is # s: look at what it waits for",
        ),
    ],
    ids=["raises", "is late"],
)
@pytest.mark.parametrize("hours", [1 / 60, 900], ids=["minute 1", "hour 900"])
@pytest.mark.parametrize("kind", ["lanes", "bridge"])
@pytest.mark.ranks(2, backend="fake_nccl", deadline=300)
def test_a_failure_at_hour_900_ends_as_in_minute_1(ranks, kind, hours, fault, text):
    error, line, seconds = fail(ranks, kind, fault, hours)
    assert (error, line) == (PipelineError, text)
    assert seconds < DEADLINE
