"""What a picture of a schedule is made of: rows, spans on them, flows between them.

The same data is drawn by `write_svg`, `write_perfetto` and `ascii_timeline`, wherever it came from: a plan, a
simulation of it, or the clock of a real run.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from attrs import evolve, field, frozen

from pipegrid.schedules.arguments import as_number, is_integer, require, require_integer, require_items, shown

COMPUTE_KINDS = ("F", "B", "I", "W")
"""Kinds that count as work; everything else on a row counts as bubble."""

TRANSFER_KINDS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""Kinds that travel beside the work of a row, and are drawn beside it."""


class TimelineError(ValueError):
    """Rows, spans or flows that do not fit together."""


@frozen
class Span:
    """Something that row ``row`` does from ``start`` to ``end``, in the timeline's unit of time.

    ``kind`` is an action's (``"F"``, ``"W"``, ``"SEND_F"``, ``"REDUCE"``, ...) or any other word (``"data"``,
    ``"optimizer"``); kinds that are no action's are drawn in a neutral colour, with ``label``.
    """

    row: int
    start: float
    end: float
    kind: str
    stage: int | None = None
    microbatch: int | None = None
    label: str = ""

    def __attrs_post_init__(self) -> None:
        if not is_integer(self.row):
            raise TimelineError(f"row is {shown(self.row)}; rows are numbered from 0")
        require("kind", self.kind, str, "name what was done, for example 'F'", error=TimelineError)
        if not self.kind:
            raise TimelineError(f"a span on row {self.row} has no kind; name what was done, for example 'F'")
        for name, time in (("start", self.start), ("end", self.end)):
            if type(time) is not float and type(time) is not int:  # that it is finite is said below, with both
                as_number(name, time, f"give a time in the timeline's unit for {self.name}", error=TimelineError)
        if not (math.isfinite(self.start) and math.isfinite(self.end) and self.start <= self.end):
            raise TimelineError(
                f"{self.name} on row {self.row} goes from {self.start} to {self.end}; both must be "
                "finite, and the end not before the start"
            )

    @property
    def duration(self) -> float:
        """``end - start``."""
        return self.end - self.start

    @property
    def is_compute(self) -> bool:
        """Whether this is work (and not a bubble with a name)."""
        return self.kind in COMPUTE_KINDS

    @property
    def is_transfer(self) -> bool:
        """Whether this is a tensor on its way, which overlaps with work."""
        return self.kind in TRANSFER_KINDS

    @property
    def name(self) -> str:
        """The label, or the action as a plan writes it: stage, kind, microbatch (``2F7``)."""
        if self.label:
            return self.label
        stage, microbatch = ("" if number is None else str(number) for number in (self.stage, self.microbatch))
        return f"{stage}{self.kind}{microbatch}"


@frozen
class Flow:
    """A tensor that span ``source`` sends and span ``destination`` receives (indices into the spans)."""

    source: int
    destination: int

    def __attrs_post_init__(self) -> None:
        for name, span in (("source", self.source), ("destination", self.destination)):
            require_integer(name, span, "give a span's place among the spans", least=0, error=TimelineError)


