"""Uses of a runtime that a training script comes to sooner or later: right, or one clear error on every rank."""

from __future__ import annotations

import gc
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch.utils.data import DataLoader, TensorDataset

from pipegrid.schedules import (
    Action,
    PipelineError,
    PipelineRuntime,
    PlanError,
    dualpipe_v,
    gpipe,
    lower,
    one_f_one_b,
    verify,
    zero_bubble_h1,
    zero_bubble_v,
)
from pipegrid.transport import P2PCommunicator, P2PConfig

from .kit.data import normal
from .kit.held import Held, native_threads
from .kit.models import Part, require_same_gradients
from .kit.stages import Stage, in_one_process

MICROBATCHES, WIDTH, DEADLINE = 4, 8, 20.0
PLAN = lower(one_f_one_b(2, MICROBATCHES))


def stage_of(ranks, number, plan=PLAN, kind=Stage):
    """A stage in float64, alike on every rank."""
    return kind(
        plan.graph,
        number,
        Part(number, WIDTH).to(ranks.device),
        data=lambda microbatch: normal(100 + microbatch, 2, WIDTH, device=ranks.device),
        loss=lambda y: y.square().mean(),
    )


def opened(ranks, stage=None, **options):
    """A communicator over two stages, and this rank's runtime."""
    config = P2PConfig(pipeline_dtype=torch.float64, deadline=DEADLINE, staged=ranks.backend == "staged")
    communicator, stage = P2PCommunicator(dist.group.WORLD, config), stage or stage_of(ranks, ranks.rank)
    return communicator, PipelineRuntime(PLAN, {ranks.rank: stage}, communicator, **options)


@pytest.mark.few(1)
@pytest.mark.ranks(2, backend="gloo", deadline=120)  # counts gloo's threads and connections
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_communicators_made_again_and_again_leave_nothing(ranks, closed):
    """As after each failure, or for each phase of a training; a dropped one ends its threads as a closed one does."""
    seen = []
    for _ in range(8):
        communicator, runtime = opened(ranks)
        runtime.step()
        if closed:
            communicator.close()
        del communicator, runtime
        gc.collect()
        dist.barrier()
        limit = time.monotonic() + 10
        while seen and native_threads() > seen[0].native_threads + 2 and time.monotonic() < limit:
            time.sleep(0.05)  # threads end after the communicator
        seen.append(Held.now(ranks))
    seen[-1].require_no_more(seen[2], native_threads=2, descriptors=2)


@pytest.mark.ranks(2)
def test_a_data_loader_forks_its_workers_beside_open_lanes(ranks):
    communicator, runtime = opened(ranks)
    runtime.step()
    for _ in range(2):
        for _ in DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, num_workers=2):
            runtime.step()
    communicator.close()


@pytest.mark.ranks(2)
def test_a_step_from_another_thread_and_with_the_collector_at_every_action(ranks):
    class Collects:
        def before(self, action):
            gc.collect(0)

        def after(self, action):
            gc.collect()

    communicator, runtime = opened(ranks, hooks=[Collects()])
    runtime.step()
    failed = []

    def steps():
        try:
            runtime.step()
        except BaseException as error:  # noqa: BLE001 -- raised in the test's own thread
            failed.append(error)

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    assert not failed
    runtime.step()
    communicator.close()


@pytest.mark.ranks(2)
def test_a_step_on_a_closed_communicator_says_so_at_once(ranks):
    """Not that the store, which is well, does not answer."""
    communicator, runtime = opened(ranks)
    runtime.step()
    dist.barrier()
    communicator.close()
    start = time.monotonic()
    with pytest.raises(PipelineError, match=r"P2PLaneDeadError: lane .* was closed on rank"):
        runtime.step()
    assert time.monotonic() - start < 5


