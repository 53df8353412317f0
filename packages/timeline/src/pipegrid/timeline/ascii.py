"""Timelines as text, for a terminal: ``F3--`` is a forward of microbatch 3, a dot is a bubble."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence

from pipegrid.core.fields import Count, checked_arguments
from pipegrid.timeline.kinds import COLOURS, OTHER, ink_on, tint
from pipegrid.timeline.recording import TimelineError
from pipegrid.timeline.timeline import Span, Timeline, as_panels, stage_place, summary

FILL = {"F": "-", "B": "=", "I": "~", "W": "+"}
WIDTH = 160
RESET = "\x1b[0m"


def _painted(text: str, kind: str, shade: float) -> str:
    """``text`` on the colour its kind has in an SVG (24-bit terminal escapes)."""
    background = tint(COLOURS.get(kind, OTHER), shade)
    codes = [
        f"{layer};2;{int(colour[1:3], 16)};{int(colour[3:5], 16)};{int(colour[5:7], 16)}"
        for layer, colour in ((48, background), (38, ink_on(background)))
    ]
    return f"\x1b[{';'.join(codes)}m{text}{RESET}"


def _text(span: Span, shade: int, width: int) -> str:
    """``span`` in ``width`` characters: kind, microbatch and a mark for each earlier stage, as they fit."""
    fill, named = FILL.get(span.kind, "#"), span.kind[:1] + (span.label or span.number)
    fitting = (text for text in (named + "'" * shade, named, span.kind[:1]) if len(text) <= width)
    return next(fitting, "").ljust(width, fill)


def _columns(timeline: Timeline, width: int) -> float:
    """Columns per unit of time: enough to name every span, if the whole then fits into ``width``."""
    if timeline.makespan <= 0:
        return 1.0
    fits = width / timeline.makespan
    computes = [span for span in timeline.spans if span.is_compute and span.duration > 0]
    widths = [(1 + len(span.number) + stage_place(timeline, span)) / span.duration for span in computes]
    wanted = max(widths, default=0.0)
    if wanted <= fits:
        return wanted or fits
    shortest = min(span.duration for span in computes)
    whole = int(fits * shortest)  # whole columns for the shortest span, if there are any, keep rows even
    return whole / shortest if whole else fits


def _lines(timeline: Timeline, width: int, *, colour: bool) -> Iterator[str]:
    name_width = max((len(name) for name in timeline.rows), default=0)
    scale = _columns(timeline, width)
    total = max(1, round(timeline.makespan * scale))
    if timeline.title:
        yield timeline.title
    yield summary(timeline)
    marked = False
    for row, name in enumerate(timeline.rows):
        cells = ["."] * total
        for span in timeline.on_row(row):
            if span.is_transfer:
                continue
            low, high = timeline.shares.get(span, (0.0, 1.0))  # what runs at once is written side by side
            first, last = (round((span.start - timeline.start + part * span.duration) * scale) for part in (low, high))
            shade = stage_place(timeline, span)
            text = _text(span, shade, last - first)
            marked = marked or (shade > 0 and "'" in text)
            cells[first:last] = text
            if colour and text:  # the whole span in its first cell, so that the others keep their place
                painted = _painted(text, span.kind, 0.6 * shade / max(1, len(timeline.stages[row]) - 1))
                cells[first:last] = [painted, *[""] * (len(text) - 1)]
        note = f"  {timeline.notes[row]}" if timeline.notes else ""
        yield f"{name.rjust(name_width)} |{''.join(cells)}|{note}"
    if away := next((span for span in timeline.spans if span.home is not None), None):
        name = f"{away.number} is microbatch {away.microbatch} of replica {away.home}, computed for it"
        yield f"{' ' * name_width}  {name}"
    if any(len(stages) > 1 for stages in timeline.stages):
        legend = "one ' for each earlier stage of the row" if marked else "too narrow to mark the stages of a row"
        yield f"{' ' * name_width}  {legend}"


@checked_arguments(TimelineError)
def ascii_timeline(timeline: Timeline | Sequence[Timeline], *, width: Count = WIDTH, colour: bool = False) -> str:
    """``timeline`` (or several, below each other) as text, rows at most ``width`` columns plus their names.

    A span is its kind and microbatch, filled up with ``-`` (F), ``=`` (B), ``~`` (I) or ``+`` (W); a dot is a
    bubble. Spans too short for their text show what fits. ``colour`` paints them with terminal escapes.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> print(ascii_timeline(timeline(gpipe(2, 2)), width=48))
        2 positions, 2 microbatches
        makespan 9 · bubble 33.3% · peak live microbatches 2
        stage 0 (position 0) |F0F1......B0==B1==|  bubble 33.3%, peak 2
        stage 1 (position 1) |..F0F1B0==B1==....|  bubble 33.3%, peak 2
    """
    panels = as_panels(timeline)
    return "\n\n".join("\n".join(_lines(panel, width, colour=colour)) for panel in panels) + "\n"


def terminal_timeline(timeline: Timeline) -> str:
    """`ascii_timeline` as wide as the terminal, in colour where standard output is one.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> terminal_timeline(timeline(gpipe(2, 2))).splitlines()[0]
        '2 positions, 2 microbatches'
    """
    columns = shutil.get_terminal_size((WIDTH, 24)).columns
    beside = max(map(len, timeline.rows), default=0) + max(map(len, timeline.notes), default=0) + 5
    return ascii_timeline(timeline, width=max(20, columns - beside), colour=sys.stdout.isatty())
