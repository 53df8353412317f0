"""Timelines as Chrome trace events, which Perfetto opens: slices, counters, and arrows from send to receive.

The format: "Trace Event Format" (the JSON of chrome://tracing), times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipegrid.schedules.timelines import Span, Timeline, as_panels

Event = dict[str, Any]

MICROSECONDS = 1e6  # of a second
UNIT = 1e3  # microseconds that a unit of cost is shown as, where a timeline has no unit
SHORTEST = 1e-3  # a nanosecond: slices without any length swallow their arrows
TRACKS_PER_ROW = 64  # thread ids that a row may take: its work, then its transfers


def _factor(unit: str) -> float:
    return MICROSECONDS if unit == "s" else UNIT


def _tracks(spans: Sequence[tuple[int, Span]]) -> dict[int, int]:
    """Span index -> track: 0 for work; transfers overlap, so each takes the first of 1, 2, ... that is free.

    Slices of one thread must nest; spans of work that overlap (ranks of one row) move to further tracks too.
    """
    free_at: list[float] = [float("-inf")]
    track_of: dict[int, int] = {}
    for index, span in sorted(spans, key=lambda item: (item[1].start, item[1].end)):
        first = 1 if span.is_transfer else 0
        track = next(
            (t for t in range(first, len(free_at)) if free_at[t] <= span.start),
            max(len(free_at), first),
        )
        if track >= TRACKS_PER_ROW:
            track = TRACKS_PER_ROW - 1
        while len(free_at) <= track:
            free_at.append(float("-inf"))
        free_at[track] = max(free_at[track], span.end)
        track_of[index] = track
    return track_of


def _process(timeline: Timeline, pid: int, first_flow: int) -> Iterator[Event]:
    factor, zero = _factor(timeline.unit), timeline.start

    def at(time: float) -> float:
        return (time - zero) * factor

    name = timeline.title or f"timeline {pid}"
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    tid_of: dict[int, int] = {}
    rows: list[list[tuple[int, Span]]] = [[] for _ in timeline.rows]
    for index, span in enumerate(timeline.spans):
        rows[span.row].append((index, span))
    for row, title in enumerate(timeline.rows):
        tracks = _tracks(rows[row])
        for track in sorted({0, *tracks.values()}):
            tid = row * TRACKS_PER_ROW + track
            label = title if track == 0 else f"{title}, beside it {track}"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": label}}
            yield {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": pid,
                "tid": tid,
                "args": {"sort_index": tid},
            }
        for index, track in tracks.items():
            tid_of[index] = row * TRACKS_PER_ROW + track
    for index, span in enumerate(timeline.spans):
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "pid": pid,
            "tid": tid_of[index],
            "ts": at(span.start),
            "dur": max((span.end - span.start) * factor, SHORTEST),
            "args": {"kind": span.kind, "stage": span.stage, "microbatch": span.microbatch},
        }
    for number, flow in enumerate(timeline.flows, first_flow):
        source, destination = timeline.spans[flow.source], timeline.spans[flow.destination]
        ends: tuple[tuple[str, int, Span], ...] = (
            ("s", flow.source, source),
            ("f", flow.destination, destination),
        )
        for phase, index, span in ends:
            yield {
                "ph": phase,
                "bp": "e",  # bind to the slice around it, not to the next one
                "id": number,
                "name": "transfer",
                "cat": "transfer",
                "pid": pid,
                "tid": tid_of[index],
                "ts": at(span.start),
            }
    for counter in timeline.counters:
        title = f"{counter.name}, {timeline.rows[counter.row]}"
        for time, value in counter.points:
            yield {"ph": "C", "name": title, "pid": pid, "ts": at(time), "args": {counter.name: value}}


def perfetto(timeline: Timeline | Sequence[Timeline]) -> dict[str, Any]:
    """The trace of ``timeline`` as plain data, one process for each timeline given, starting at time 0.

    Seconds become microseconds; a timeline without a unit is shown at a millisecond per unit of cost.
    """
    events: list[Event] = []
    flows = 0
    for pid, panel in enumerate(as_panels(timeline), 1):
        events.extend(_process(panel, pid, flows))
        flows += len(panel.flows)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_perfetto(timeline: Timeline | Sequence[Timeline], path: str | Path) -> None:
    """Write the trace of ``timeline`` (or of several, each a process) to ``path``, for ui.perfetto.dev."""
    Path(path).write_text(json.dumps(perfetto(timeline), separators=(",", ":")) + "\n", encoding="utf-8")
