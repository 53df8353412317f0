"""Slow ranks: named after some steps in a row, from what all ranks measured, and never for one noisy step."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Action, ActionKind, Actor
from pipegrid.schedules import Routes, UnitTimes, measured_speeds, reroute, slow_ranks
from pipegrid.schedules.speeds import UnitSeconds
from pipegrid.transport import streams


def measured(by_actor, steps=10):
    """Ranks of a 2-dimensional job in order, each with the same seconds in every step, or a list of them."""
    return [
        UnitSeconds(rank, Actor(*actor), seconds if isinstance(seconds, list) else [seconds] * steps)
        for rank, (actor, seconds) in enumerate(by_actor.items())
    ]


def test_a_rank_that_is_slow_in_every_step_is_named_with_its_factor():
    ranks = measured({(0, 0): 1.0, (0, 1): 1.0, (1, 0): 3.0, (1, 1): 5.4, (1, 2): 3.0})
    (slow,) = slow_ranks(ranks)
    assert (slow.rank, slow.actor, slow.factor) == (3, Actor(1, 1), pytest.approx(1.8))
    assert str(slow) == (
        "rank 3 (position 1 of replica 1) computes 1.80 times slower than its peers, in each of the last 10 steps"
    )
    assert measured_speeds([slow]) == {Actor(1, 1): pytest.approx(1 / 1.8)}


def test_one_step_that_is_not_slow_clears_a_rank():
    assert slow_ranks(measured({(0, 0): 1.0, (0, 1): [4.0] * 9 + [1.2]})) == ()
    assert slow_ranks(measured({(0, 0): 1.0, (0, 1): [4.0] * 9 + [1.5]}))


def test_a_rank_alone_on_its_position_is_measured_against_planned_seconds():
    ranks = measured({(0, 0): 1.0, (1, 0): 2.0})
    assert slow_ranks(ranks) == ()
    (slow,) = slow_ranks(ranks, planned={0: 1.0, 1: 1.25})
    assert slow.rank == 1
    assert "1.60 times slower than planned" in str(slow)


def test_ranks_that_computed_nothing_are_neither_slow_nor_a_measure():
    assert slow_ranks(measured({(0, 0): 0.0, (0, 1): 1.0, (0, 2): 1.0})) == ()
    (slow,) = slow_ranks(measured({(0, 0): 0.0, (0, 1): 1.0, (0, 2): 2.0}))
    assert slow.rank == 2


def test_of_the_ranks_of_an_actor_the_slow_one_is_named():
    ranks = [UnitSeconds(rank, Actor(0, rank // 2), [3.0 if rank == 1 else 1.0] * 10) for rank in range(4)]
    (slow,) = slow_ranks(ranks)
    assert slow.rank == 1
    assert measured_speeds([slow]) == {Actor(0, 0): pytest.approx(1 / 3)}


def test_units_leave_a_slow_rank_and_return():
    home = Routes.identity(4, 8)
    ranks = measured({(position, replica): 1.0 for position in range(2) for replica in range(4)})
    ranks[6] = UnitSeconds(6, Actor(1, 2), [2.0] * 10)
    moved = reroute(home, speeds=measured_speeds(slow_ranks(ranks)))
    counts = [sum(moved.of(unit, 1) == replica for unit in range(32)) for replica in range(4)]
    assert counts == [9, 9, 5, 9]
    assert all(move.stage == 1 for move in moved.moves)
    assert reroute(home, speeds=measured_speeds(())) == home


@pytest.mark.parametrize(
    ("ranks", "options", "rule"),
    [
        (measured({(0, 0): 1.0, (0, 1): 2.0}), {"limit": 1.0}, "above 1"),
        (measured({(0, 0): 1.0, (0, 1): [2.0] * 3}), {}, "different numbers of steps"),
        (measured({(0, 0): 1.0}), {"limit": math.inf}, "limit"),
    ],
)
def test_bad_arguments_are_named(ranks, options, rule):
    with pytest.raises(PlanError, match=rule):
        slow_ranks(ranks, **options)


@given(seed=st.integers(0, 10**6))
@settings(deadline=None)
def test_noise_below_the_limit_names_nobody_and_a_constant_factor_above_it_names_exactly_its_ranks(seed):
    rng = random.Random(seed)
    positions, replicas = rng.randint(1, 4), rng.randint(3, 6)
    base = [rng.uniform(0.1, 10.0) for _ in range(positions)]
    actors = [(position, replica) for position in range(positions) for replica in range(replicas)]
    # Fewer than half of a position, or what is usual there is slow.
    slow = {(position, 0) for position in range(positions) if rng.random() < 0.5}
    ranks = measured(
        {
            actor: [base[actor[0]] * rng.uniform(1.0, 1.2) * (2.0 if actor in slow else 1.0) for _ in range(10)]
            for actor in actors
        }
    )
    assert {each.actor for each in slow_ranks(ranks)} == {Actor(*actor) for actor in slow}


# Measuring


def run(times, action, clock, seconds):
    times.before(action)
    clock[0] += seconds
    times.after(action)


def test_a_unit_is_the_sum_of_its_computes_whatever_their_number():
    clock = [0.0]
    times = UnitTimes(Actor(0, 0), steps=2, clock=lambda: clock[0])
    for units in (1, 3):
        for unit in range(units):
            run(times, Action(ActionKind.F, 0, unit), clock, 1.0 + unit)
            clock[0] += 100.0  # a wait between actions
            run(times, Action(ActionKind.B, 0, unit), clock, 2.0)
        times.end_step()
    times.end_step()  # nothing ran
    assert times.seconds() == (4.0, 0.0)


class DeviceEvent:
    """An event of a device that has done what comes before it only once the host has waited."""

    def __init__(self, at):
        self.at, self.waited = at, False

    def synchronize(self):
        self.waited = True

    def elapsed_time(self, end):
        assert end.waited
        return (end.at - self.at) * 1000.0  # milliseconds, as torch


def test_on_a_device_with_streams_its_own_time_counts(monkeypatch):
    clock = iter([1.0, 4.0, 10.0, 15.0])
    monkeypatch.setattr(streams, "types", frozenset({"cpu"}))
    monkeypatch.setattr(streams, "timed_mark", lambda device: DeviceEvent(next(clock)))
    times = UnitTimes(Actor(0, 0), device=torch.device("cpu"), steps=1)
    for unit in range(2):
        times.before(Action(ActionKind.F, 0, unit))
        times.after(Action(ActionKind.F, 0, unit))
    times.end_step()
    assert times.seconds() == (4.0,)


@pytest.mark.ranks(3)
def test_every_rank_hears_which_one_is_slow(ranks):
    clock = [0.0]
    times = UnitTimes(Actor(0, ranks.rank), steps=3, clock=lambda: clock[0])
    for _ in range(3):
        assert times.slow(dist.group.WORLD) == ()
        for unit in range(4):
            action = Action(ActionKind.F, 0, unit)
            run(times, action, clock, 2.0 if ranks.rank == 1 else 1.0)
        times.end_step()
    assert [(each.rank, each.actor) for each in times.slow(dist.group.WORLD)] == [(1, Actor(0, 1))]
