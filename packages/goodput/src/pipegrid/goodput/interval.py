"""Intervals between checkpoints: by formula (Young, Daly), and the best one of a scenario by search."""

from __future__ import annotations

import math

from pipegrid.core.fields import Amount, Seconds, checked_arguments
from pipegrid.goodput.simulate import Outcome, Policy, Scenario, simulate
from pipegrid.planner.errors import JobError

_RATIO = 1.5  # between intervals that are tried first
_ROUNDS = 3  # of the search between the neighbours of the best
_TRIED = 8  # intervals in each of them


@checked_arguments(JobError, kinds=True)
def young(checkpoint: Amount, mtbf: Seconds) -> float:
    """Seconds of training between checkpoints by Young's formula (1974): the root of 2 ``checkpoint`` ``mtbf``.

    Examples:
        >>> round(young(checkpoint=30.0, mtbf=43200.0))
        1610
    """
    return math.sqrt(2 * checkpoint * mtbf)


@checked_arguments(JobError, kinds=True)
def daly(checkpoint: Amount, mtbf: Seconds) -> float:
    """Seconds of training between checkpoints by Daly's higher-order formula (2006, equation 37).

    Examples:
        >>> round(daly(checkpoint=30.0, mtbf=43200.0))
        1590
    """
    if checkpoint >= 2 * mtbf:
        return mtbf
    part = checkpoint / (2 * mtbf)
    return young(checkpoint, mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint


@checked_arguments(JobError, kinds=True)
def daly_goodput(interval: Seconds, *, checkpoint: Amount, restart: Amount, mtbf: Seconds) -> float:
    """The goodput of restarts from a checkpoint after each ``interval`` seconds of training (Daly 2006, equation 20).

    For failures of a Poisson process, also during restarts and checkpoints, and nodes that are replaced at once.

    Examples:
        >>> round(daly_goodput(1590.0, checkpoint=30.0, restart=600.0, mtbf=43200.0), 2)
        0.95
    """
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + checkpoint) / mtbf))


@checked_arguments(JobError, kinds=True)
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
