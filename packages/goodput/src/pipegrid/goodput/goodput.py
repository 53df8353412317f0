"""Goodput of a job under failures: which policy pays, and how often to write a checkpoint, by formula and by search."""

from __future__ import annotations

import math
from typing import Annotated

from attrs import field, frozen

from pipegrid.core.fields import checked_arguments, instance
from pipegrid.goodput.durations import GivenPositive
from pipegrid.goodput.simulate import POLICIES, Outcome, Policy, Scenario, simulate
from pipegrid.planner.errors import JobError

_RATIO = 1.5  # between intervals that are tried first
_ROUNDS = 3  # of the search between the neighbours of the best
_TRIED = 8  # intervals in each of them


def young(checkpoint: float, mtbf: float) -> float:
    """Seconds of training between checkpoints by Young's formula (1974): the root of 2 ``checkpoint`` ``mtbf``.

    Examples:
        >>> round(young(checkpoint=30.0, mtbf=43200.0))
        1610
    """
    return math.sqrt(2 * checkpoint * mtbf)


def daly(checkpoint: float, mtbf: float) -> float:
    """Seconds of training between checkpoints by Daly's higher-order formula (2006, equation 37).

    Examples:
        >>> round(daly(checkpoint=30.0, mtbf=43200.0))
        1590
    """
    if checkpoint >= 2 * mtbf:
        return mtbf
    part = checkpoint / (2 * mtbf)
    return young(checkpoint, mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint


def daly_goodput(interval: float, *, checkpoint: float, restart: float, mtbf: float) -> float:
    """The goodput of restarts from a checkpoint after each ``interval`` seconds of training (Daly 2006, equation 20).

    For failures of a Poisson process, also during restarts and checkpoints, and nodes that are replaced at once.

    Examples:
        >>> round(daly_goodput(1590.0, checkpoint=30.0, restart=600.0, mtbf=43200.0), 2)
        0.95
    """
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + checkpoint) / mtbf))


def best_interval(scenario: Scenario, policy: Policy) -> Outcome:
    """The interval with the most goodput, "never" if no other has more: a geometric series, then between the best.

    It is the best for these failures, known beforehand; with few of them another interval may be as good for the next.

    Examples:
        >>> failures = random_failures(8, mtbf="12h", duration="30d")
        >>> scenario = Scenario(Throughput({8: 10.0, 7: 8.0}, batch=64), failures, restart="10m", checkpoint="30s")
        >>> best_interval(scenario, "restart").every
        349
    """
    most = math.floor(scenario.failures.duration / scenario.step)
    tried: dict[int | None, Outcome] = {None: simulate(scenario, policy, None)}
    wanted = [round(_RATIO**power) for power in range(math.ceil(math.log(max(most, 1), _RATIO)) + 1)]
    if scenario.checkpoint and scenario.failures.count:
        wanted.append(round(daly(scenario.checkpoint, scenario.failures.mtbf) / scenario.step))
    for _ in range(_ROUNDS + 1):
        new = [every for every in dict.fromkeys(wanted) if 1 <= every <= most and every not in tried]
        tried |= {every: simulate(scenario, policy, every) for every in new}
        known = sorted(every for every in tried if every is not None)
        if not known:
            break
        at = known.index(max(known, key=lambda every: tried[every].goodput))
        low, high = known[max(at - 1, 0)], known[min(at + 1, len(known) - 1)]
        wanted = [round(low + (high - low) * part / _TRIED) for part in range(1, _TRIED)]
    return max(tried.values(), key=lambda outcome: outcome.goodput)


@frozen
class Goodput:
    """Outcomes of policies in one scenario.

    Attributes:
        scenario: the job and its failures.
        outcomes: the best first.

    Examples:
        >>> failures = random_failures(8, mtbf="12h", duration="30d")
        >>> scenario = Scenario(Throughput({8: 10.0, 7: 8.0}, batch=64), failures, restart="10m", checkpoint="30s")
        >>> goodput(scenario, policies=("restart",), every="1h").best.policy
        'restart'
    """

    scenario: Scenario = field(repr=False)
    outcomes: tuple[Outcome, ...]

    @property
    def best(self) -> Outcome:
        """The outcome with the most goodput."""
        return self.outcomes[0]

    @property
    def daly(self) -> float:
        """Seconds of training between checkpoints by Daly's formula, which is for restarts."""
        return daly(self.scenario.checkpoint, self.scenario.failures.mtbf)


@checked_arguments(JobError)
def goodput(
    scenario: Annotated[Scenario, instance(Scenario, "a Scenario(throughput, failures, restart, checkpoint, ...)")],
    *,
    policies: tuple[Policy, ...] = POLICIES,
    every: GivenPositive | None = None,
) -> Goodput:
    """Simulate a job under failures with each policy.

    Args:
        scenario: the throughput, the failures, and what recovery takes.
        policies: to compare; ``"spare"`` needs a throughput without the spares.
        every: seconds of training between checkpoints, to the next whole step; by default the best for each policy.

    Raises:
        JobError: no policy, or a value outside its rule.

    Examples:
        >>> throughput = Throughput({8: 10.0, 7: 8.0}, batch=64)
        >>> failures = random_failures(8, mtbf="12h", duration="30d")
        >>> found = goodput(Scenario(throughput, failures, restart="10m", checkpoint="30s"))
        >>> found.best.policy, round(found.best.goodput, 2)
        ('re-plan', 0.97)
    """
    if not policies:
        raise JobError(f"policies is empty; name at least one of {', '.join(POLICIES)}")
    outcomes = []
    for policy in dict.fromkeys(policies):
        if policy not in possible(scenario):
            raise JobError(
                f"spares is {scenario.spares}; without them no row of the throughput is left, which begins with "
                f"{scenario.throughput.least} nodes"
            )
        if every is None:
            outcomes.append(best_interval(scenario, policy))
        else:
            outcomes.append(simulate(scenario, policy, max(1, round(float(every) / scenario.step))))
    return Goodput(scenario, tuple(sorted(outcomes, key=lambda outcome: -outcome.goodput)))


def possible(scenario: Scenario) -> tuple[Policy, ...]:
    """The policies that have nodes to train on: not ``"spare"``, where the job trains on all nodes only.

    Examples:
        >>> failures = random_failures(8, mtbf="12h", duration="30d")
        >>> possible(Scenario(Throughput({8: 10.0}, batch=64), failures, restart="10m", checkpoint="30s"))
        ('restart', 're-plan')
    """
    return tuple(policy for policy in POLICIES if scenario.throughput.rate(scenario.places(policy)))
