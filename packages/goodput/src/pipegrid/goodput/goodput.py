"""Goodput of a job under failures: which policy pays, and how often to write a checkpoint."""

from __future__ import annotations

from typing import Annotated

from attrs import field, frozen

from pipegrid.core.fields import checked_arguments, instance
from pipegrid.goodput.durations import GivenPositive
from pipegrid.goodput.interval import best_interval, daly
from pipegrid.goodput.simulate import POLICIES, Outcome, Policy, Scenario, simulate
from pipegrid.planner.errors import JobError


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


@checked_arguments(JobError, kinds=True)
def possible(scenario: Scenario) -> tuple[Policy, ...]:
    """The policies that have nodes to train on: not ``"spare"``, where the job trains on all nodes only.

    Examples:
        >>> failures = random_failures(8, mtbf="12h", duration="30d")
        >>> possible(Scenario(Throughput({8: 10.0}, batch=64), failures, restart="10m", checkpoint="30s"))
        ('restart', 're-plan')
    """
    return tuple(policy for policy in POLICIES if scenario.throughput.rate(scenario.places(policy)))
