"""Ranks that compute slower than planned, named from what all ranks measured. Nothing ends them. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median, median_low
from typing import TypeAlias

from attrs import field, frozen

from pipegrid.core.fields import Amount, Index, Seconds, checked, checked_fields
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan.routes import Actor

Planned: TypeAlias = Mapping[int, float] | None
"""Per position, the seconds that one unit is planned to take there."""


@frozen(field_transformer=checked_fields(PlanError))
class UnitSeconds:
    """What a rank measured: per step, the seconds of one unit, its computes of all stages there; 0 without any."""

    rank: Index
    actor: Actor
    steps: tuple[Amount, ...] = field(converter=tuple[Amount, ...])


@frozen
class SlowRank:
    """A rank that was slower than planned in each of the last ``steps`` steps.

    Attributes:
        rank: whose computes these are.
        actor: its position and replica.
        factor: how many times slower, the median of these steps.
        steps: how many.
        peers: whether its peers are what it is measured against, else the planned seconds.
    """

    rank: int
    actor: Actor
    factor: float
    steps: int
    peers: bool

    def __str__(self) -> str:
        against = "its peers" if self.peers else "planned"
        return (
            f"rank {self.rank} (position {self.actor.position} of replica {self.actor.replica}) computes "
            f"{self.factor:.2f} times slower than {against}, in each of the last {self.steps} steps"
        )


def slow_ranks(measured: Sequence[UnitSeconds], *, limit: float = 1.5, planned: Planned = None) -> tuple[SlowRank, ...]:
    """The ranks that took ``limit`` times what is planned, or longer, in every step that was measured, ascending.

    Ranks of one position run the same stages, so what a position is planned to take is what its replicas take: of each
    step the lower median over them, so that of two replicas the faster one counts. ``planned`` seconds replace that;
    without them a position of one replica has no peers, and is not judged. A rank that computed nothing in a step is
    neither slow nor a measure. A single step that is not slow clears a rank, which keeps noise out. A function of its
    arguments alone: the same on every rank.

    Args:
        measured: of all ranks, for the same steps.
        limit: times slower, above 1.
        planned: seconds of one unit, per position.

    Raises:
        PlanError: a limit of 1 or less; ranks that measured different numbers of steps.
    """
    limit = checked(limit, Seconds, "limit", PlanError)
    if limit <= 1.0:
        raise PlanError(f"limit is {limit}; a rank is slow from some factor above 1 on")
    counts = {each.rank: len(each.steps) for each in measured}
    if len(set(counts.values())) > 1:
        raise PlanError(f"ranks measured different numbers of steps ({counts}); end_step() is called after each step")
    # The ranks of an actor (tp, cp) wait for each other inside a compute: it is as slow as its slowest.
    actors: dict[int, dict[int, Sequence[float]]] = defaultdict(dict)
    for each in measured:
        others = actors[each.actor.position].get(each.actor.replica, each.steps)
        actors[each.actor.position][each.actor.replica] = [*map(max, zip(others, each.steps, strict=True))]
    found = []
    for each in sorted(measured, key=lambda each: each.rank):
        position, replicas = each.actor.position, actors[each.actor.position]
        expected = (planned or {}).get(position)
        if expected is None and len(replicas) == 1:
            continue
        usual = [
            median_low([seconds for seconds in step if seconds] or [0.0]) if expected is None else expected
            for step in zip(*replicas.values(), strict=True)
        ]
        factors = [seconds / normal if normal else 0.0 for seconds, normal in zip(each.steps, usual, strict=True)]
        if factors and min(factors) >= limit:
            found.append(SlowRank(each.rank, each.actor, median(factors), len(factors), expected is None))
    return tuple(found)


def measured_speeds(slow: Sequence[SlowRank]) -> dict[Actor, float]:
    """The ``speeds`` of `reroute` by which units leave slow ranks: of an actor, that of its slowest rank."""
    speeds: dict[Actor, float] = {}
    for each in slow:
        speeds[each.actor] = min(1.0 / each.factor, speeds.get(each.actor, 1.0))
    return speeds