def _points(value: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    remedy = "give a list of (time, value)"
    points = require_items("points", value, tuple, remedy, error=TimelineError)
    for index, point in enumerate(points):
        if len(point) != 2 or not all(isinstance(number, (int, float)) for number in point):
            raise TimelineError(f"item {index} of points is {shown(point)}; {remedy}")
    return points


@frozen
class Counter:
    """A quantity of row ``row`` over time, such as its live activations: ``(time, value from then on)``."""

    row: int
    name: str
    points: tuple[tuple[float, float], ...] = field(converter=_points)

    def __attrs_post_init__(self) -> None:
        require_integer("row", self.row, "rows are numbered from 0", least=0, error=TimelineError)
        require("name", self.name, str, "name what is counted", error=TimelineError)
        times = [time for time, _ in self.points]
        if any(later < earlier for earlier, later in itertools.pairwise(times)):
            raise TimelineError(f"the points of counter {self.name!r} on row {self.row} go back in time")

    @property
    def peak(self) -> float:
        """The largest value; 0 without points."""
        return max((value for _, value in self.points), default=0.0)


# attrs wants a named function as a converter, so each field has its own.
def _rows(value: Iterable[str]) -> tuple[str, ...]:
    return require_items("rows", value, str, "give a list of the rows' names", error=TimelineError)


def _spans(value: Iterable[Span]) -> tuple[Span, ...]:
    return require_items("spans", value, Span, "give a list of Spans", error=TimelineError)


def _flows(value: Iterable[Flow]) -> tuple[Flow, ...]:
    return require_items("flows", value, Flow, "give a list of Flows", error=TimelineError)


def _counters(value: Iterable[Counter]) -> tuple[Counter, ...]:
    return require_items("counters", value, Counter, "give a list of Counters", error=TimelineError)


def _notes(value: Iterable[str]) -> tuple[str, ...]:
    return require_items("notes", value, str, "give a list of short texts, one for each row", error=TimelineError)


@frozen(slots=False)
class Timeline:
    """Rows with names, what happened on each, and which span's tensor went to which.

    ``unit`` is the unit of time, ``"s"`` for a clock's seconds; without one, times are multiples of whatever
    the costs were given in. ``notes`` holds one short text per row, or nothing. ``title`` heads the picture.

    Raises:
        TimelineError: a span, flow, counter or note for which there is no row or span.
    """

    rows: tuple[str, ...] = field(converter=_rows)
    spans: tuple[Span, ...] = field(converter=_spans)
    flows: tuple[Flow, ...] = field(converter=_flows, default=())
    counters: tuple[Counter, ...] = field(converter=_counters, default=())
    notes: tuple[str, ...] = field(converter=_notes, default=())
    title: str = ""
    unit: str = ""

    def __attrs_post_init__(self) -> None:
        count = len(self.rows)
        placed = [(span.name, span.row) for span in self.spans]
        placed += [(counter.name, counter.row) for counter in self.counters]
        for name, row in placed:
            if not 0 <= row < count:
                raise TimelineError(f"{name!r} is on row {row}; the timeline has {count} rows, numbered from 0")
        for flow in self.flows:
            if not (0 <= flow.source < len(self.spans) and 0 <= flow.destination < len(self.spans)):
                raise TimelineError(f"{flow} names a span that is not among the {len(self.spans)} given")
        if self.notes and len(self.notes) != count:
            raise TimelineError(f"{len(self.notes)} notes for {count} rows; give one for each row, or none")

    @cached_property
    def start(self) -> float:
        """When the first span starts; 0 without spans."""
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last span ends; 0 without spans."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return self.end - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per row, the time in which it computes (overlapping work counts once)."""
        covered = [0.0] * len(self.rows)
        until = [-math.inf] * len(self.rows)
        for span in sorted((span for span in self.spans if span.is_compute), key=lambda span: span.start):
            covered[span.row] += max(0.0, span.end - max(span.start, until[span.row]))
            until[span.row] = max(until[span.row], span.end)
        return tuple(covered)

    @property
    def bubble(self) -> float:
        """The share of rows x makespan in which no work is done, between 0 and 1; 0 without spans."""
        whole = self.makespan * len(self.rows)
        return 1.0 - sum(self.busy) / whole if whole > 0 else 0.0

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Per row, the stages that work on it, ascending."""
        found: list[set[int]] = [set() for _ in self.rows]
        for span in self.spans:
            if span.stage is not None and span.is_compute:
                found[span.row].add(span.stage)
        return tuple(tuple(sorted(stages)) for stages in found)

    def on_row(self, row: int) -> tuple[Span, ...]:
        """The spans of ``row``, by start.

        Raises:
            TimelineError: there is no such row.
        """
        if not is_integer(row) or row >= len(self.rows):
            raise TimelineError(f"there is no row {shown(row)}; the timeline has {len(self.rows)} rows, from 0")
        return tuple(sorted((span for span in self.spans if span.row == row), key=lambda span: span.start))


def scaled(timeline: Timeline, factor: float, *, unit: str) -> Timeline:
    """``timeline`` from 0 on, with every time multiplied by ``factor``: a plan in measured seconds.

    Raises:
        TimelineError: no timeline, or a factor that is negative or no number.
    """
    require("timeline", timeline, Timeline, "give timeline(...) of what is to be drawn", error=TimelineError)
    remedy = "give the measured seconds per unit of the plan's costs, a number above 0"
    factor = as_number("factor", factor, remedy, above=0.0, error=TimelineError)
    zero = timeline.start

    def at(time: float) -> float:
        return (time - zero) * factor

    def moved(counter: Counter) -> Counter:
        return evolve(counter, points=tuple((at(time), value) for time, value in counter.points))

    return evolve(
        timeline,
        unit=unit,
        spans=tuple(evolve(span, start=at(span.start), end=at(span.end)) for span in timeline.spans),
        counters=tuple(moved(counter) for counter in timeline.counters),
    )


def as_panels(timeline: Timeline | Sequence[Timeline]) -> tuple[Timeline, ...]:
    """One timeline, or several to be drawn together, as a tuple.

    Raises:
        TimelineError: none, or something else.
    """
    remedy = "give timeline(...) of a plan, a simulation or a recording, or a list of them"
    panels = (
        (timeline,)
        if isinstance(timeline, Timeline)
        else require_items("timeline", timeline, Timeline, remedy, error=TimelineError)
    )
    if not panels:
        raise TimelineError("there is no timeline to draw; give at least one")
    return panels


def as_path(path: str | os.PathLike[str]) -> Path:
    """Where to write a picture.

    Raises:
        TimelineError: no path.
    """
    require("path", path, (str, os.PathLike), "give the path of the file to write", error=TimelineError)
    return Path(path)


def amount(value: float) -> str:
    """A number as people write it: up to four significant digits, no trailing zeros."""
    text = f"{value:.4g}"
    return f"{value:.0f}" if "e" in text and abs(value) >= 1 else text


def time_text(value: float, unit: str, *, like: float | None = None) -> str:
    """A time with its unit; seconds in the decimal multiple that suits ``like`` (by default: the value)."""
    if value == 0:
        return "0"
    if unit != "s":
        return f"{amount(value)} {unit}".rstrip()
    size = abs(value if like is None else like)
    factor, name = next((pair for pair in ((1.0, "s"), (1e-3, "ms")) if size >= pair[0]), (1e-6, "µs"))
    return f"{amount(value / factor)} {name}"


def summary(timeline: Timeline) -> str:
    """The figures that a picture is read for: makespan, bubble and, where it was counted, the peak."""
    parts = [
        f"makespan {time_text(timeline.makespan, timeline.unit)}",
        f"bubble {100 * timeline.bubble:.1f}%",
    ]
    if timeline.counters:
        name = timeline.counters[0].name
        peak = max(counter.peak for counter in timeline.counters if counter.name == name)
        parts.append(f"peak {name} {amount(peak)}")
    return " · ".join(parts)