@pytest.mark.ranks(2)
def test_a_step_after_the_default_group_is_destroyed_and_a_second_close(ranks):
    """Lanes have groups of their own; whether they outlive the default group, nothing hangs or crashes."""
    communicator, runtime = opened(ranks)
    runtime.step()
    dist.barrier()
    dist.destroy_process_group()
    try:
        runtime.step()
    except PipelineError as error:
        assert "rank" in str(error)
    communicator.close()
    communicator.close()


@pytest.mark.ranks(2)
def test_one_output_for_two_microbatches_is_not_freed_twice(ranks):
    """A cached activation, with outputs freed after their send: the second message had one element."""

    class Cached(Stage):
        kept = None

        def forward(self, microbatch, inputs):
            if self.number == 1:
                return super().forward(microbatch, inputs)
            if self.kept is None:
                self.kept = super().forward(0, {})
            return self.kept

    communicator, runtime = opened(ranks, stage_of(ranks, ranks.rank, kind=Cached), deallocate_outputs=True)
    with pytest.raises(PipelineError, match="one tensor as the output of two microbatches, which is freed") as failed:
        runtime.step()
    assert "rank 0, stage 0, microbatch 1: StageOutputError" in str(failed.value).splitlines()[0]
    communicator.abort("the test is over")


# ---- Mutated plans that `verify` accepts run


def moved(plan, draw):
    """``plan`` with one step of a position moved, batched with the next, or a batch cut in two."""
    positions = [list(steps) for steps in plan.positions]
    row = draw.choice(positions)
    at = draw.randrange(len(row) - 1)
    this, following = ((step,) if isinstance(step, Action) else tuple(step) for step in row[at : at + 2])
    messages = not any(action.kind.is_compute for action in (*this, *following))
    match draw.randrange(3):
        case 0:
            row.insert(max(0, at + draw.choice([-3, -2, -1, 1, 2, 3])), row.pop(at))
        case 1 if messages:
            row[at : at + 2] = [this + following]
        case _ if len(this) > 1:
            cut = draw.randrange(1, len(this))
            row[at : at + 1] = [part[0] if len(part) == 1 else part for part in (this[:cut], this[cut:])]
    return evolve(plan, positions=tuple(map(tuple, positions)))


def mutated(base, draw, changes):
    """A verified plan some changes away from ``base``."""
    plan = base
    for _ in range(changes):
        try:
            other = moved(plan, draw)
            verify(other)
        except PlanError:
            continue
        plan = other
    return plan


@pytest.mark.parametrize(
    ("plans", "seed"),
    [
        pytest.param(3, 0, marks=pytest.mark.ranks(4)),
        pytest.param(100, 1, marks=[pytest.mark.ranks(4, deadline=3600), pytest.mark.nightly]),
    ],
)
def test_mutated_plans_that_verify_run_on_real_ranks(ranks, plans, seed):
    """In strict mode, where every send blocks; with the gradients of one process. ``plans``: of each schedule."""
    draw, ran = random.Random(seed), 0
    for schedule in (one_f_one_b, gpipe, zero_bubble_h1, zero_bubble_v, dualpipe_v):
        base = lower(schedule(4, 8 if schedule is dualpipe_v else MICROBATCHES))
        staged = ranks.backend == "staged"
        config = P2PConfig(pipeline_dtype=torch.float64, deadline=120, strict=True, staged=staged)
        communicator = P2PCommunicator(dist.group.WORLD, config, placement=[places[0] for places in base.placement])
        expected = [stage_of(ranks, number, base) for number in range(base.num_stages)]
        in_one_process(expected, base.num_microbatches)
        for _ in range(plans):
            plan = mutated(base, draw, changes=30)
            stages = {number: stage_of(ranks, number, plan) for number in plan.stages_at[ranks.rank]}
            PipelineRuntime(plan, stages, communicator).step()
            ran += plan != base
            for number, stage in stages.items():
                require_same_gradients(stage.model, expected[number].model, rtol=1e-12, atol=1e-14)
        communicator.close()
    assert ran > 4 * plans
