"""Timelines as Chrome trace events, which Perfetto opens: slices, counters, and arrows from send to receive.

The format: "Trace Event Format" (the JSON of chrome://tracing), times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipegrid.timeline.timeline import Timeline, as_panels

Event = dict[str, Any]

MICROSECONDS = 1e6  # of a second
UNIT = 1e3  # microseconds that a unit of cost is shown as, where a timeline has no unit
NANOSECONDS = 1000  # of a microsecond; the resolution of a trace
TRACKS_PER_ROW = 64  # thread ids that a row may take: its work, then its transfers


class _Slice(NamedTuple):
    """A span as drawn, in nanoseconds from the timeline's start: at least one, as no arrow binds to a slice of none."""

    start: int
    end: int
    number: int
    beside: bool
    """Whether it goes beside the row's work: a transfer, or what takes no time and so would cover the next."""


def _tracks(slices: Iterable[_Slice]) -> dict[int, int]:
    """Span index -> track: 0 for work; transfers overlap, so each takes the first of 1, 2, ... that is free.

    Slices of one thread must nest, and an arrow that ends in two belongs to neither; so spans of work that overlap
    (ranks of one row) move to further tracks too.
    """
    free_at = [0]
    track_of: dict[int, int] = {}
    for drawn in sorted(slices):
        free = (t for t in range(int(drawn.beside), len(free_at)) if free_at[t] <= drawn.start)
        track = min(next(free, len(free_at)), TRACKS_PER_ROW - 1)
        free_at += [0] * (track + 1 - len(free_at))
        free_at[track] = max(free_at[track], drawn.end)
        track_of[drawn.number] = track
    return track_of


def _process(timeline: Timeline, pid: int, first_flow: int) -> Iterator[Event]:
    factor = MICROSECONDS if timeline.unit == "s" else UNIT

    def at(time: float) -> float:
        return (time - timeline.start) * factor

    name = timeline.title or f"timeline {pid}"
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    tid_of: dict[int, int] = {}
    slices: list[_Slice] = []
    rows: list[list[_Slice]] = [[] for _ in timeline.rows]
    for index, span in enumerate(timeline.spans):
        start, end = round(at(span.start) * NANOSECONDS), round(at(span.end) * NANOSECONDS)
        slices.append(_Slice(start, max(end, start + 1), index, beside=span.is_transfer or start == end))
        rows[span.row].append(slices[-1])
    for row, title in enumerate(timeline.rows):
        tracks = _tracks(rows[row])
        for track in sorted({0, *tracks.values()}):
            tid = row * TRACKS_PER_ROW + track
            label = title if track == 0 else f"{title}, beside it {track}"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": label}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
        for index, track in tracks.items():
            tid_of[index] = row * TRACKS_PER_ROW + track
    for (start, end, index, _), span in zip(slices, timeline.spans, strict=True):
        where = {"pid": pid, "tid": tid_of[index], "ts": start / NANOSECONDS, "dur": (end - start) / NANOSECONDS}
        own = {"kind": span.kind, "stage": span.stage, "microbatch": span.microbatch}
        own |= {name: at for name, at in (("slice", span.slice), ("home", span.home)) if at is not None}
        yield {"ph": "X", "name": span.name, "cat": span.kind, **where, "args": own}
    for number, flow in enumerate(timeline.flows, first_flow):
        for phase, index in (("s", flow.source), ("f", flow.destination)):
            where = {"pid": pid, "tid": tid_of[index], "ts": slices[index].start / NANOSECONDS}
            # Bound ("bp") to the slice around it, not to the next one.
            yield {"ph": phase, "bp": "e", "id": number, "name": "transfer", "cat": "transfer", **where}
    for counter in timeline.counters:
        title = f"{counter.name}, {timeline.rows[counter.row]}"
        for time, value in counter.points:
            yield {"ph": "C", "name": title, "pid": pid, "ts": at(time), "args": {counter.name: value}}


def perfetto(timeline: Timeline | Sequence[Timeline]) -> dict[str, Any]:
    """The trace of ``timeline`` as plain data, one process for each timeline given, starting at time 0.

    Seconds become microseconds; a timeline without a unit is shown at a millisecond per unit of cost.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> sorted(perfetto(timeline(gpipe(2, 2))))
        ['displayTimeUnit', 'traceEvents']
    """
    events: list[Event] = []
    flows = 0
    for pid, panel in enumerate(as_panels(timeline), 1):
        events.extend(_process(panel, pid, flows))
        flows += len(panel.flows)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_perfetto(timeline: Timeline | Sequence[Timeline], path: str | Path) -> None:
    """Write the trace of ``timeline`` (or of several, each a process) to ``path``, for ui.perfetto.dev.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> write_perfetto(timeline(gpipe(2, 2)), "gpipe.json")  # for ui.perfetto.dev
    """
    Path(path).write_text(json.dumps(perfetto(timeline), separators=(",", ":")) + "\n", encoding="utf-8")
