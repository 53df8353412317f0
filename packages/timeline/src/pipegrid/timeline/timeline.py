"""Timelines: rows, spans on them, and flows between spans; the data that every writer draws.

`write_svg`, `write_html`, `write_perfetto` and `ascii_timeline` draw the same data, of a plan, of a simulation or of
the clock of a real run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, TypeAlias

from attrs import evolve, field, frozen

from pipegrid.core.fields import Amount, Index, Name, Rule, Seconds, checked, checked_arguments, checked_fields, shown
from pipegrid.timeline.kinds import BEHIND, COMPUTE_KINDS, STUCK, TRANSFER_KINDS
from pipegrid.timeline.recording import Time, TimelineError

Note: TypeAlias = Annotated[str, Rule(str, "a text")]


@frozen(field_transformer=checked_fields(TimelineError))
class Span:
    """An activity of a row, in the timeline's unit of time.

    Attributes:
        row: the index of the row.
        start: when it starts.
        end: when it ends.
        kind: the kind of an action (``"F"``, ``"W"``, ``"SEND_F"``, ``"REDUCE"``, ...) or any other word (``"data"``,
            ``"optimizer"``), which is drawn in a neutral colour, with ``label``.
        stage: of the action.
        microbatch: of the action.
        label: the text of a span that is no action.
        slice: of the action.
        memory: bytes that it left allocated, as recorded.
        home: the replica whose microbatch it is, where that is not the row's own.

    Examples:
        >>> Span(row=0, start=0.0, end=1.5, kind="F", stage=2, microbatch=7).name
        '2F7'
    """

    row: Index
    start: Time
    end: Time
    kind: Name
    stage: int | None = None
    microbatch: int | None = None
    label: str = ""
    slice: int | None = None
    memory: int | None = None
    home: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.start > self.end:
            raise TimelineError(f"{self.name} on row {self.row} starts at {self.start} and ends before, at {self.end}")

    @property
    def duration(self) -> float:
        """``end - start``."""
        return self.end - self.start

    @property
    def is_compute(self) -> bool:
        """Whether the span is work; any other counts as bubble."""
        return self.kind in COMPUTE_KINDS

    @property
    def is_transfer(self) -> bool:
        """Whether the span is a transfer of a tensor or of parameters, which overlaps with work."""
        return self.kind in TRANSFER_KINDS

    @property
    def name(self) -> str:
        """The label, or the action: stage, kind, microbatch and slice (``2F7``, ``2F7.1``, ``2F7@1`` of replica 1)."""
        return self.label or f"{'' if self.stage is None else self.stage}{self.kind}{self.number}"

    @property
    def number(self) -> str:
        """The microbatch, after a dot its slice, after an @ its home if that is another replica; empty without."""
        microbatch = "" if self.microbatch is None else str(self.microbatch)
        part = "" if self.slice is None else f".{self.slice}"
        return f"{microbatch}{part}" if self.home is None else f"{microbatch}{part}@{self.home}"


@frozen(field_transformer=checked_fields(TimelineError))
class Flow:
    """A tensor that one span sends and another receives.

    Attributes:
        source: the index of the span that sends.
        destination: the index of the span that receives.
        bytes: of the tensor.

    Examples:
        >>> spans = [Span(0, 0.0, 1.0, "SEND_F"), Span(1, 0.5, 1.0, "RECV_F")]
        >>> Timeline(["gpu 0", "gpu 1"], spans, [Flow(0, 1)]).flows[0].bytes is None
        True
    """

    source: Index
    destination: Index
    bytes: Amount | None = None


def _points(value: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple((checked(time, Time, "a time of Counter.points", TimelineError), amount) for time, amount in value)


@frozen(field_transformer=checked_fields(TimelineError))
class Counter:
    """A quantity of a row over time, such as its live activations.

    Attributes:
        row: the index of the row.
        name: of the quantity.
        points: ``(time, value from then on)``.

    Examples:
        >>> Counter(row=0, name="live", points=[(0.0, 1), (1.0, 2), (3.0, 0)]).peak
        2
    """

    row: Index
    name: Name
    points: tuple[tuple[float, float], ...] = field(converter=_points)

    def __attrs_post_init__(self) -> None:
        if any(later[0] < earlier[0] for earlier, later in itertools.pairwise(self.points)):
            raise TimelineError(f"the points of counter {self.name!r} on row {self.row} go back in time")

    @property
    def peak(self) -> float:
        """The largest value; 0 without points."""
        return max((value for _, value in self.points), default=0.0)


def _texts(value: Iterable[str]) -> Iterable[str]:
    return value if isinstance(value, str) else tuple(value)  # a single string is left to the check


@frozen(slots=False, field_transformer=checked_fields(TimelineError))
class Timeline:
    """Named rows, the spans on them, and the flows between spans.

    Attributes:
        rows: their names.
        spans: activities of rows.
        flows: tensors between spans.
        counters: quantities of rows over time.
        notes: one short text per row, or nothing.
        title: heads the picture.
        unit: of time, ``"s"`` for a clock's seconds; without one, times are multiples of the unit of the costs.
        replicas: the replica of each row where replicas act apart (a plan with routes), or nothing.

    Examples:
        >>> drawn = Timeline(rows=["gpu 0"], spans=[Span(0, 0.0, 1.5, "F"), Span(0, 2.0, 4.0, "B")])
        >>> drawn.makespan, drawn.bubble
        (4.0, 0.125)
    """

    rows: tuple[Name, ...] = field(converter=_texts)
    spans: tuple[Span, ...] = field(converter=tuple[Span, ...])
    flows: tuple[Flow, ...] = field(converter=tuple[Flow, ...], default=())
    counters: tuple[Counter, ...] = field(converter=tuple[Counter, ...], default=())
    notes: tuple[Note, ...] = field(converter=_texts, default=())
    title: str = ""
    unit: str = ""
    replicas: tuple[Index, ...] = field(converter=tuple[int, ...], default=())

    def __attrs_post_init__(self) -> None:
        count = len(self.rows)
        placed: list[Span | Counter] = [*self.spans, *self.counters]
        for one in placed:
            if one.row >= count:
                raise TimelineError(f"{one.name!r} is on row {one.row}; the timeline has {count} rows, numbered from 0")
        ends = [end for flow in self.flows for end in (flow.source, flow.destination)]
        if max(ends, default=-1) >= len(self.spans):
            raise TimelineError(f"a flow names span {max(ends)}; the timeline has {len(self.spans)} spans, from 0")
        for what, given in (("notes", self.notes), ("replicas", self.replicas)):
            if len(given) not in (0, count):
                raise TimelineError(f"there are {len(given)} {what} for {count} rows; give one for each, or none")

    @cached_property
    def start(self) -> float:
        """Start of the first span; 0 without spans."""
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def end(self) -> float:
        """End of the last span; 0 without spans."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return self.end - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time in which each row computes (overlapping work counts once)."""
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
        """The stages that work on each row, ascending."""
        found: list[set[int]] = [set() for _ in self.rows]
        for span in self.spans:
            if span.stage is not None and span.is_compute:
                found[span.row].add(span.stage)
        return tuple(tuple(sorted(stages)) for stages in found)

    @cached_property
    def shares(self) -> dict[Span, tuple[float, float]]:
        """The part of its row's height, from 0 at the top to 1, of each span of work that overlaps others there."""
        found: dict[Span, tuple[float, float]] = {}
        least = 1e-9 * self.makespan  # an end and the start after it may differ by rounding
        rows: list[list[Span]] = [[] for _ in self.rows]
        for span in self.spans:
            if not span.is_transfer and span.duration > 0:
                rows[span.row].append(span)
        for spans in rows:
            group: list[tuple[Span, int]] = []  # those that overlap, each with its lane
            ends: list[float] = []  # of lanes
            for one in (*sorted(spans, key=lambda span: (span.start, span.end)), None):
                if one is None or one.start >= max(ends, default=-math.inf) - least:
                    if len(ends) > 1:
                        found |= {each: (lane / len(ends), (lane + 1) / len(ends)) for each, lane in group}
                    group, ends = [], []
                if one is not None:
                    lane = next((lane for lane, end in enumerate(ends) if end <= one.start + least), len(ends))
                    ends[lane : lane + 1] = [one.end]
                    group.append((one, lane))
        return found

    def on_row(self, row: int) -> tuple[Span, ...]:
        """The spans of ``row``, by start."""
        if row not in range(len(self.rows)):
            raise TimelineError(f"there is no row {shown(row)}; the timeline has {len(self.rows)} rows, from 0")
        return tuple(sorted((span for span in self.spans if span.row == row), key=lambda span: span.start))


