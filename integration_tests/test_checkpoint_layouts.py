"""Checkpoints across layouts: every tensor and optimizer state, and the losses that follow."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist

from pipegrid.topology import GroupSpec, create_groups
from pipegrid.training import Checkpoints

from .checkpoint_jobs import Job, Layout, Whole
from .kit.checkpoints import require_equal, values_of

SCHEDULES = {1: ("1f1b",), 2: ("interleaved_1f1b", "zero_bubble_v", "dualpipe_v")}
MATRIX = [
    Layout(pp, vpp, dp, schedule, placement, tied, frozen)
    for pp in (1, 2, 4)
    for vpp in (1, 2)
    for dp in (1, 2)
    for schedule in SCHEDULES[vpp]
    for placement in ("separate", "colocated")
    for tied in (False, True)
    for frozen in (False, True)
]
OFTEN = [  # the others run at night
    Layout(2, 2, 2, "zero_bubble_v", "colocated", tied=True, frozen=False),
    Layout(2, 1, 1, "1f1b", "separate", tied=True, frozen=True),
    Layout(2, 2, 1, "interleaved_1f1b", "separate", tied=False, frozen=False),
]
CASES = [
    pytest.param(
        one, id=str(one), marks=[pytest.mark.ranks(one.ranks), *([] if one in OFTEN else [pytest.mark.nightly])]
    )
    for one in MATRIX
]


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_the_first_rank(function):
    """What ``function`` returns on the first rank, which alone calls it; on every rank."""
    values = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def steps_of_one_process(ranks, layout, steps):
    """The whole model loaded and saved by one rank alone, with steps between: both states, and the losses."""
    alone = GroupSpec((0,), "alone")
    with contextlib.closing(Checkpoints(ranks.shared_path / "run", group=create_groups([alone])[alone])) as own:
        whole = Whole(layout, seed=2)
        assert own.load(whole.state).step == steps.start
        stored = values_of(whole.state)
        losses = [whole.step(number) for number in steps]
        own.save(whole.state, step=steps.stop)
    return stored, values_of(whole.state), losses


@functools.cache
def undisturbed(tied, frozen, steps):
    """Losses and final state of one process, the same for all layouts."""
    whole = Whole(Layout(1, 1, 1, "1f1b", tied=tied, frozen=frozen))
    losses = [whole.step(number) for number in range(steps)]
    return losses, values_of(whole.state)


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", CASES)
def test_a_layout_and_the_whole_model_load_from_each_other(ranks, layout):
    """Twenty steps: two in the layout, sixteen on one process, two in the layout again; bit for bit where it can be."""
    first = Job(layout, plan=True)
    losses = [first.step(number) for number in range(2)]
    checkpoints = Checkpoints(ranks.shared_path / "run")
    checkpoints.save(first.state, step=2)
    trained = values_of(first.state)
    stored, passed, between = on_the_first_rank(lambda: steps_of_one_process(ranks, layout, range(2, 18)))
    require_equal({key: stored[key] for key in trained}, trained)
    second = Job(layout, seed=3)
    assert checkpoints.load(second.state, step=2).same_layout
    require_equal(values_of(second.state), trained)
    assert second.step(2) == first.step(2)
    require_equal(values_of(second.state), values_of(first.state))
    assert not checkpoints.load(second.state, step=18).same_layout or second.layout.ranks == 1
    require_equal(values_of(second.state), {key: passed[key] for key in trained})
    losses += [*between, second.step(18), second.step(19)]
    expected_losses, expected = on_the_first_rank(lambda: undisturbed(layout.tied, layout.frozen, 20))
    assert losses == pytest.approx(expected_losses, rel=1e-10, abs=0)
    for key, value in values_of(second.state).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-12)
    checkpoints.close()
    for job in (first, second):
        job.pipeline.close()


@pytest.mark.thorough
@pytest.mark.ranks(4)
def test_twenty_steps_through_four_layouts_are_those_of_one_process(ranks):
    """Stopped every five steps, and resumed with other grids, another schedule and another cut."""
    layouts = [
        Layout(2, 2, 2, "zero_bubble_v"),
        Layout(4, 1, 1, "1f1b"),
        Layout(1, 1, 4, "1f1b"),
        Layout(4, 2, 1, "dualpipe_v"),
    ]
    reference = Whole(layouts[0])
    checkpoints = Checkpoints(ranks.shared_path / "run", keep=1)
    number = 0
    for layout in layouts:
        job = Job(layout, seed=4 if number else 1)
        found = checkpoints.load(job.state)
        assert (0 if found is None else found.step) == number
        for _ in range(5):
            assert job.step(number) == pytest.approx(reference.step(number), rel=1e-10)
            number += 1
        checkpoints.save(job.state, step=number, blocking=layout.pp > 1)
        checkpoints.wait()
        job.pipeline.close()
    assert number == 20
    expected = values_of(reference.state)
    for key, value in values_of(job.state).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-12)
    checkpoints.close()


@pytest.mark.thorough
@pytest.mark.ranks(4)
def test_a_run_interrupted_in_the_same_layout_is_bit_equal(ranks):
    layout = Layout(2, 2, 2, "dualpipe_v")
    run = Job(layout)
    losses = [run.step(number) for number in range(6)]
    first = Job(layout)
    checkpoints = Checkpoints(ranks.shared_path / "run")
    found = [first.step(number) for number in range(3)]
    checkpoints.save(first.state, step=3, blocking=False)
    found.append(first.step(3))  # while the save goes on
    checkpoints.wait()
    second = Job(layout, seed=7)
    assert checkpoints.load(second.state).same_layout
    assert [*found[:3], *(second.step(number) for number in range(3, 6))] == losses
    assert found[3] == losses[3]
    require_equal(values_of(second.state), values_of(run.state))
    for job in (run, first, second):
        job.pipeline.close()
    checkpoints.close()
