"""Failures of nodes over time: from a file, or drawn at random with a mean time between them."""

from __future__ import annotations

import csv
import math
import random
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeAlias

from attrs import field, frozen

from pipegrid.core.fields import Index, Name, checked, checked_arguments, checked_fields, instance, integer
from pipegrid.goodput.durations import Duration, DurationOrNever, GivenOrNever, GivenPositive, PositiveDuration
from pipegrid.planner.errors import JobError

MEAN_FAILURES = 1000  # failures of a run that is drawn at random, on average, unless its duration is given
MOST_FAILURES = 1_000_000

Nodes: TypeAlias = Annotated[int, integer(1, 100_000)]  # nodes of a job
_checked = checked_fields(JobError)


@frozen(field_transformer=_checked)
class Outage:
    """A node's outage; seconds since the run began, or texts such as ``"6h"``.

    Attributes:
        node: its name.
        start: when it fails.
        end: when it is back; by default never.

    Examples:
        >>> Outage("node 3", start="6h", end="7h").end
        25200.0
    """

    node: Name
    start: Duration
    end: DurationOrNever = math.inf

    def __attrs_post_init__(self) -> None:
        if self.end < self.start:
            raise JobError(f"node {self.node!r} fails at {self.start:g} s and is back before that, at {self.end:g} s")


@frozen(slots=False, field_transformer=_checked)
class Failures:
    """Outages of nodes in one run.

    Attributes:
        outages: those of one node that overlap count as one.
        duration: of the run; seconds above 0, or a text.

    Examples:
        >>> Failures([Outage("a", 60, 120), Outage("b", "1h")], duration="2h").count
        2
    """

    outages: tuple[Annotated[Outage, instance(Outage, "an Outage(node, start, end)")], ...]
    duration: PositiveDuration
    nodes: tuple[str, ...] = field(init=False, repr=False)

    @nodes.default
    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(outage.node for outage in self.outages))

    @cached_property
    def events(self) -> tuple[tuple[float, bool, int], ...]:
        """Failures and returns by time: the time, False for a failure and True for a return, the index in ``nodes``."""
        away: dict[str, list[tuple[float, float]]] = {node: [] for node in self.nodes}
        for outage in sorted(self.outages, key=lambda outage: outage.start):
            own = away[outage.node]
            start, end = outage.start, outage.end
            if own and start <= own[-1][1]:
                start, end = own[-1][0], max(own.pop()[1], end)
            own.append((start, end))
        found = [
            (time, bool(back), at)
            for at, spans in enumerate(away.values())
            for span in spans
            for back, time in enumerate(span)
        ]
        return tuple(event for event in sorted(found) if event[0] < self.duration)

    @cached_property
    def count(self) -> int:
        """Failures in the run."""
        return sum(not back for _, back, _ in self.events)

    @property
    def mtbf(self) -> float:
        """Mean seconds between failures; infinite without any."""
        return self.duration / self.count if self.count else math.inf


@checked_arguments(JobError)
def random_failures(
    nodes: Nodes,
    *,
    mtbf: GivenPositive,
    repair: GivenOrNever = 3600.0,
    duration: GivenPositive | None = None,
    seed: Index = 0,
) -> Failures:
    """Failures of ``nodes`` nodes, each as likely as the others at any time, independently (a Poisson process).

    Args:
        nodes: their number.
        mtbf: mean time between failures of all nodes together, while all are up.
        repair: time until a node that failed is back (an hour), or ``"never"``.
        duration: of the run; by default 1,000 times ``mtbf``.
        seed: of the random numbers.

    Raises:
        JobError: a value outside its rule, or more than a million failures.

    Examples:
        >>> random_failures(32, mtbf="12h", duration="30d", seed=1).count
        60
    """
    mean, away = float(mtbf), float(repair)
    end = MEAN_FAILURES * mean if duration is None else float(duration)
    if end / mean > MOST_FAILURES:
        raise JobError(
            f"duration is {end:g} s, {end / mean:.3g} times mtbf; at most {MOST_FAILURES} failures are drawn"
        )
    draw, time, outages = random.Random(seed), 0.0, []  # noqa: S311 -- a simulation, no secret
    until = [-1.0] * nodes
    while (time := time + draw.expovariate(1 / mean)) < end:
        node = draw.randrange(nodes)
        if time > until[node]:  # a node that is away does not fail
            until[node] = time + away
            outages.append(Outage(f"node{node}", time, time + away))
    return Failures(tuple(outages), end)


@checked_arguments(JobError)
def read_failures(path: str | Path, *, duration: GivenPositive | None = None) -> Failures:
    r"""Read failures from a CSV file with the columns ``time``, ``node`` and, where nodes return, ``back``.

    Times count from the start of the run: ``6h``, ``1d2h30m``. ``duration``: of the run, by default until the last
    time in the file.

    Raises:
        JobError: the file, the line and what is wrong.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("failures.csv").write_text("time,node,back\n6h,3,8h\n1d2h,5,\n")
        >>> read_failures("failures.csv")
        Failures(outages=(Outage(node='3', start=21600.0, end=28800.0), Outage(node='5', start=93600.0, end=inf)),
        duration=93600.0)
    """
    try:
        lines = list(csv.DictReader(Path(path).read_text(encoding="utf-8-sig").splitlines(), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise JobError(f"{path}: {error}") from None
    outages = [_outage(row, f"{path}:{number}") for number, row in enumerate(lines, 2)]
    times = [time for outage in outages for time in (outage.start, outage.end) if time < math.inf]
    if duration is None and not times:
        raise JobError(f"{path}: no failures; give the duration of the run")
    return Failures(tuple(outages), max(times) if duration is None else float(duration))


def _outage(row: dict[str | None, str | None], where: str) -> Outage:
    cells = {(name or "").strip(): (cell or "").strip() for name, cell in row.items() if name is not None}
    if None in row or not {"time", "node"} <= set(cells) <= {"time", "node", "back"}:
        raise JobError(
            f"{where}: the columns are {', '.join(cells)}; they must be time, node and, if nodes return, back"
        )
    try:
        start = checked(cells["time"], Duration, "time", JobError)
        return Outage(cells["node"], start, checked(cells.get("back") or "never", DurationOrNever, "back", JobError))
    except JobError as error:
        raise JobError(f"{where}: {error}") from None