@checked_arguments(TimelineError)
def scaled(timeline: Timeline, factor: Seconds, *, unit: str) -> Timeline:
    """``timeline`` from 0 on, with every time multiplied by ``factor``: a plan in measured seconds.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> scaled(timeline(gpipe(2, 2)), 0.010, unit="s").makespan
        0.09
    """

    def at(time: float) -> float:
        return (time - timeline.start) * factor

    counters = [evolve(one, points=[(at(time), value) for time, value in one.points]) for one in timeline.counters]
    spans = [evolve(span, start=at(span.start), end=at(span.end)) for span in timeline.spans]
    return evolve(timeline, unit=unit, spans=spans, counters=counters)


def stage_place(timeline: Timeline, span: Span) -> int:
    """The place of the span's stage among those that work on its row, from 0; 0 if it is none of them."""
    stages = timeline.stages[span.row]
    return stages.index(span.stage) if span.stage in stages else 0


def as_panels(timeline: Timeline | Sequence[Timeline]) -> tuple[Timeline, ...]:
    """One timeline, or several to be drawn together, as a tuple."""
    panels: Any = [timeline] if isinstance(timeline, Timeline) else timeline
    if not isinstance(panels, (tuple, list)) or not panels or not all(isinstance(one, Timeline) for one in panels):
        raise TimelineError(f"timeline is {shown(timeline)}; give timeline(...) of a plan, a simulation or a recording")
    return tuple(panels)


