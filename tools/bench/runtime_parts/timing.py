"""Steps of several runners by turns, so that all of them see the machine in the same moods."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from attrs import frozen

from runtime_parts.runners import Runner
from runtime_parts.table import meets, number, pair_ratios, shown, spread_against


class RunnerError(RuntimeError):
    """A runner failed on this rank or another one; its ranks are out of step, so that it cannot go on."""


def timed(runner: Runner) -> float:
    """Seconds from a common start to the end of this rank's step.

    Raises:
        RunnerError: the step failed on some rank, on all of them.
    """
    dist.barrier()
    failure: Exception | None = None
    start = time.perf_counter()
    try:
        runner.step()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 -- the peer's own failures are what is reported
        failure = error
    elapsed = time.perf_counter() - start
    flag = torch.tensor(0 if failure is None else 1)
    dist.all_reduce(flag)
    if flag:
        text = "another rank failed" if failure is None else f"{type(failure).__name__}: {failure}"
        raise RunnerError(text) from failure
    return elapsed


def by_turns(
    runners: Mapping[str, Runner], rounds: int, *, before: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Per runner, the seconds of each of its ``rounds`` steps on this rank; in every round another one goes first."""
    names = list(runners)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            before()
            seconds[name].append(timed(runners[name]))
    return seconds


@frozen
class Outcome:
    """What one rank reports of one row.

    Attributes:
        seconds: per runner, of each step on this rank.
        notes: per runner, why it did not run, or what is wrong with its result.
    """

    seconds: Mapping[str, Sequence[float]]
    notes: Mapping[str, str]


def steps(outcomes: Sequence[Outcome], name: str) -> list[float]:
    """Seconds of each step of a runner: a step is over when the slowest rank has ended it. Empty where it did not run.

    ``outcomes``: one per rank.
    """
    return [max(column) for column in zip(*(outcome.seconds.get(name, ()) for outcome in outcomes), strict=True)]


def notes(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Per runner, the most telling note of any rank."""
    found: dict[str, str] = {}
    for outcome in outcomes:
        for name, note in outcome.notes.items():
            if name not in found or found[name].startswith("another rank"):
                found[name] = note
    return found


def pair_report(
    name: str, outcomes: Sequence[Outcome | None], pair: tuple[str, str], bound: float, *, unit: float, digits: int = 1
) -> tuple[bool, list[str]]:
    """Of two runners: whether the ratio of their steps holds ``bound``, and the line of the row with its notes.

    ``name``: of the row. ``unit``: what a second is multiplied by.
    """
    found = [outcome for outcome in outcomes if outcome is not None]
    if not found:
        return True, []
    remarks = notes(found)
    ours, theirs = (steps(found, runner) for runner in pair)
    ratios = pair_ratios(ours, theirs)
    cells = "".join(number(unit * statistics.median(times), digits=digits) for times in (ours, theirs))
    line = f"  {name:<18}{cells}{spread_against(ratios, bound)}"
    return meets(ratios, bound) and not remarks, [line, *shown(remarks)]