def amount(value: float) -> str:
    """A number with up to four significant digits and no trailing zeros; of nine digits and more, ``34.63e9``.

    Examples:
        >>> amount(25.50), amount(34_630_000_000)
        ('25.5', '34.63e9')
    """
    if 1e8 <= abs(value) < math.inf:
        power = 3 * int(math.log10(abs(value)) / 3 + 1e-12)
        return f"{value / 10**power:.4g}e{power}"
    text = f"{value:.4g}"
    return f"{value:.0f}" if "e" in text and abs(value) >= 1 else text


def time_text(value: float, unit: str, *, like: float | None = None) -> str:
    """A time with its unit; seconds in the decimal multiple that suits ``like`` (by default: the value).

    Examples:
        >>> time_text(0.0123, "s"), time_text(25.5, "")
        ('12.3 ms', '25.5')
    """
    if value == 0:
        return "0"
    if unit != "s":
        return f"{amount(value)} {unit}".rstrip()
    size = abs(value if like is None else like)
    factor, name = next((pair for pair in ((1.0, "s"), (1e-3, "ms")) if size >= pair[0]), (1e-6, "µs"))
    return f"{amount(value / factor)} {name}"


def summary(timeline: Timeline) -> str:
    """The figures of a timeline in one line: makespan, bubble and, where counted, the peak; or how much gets stuck.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> summary(timeline(gpipe(2, 2)))
        'makespan 9 · bubble 33.3% · peak live microbatches 2'
    """
    stuck = sum(span.kind in (STUCK, BEHIND) for span in timeline.spans)
    if stuck:
        return f"stuck: {stuck} of {len(timeline.spans)} never end"
    parts = [f"makespan {time_text(timeline.makespan, timeline.unit)}", f"bubble {100 * timeline.bubble:.1f}%"]
    if timeline.counters:
        name = timeline.counters[0].name
        peak = max(counter.peak for counter in timeline.counters if counter.name == name)
        parts.append(f"peak {name} {amount(peak)}")
    return " · ".join(parts)
