"""Timelines as SVG, for the eye: one row per position, a colour per kind, bubbles grey."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from pipegrid.core.fields import Seconds, checked_arguments
from pipegrid.timeline.kinds import COLOURS, HATCHED, MEANING, OTHER, ink_on, tint
from pipegrid.timeline.recording import TimelineError
from pipegrid.timeline.timeline import Counter, Span, Timeline, amount, as_panels, stage_place, summary, time_text

ROW = 28  # heights and widths in SVG units (pixels at 100%)
GAP = 6
STRIP = 7  # transfers, under the work of a row
MEMORY = 16  # live activations, under that
PAD = 18
LETTER = 6.6  # width of a character of a 12-pixel sans-serif font, on the safe side
DIGIT = 0.6  # width of a digit, as a share of the font's size
READABLE = 20  # a span at least this wide shows its microbatch comfortably
NARROWEST, WIDEST = 560, 2400
TIPS = 20_000  # past this many spans, tooltips would make the file too big to open

STYLE = """\
svg { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-size: 12px }
.card { fill: #ffffff } .ink { fill: #1c1c1e } .soft { fill: #5a5a60 } .bubble { fill: #dcdcdf }
.grid { stroke: #8a8a90; stroke-opacity: .35 } .memory { fill: #9a86b8 }
.title { font-size: 15px; font-weight: 600 } .number { text-anchor: middle; font-weight: 600 }
.flow { fill: none; stroke: #1c1c1e; stroke-opacity: .45; stroke-width: .8 }
@media (prefers-color-scheme: dark) {
  .card { fill: #1b1c1f } .ink { fill: #f2f2f4 } .soft { fill: #b4b4bc } .bubble { fill: #3d3e44 }
  .flow { stroke: #f2f2f4 }
}
"""

HATCH = (
    '<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M1 0V5" stroke="#ffffff" stroke-opacity=".55" stroke-width="1.4"/></pattern>'
)

ARROW_HEAD = (
    '<marker id="head" markerWidth="6" markerHeight="6" refX="5" refY="3" orient="auto">'
    '<path class="ink" d="M0 1L5 3L0 5Z"/></marker>'
)


def _n(value: float) -> str:
    """A coordinate, to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _ticks(length: float, at_most: int) -> list[float]:
    """Round numbers from 0 to ``length``, 1, 2 or 5 times a power of ten apart."""
    if length <= 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(length / at_most))
    step = next(step * factor for factor in (1, 2, 5, 10) if length / (step * factor) <= at_most)
    return [index * step for index in range(math.floor(length / step + 1e-9) + 1)]


def _text(css: str, x: float, y: float, text: str, more: str = "") -> str:
    return f'<text class="{css}"{more} x="{_n(x)}" y="{_n(y)}">{escape(text)}</text>'


END, MIDDLE = ' text-anchor="end"', ' text-anchor="middle"'


class _Panel:
    """One timeline laid out: where its rows are, and how time maps to x."""

    def __init__(self, timeline: Timeline, *, left: float, scale: float, top: float) -> None:
        self.timeline, self.left, self.scale, self.top = timeline, left, scale, top
        self.rows_top = top + (20 if timeline.title else 0) + 20
        drawn = [span for span in timeline.spans if span.is_transfer and span.duration * scale > 0.5]
        self.strip = STRIP + 1 if drawn else 0
        self.memory = MEMORY if timeline.counters else 0
        self.pitch = ROW + self.strip + self.memory + GAP
        self.bottom = self.rows_top + len(timeline.rows) * self.pitch
        self.height = self.bottom + 30 - top
        self.most_stages = max((len(stages) for stages in timeline.stages), default=0)

    def x(self, time: float) -> float:
        return self.left + (time - self.timeline.start) * self.scale

    def y(self, row: int) -> float:
        return self.rows_top + row * self.pitch

    def colour(self, span: Span) -> str:
        """Of its kind, with a share of white: 0 for the first stage of the row, up to 0.6 for the last of many."""
        share = 0.6 * stage_place(self.timeline, span) / max(1, self.most_stages - 1)
        return tint(COLOURS.get(span.kind, OTHER), 0.0 if span.kind in HATCHED else share)

    def middle(self, span: Span) -> tuple[float, float]:
        """The end point of an arrow to or from ``span``."""
        inset = ROW + self.strip / 2 if span.is_transfer and self.strip else ROW / 2
        return self.x(span.start if span.is_transfer else span.end), self.y(span.row) + inset

    def parts(self, *, arrows: bool) -> Iterator[str]:
        if self.timeline.title:
            yield _text("ink title", PAD, self.top + 13, self.timeline.title)
        yield _text("soft", PAD, self.rows_top - 10, summary(self.timeline))
        yield from self._grid()
        for row, name in enumerate(self.timeline.rows):
            yield from self._row_background(row, name)
        tips = len(self.timeline.spans) <= TIPS
        for span in self.timeline.spans:
            yield from self._span(span, tip=tips)
        for counter in self.timeline.counters:
            if counter.name == self.timeline.counters[0].name:
                yield self._memory(counter)
        if arrows:
            yield from self._arrows()

    def _grid(self) -> Iterator[str]:
        length, base = self.timeline.makespan, self.bottom - GAP / 2
        for tick in _ticks(length, max(2, int(length * self.scale / 70))):
            x = self.left + tick * self.scale
            yield f'<path class="grid" d="M{_n(x)} {_n(self.rows_top - 3)}V{_n(base + 4)}"/>'
            yield _text("soft", x, base + 17, time_text(tick, self.timeline.unit, like=length), MIDDLE)

    def _row_background(self, row: int, name: str) -> Iterator[str]:
        y = self.y(row)
        yield _text("ink", self.left - 8, y + ROW / 2 + 4, name, END)
        x, width = self.left, self.timeline.makespan * self.scale
        yield f'<rect class="bubble" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{ROW}"/>'
        if self.timeline.notes:
            yield _text("soft", x + width + 8, y + ROW / 2 + 4, self.timeline.notes[row])

    def _span(self, span: Span, *, tip: bool) -> Iterator[str]:
        width = span.duration * self.scale
        if span.is_transfer:
            if width <= 0.5:
                return
            y, height, gap = self.y(span.row) + ROW + 1, STRIP - 1.0, 0.0
        else:
            low, high = self.timeline.shares.get(span, (0.0, 1.0))
            y, height, gap = self.y(span.row) + ROW * low, ROW * (high - low), min(1.0, width / 8)
        fill = self.colour(span)
        x, drawn = _n(self.x(span.start) + gap / 2), _n(max(width - gap, 0.2))
        place = f'x="{x}" y="{_n(y)}" width="{drawn}" height="{_n(height)}"'
        closing = "/>"
        if tip:
            zero, unit = self.timeline.start, self.timeline.unit
            start, end, took = (time_text(t, unit) for t in (span.start - zero, span.end - zero, span.duration))
            closing = f"><title>{escape(f'{span.name}: {start} to {end} ({took})')}</title></rect>"
        yield f'<rect fill="{fill}" {place}{closing}'
        if span.kind in HATCHED:
            yield f'<rect fill="url(#hatch)" {place} pointer-events="none"/>'
        text = span.label or span.number
        size = min(13.0, height, (width - 4) / (DIGIT * len(text))) if text else 0.0
        if size >= 6 and not span.is_transfer:
            more = f' fill="{ink_on(fill)}" font-size="{_n(size)}" pointer-events="none"'
            yield _text("number", self.x(span.start) + width / 2, y + height / 2 + size * 0.36, text, more)

    def _memory(self, counter: Counter) -> str:
        """The counter as a filled step curve under its row, all rows to one scale."""
        peak = max(c.peak for c in self.timeline.counters if c.name == counter.name)
        base = self.y(counter.row) + ROW + self.strip + self.memory - 1
        height = (self.memory - 3) / peak if peak > 0 else 0.0
        steps = "".join(f"H{_n(self.x(time))}V{_n(base - value * height)}" for time, value in counter.points)
        start, end = (f"{_n(self.x(time))}" for time in (self.timeline.start, self.timeline.end))
        tip = escape(f"{counter.name}: peak {amount(counter.peak)}")
        return f'<path class="memory" d="M{start} {_n(base)}{steps}H{end}V{_n(base)}Z"><title>{tip}</title></path>'

    def _arrows(self) -> Iterator[str]:
        spans = self.timeline.spans
        for flow in self.timeline.flows:
            source, destination = spans[flow.source], spans[flow.destination]
            (x, y), (_, to_y) = self.middle(source), self.middle(destination)
            to_x = self.x(destination.end if destination.is_transfer else destination.start)
            yield f'<path class="flow" marker-end="url(#head)" d="M{_n(x)} {_n(y)}L{_n(to_x)} {_n(to_y)}"/>'


def _legend(panels: Sequence[_Panel], y: float, width: float) -> tuple[list[str], float]:
    """One entry per kind that occurs, what shades and strips mean; and where all that ends."""
    spans = [span for panel in panels for span in panel.timeline.spans]
    kinds = {span.kind for span in spans if not span.is_transfer}
    if any(panel.strip for panel in panels):
        drawn = {"RECV_F", "RECV_B", "UNSHARD", "REDUCE_GRAD", "OFFLOAD", "RELOAD"}
        kinds |= drawn & {span.kind for span in spans}
    known = [kind for kind in COLOURS if kind in kinds]
    entries = [(f'fill="{COLOURS[kind]}"', MEANING[kind]) for kind in known]
    entries += [(f'fill="{OTHER}"', kind) for kind in sorted(kinds - set(known))]
    entries.append(('class="bubble"', "bubble"))
    counters = [counter for panel in panels for counter in panel.timeline.counters]
    if counters:
        peak = amount(max(counter.peak for counter in counters))
        entries.append(('class="memory"', f"{counters[0].name}, full height = {peak}"))
    parts: list[str] = []
    x: float = PAD
    for fill, text in entries:
        length = 22 + len(text) * LETTER + 12
        if x > PAD and x + length > width - PAD:
            x, y = PAD, y + 20
        parts.append(f'<rect {fill} x="{_n(x)}" y="{_n(y)}" width="14" height="14"/>')
        if text in (MEANING[kind] for kind in HATCHED):
            parts.append(f'<rect fill="url(#hatch)" x="{_n(x)}" y="{_n(y)}" width="14" height="14"/>')
        parts.append(_text("ink", x + 20, y + 11, text))
        x += length
    sliced = any(span.slice is not None for span in spans)
    numbers = "Numbers are microbatches and, after the dot, their slices." if sliced else "Numbers are microbatches."
    words = [numbers] if any(span.microbatch is not None for span in spans) else []
    if away := next((span for span in spans if span.home is not None), None):
        words.append(f"{away.number}: microbatch {away.microbatch} of replica {away.home}, computed for it.")
    if any(panel.most_stages > 1 for panel in panels):
        words.append("Darkest: the first stage of a row; lighter: its later stages.")
    parts.append(_text("soft", PAD, y + 32, " ".join(words)))
    return parts, y + 32


def _scale(panels: Sequence[Timeline], width: float | None) -> list[float]:
    """Pixels per unit of time: one scale for panels with the same unit, full width for each unit."""
    lengths: dict[str, float] = {}
    for panel in panels:
        lengths[panel.unit] = max(lengths.get(panel.unit, 0.0), panel.makespan)
    if width is None:
        width = NARROWEST
        for panel in panels:
            work = sorted(span.duration for span in panel.spans if span.is_compute and span.duration > 0)
            if work:
                width = max(width, READABLE * lengths[panel.unit] / work[len(work) // 10])  # of the typical short ones
        width = min(width, WIDEST)
    return [width / lengths[panel.unit] if lengths[panel.unit] > 0 else 1.0 for panel in panels]


@checked_arguments(TimelineError)
def svg(timeline: Timeline | Sequence[Timeline], *, width: Seconds | None = None, arrows: bool = False) -> str:
    """The text of an SVG picture of ``timeline``, or of several below each other (planned, then measured).

    Timelines with the same unit share one scale. ``width`` is that of the longest timeline in pixels; by
    default wide enough to read the microbatches, within reason. ``arrows`` draws every flow.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> svg(timeline(gpipe(2, 2)))[:4]
        '<svg'
    """
    timelines = as_panels(timeline)
    left = PAD + 8 + LETTER * max((len(name) for panel in timelines for name in panel.rows), default=0)
    right = PAD + 8 + LETTER * max((len(note) for panel in timelines for note in panel.notes), default=0)
    panels: list[_Panel] = []
    top: float = PAD
    for panel, scale in zip(timelines, _scale(timelines, width), strict=True):
        panels.append(_Panel(panel, left=left, scale=scale, top=top))
        top += panels[-1].height + 10
    whole_width = left + right + max(panel.timeline.makespan * panel.scale for panel in panels)
    heading = max(LETTER * 1.3 * max(len(panel.title), len(summary(panel)) / 1.3) + 2 * PAD for panel in timelines)
    whole_width = max(whole_width, heading)
    legend, bottom = _legend(panels, top, whole_width)
    height = bottom + PAD
    title = "; ".join(panel.title for panel in timelines if panel.title) or "pipeline schedule"
    size = f'width="{_n(whole_width)}" height="{_n(height)}" viewBox="0 0 {_n(whole_width)} {_n(height)}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(title)}>',
            f"<style>\n{STYLE}</style>",
            f"<defs>{ARROW_HEAD}{HATCH}</defs>",
            '<rect class="card" width="100%" height="100%" rx="6"/>',
            *(part for panel in panels for part in panel.parts(arrows=arrows)),
            *legend,
            "</svg>\n",
        ]
    )


def write_svg(
    timeline: Timeline | Sequence[Timeline], path: str | Path, *, width: float | None = None, arrows: bool = False
) -> None:
    """Write `svg` of ``timeline`` to ``path``.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> write_svg(timeline(gpipe(2, 2)), "gpipe.svg")
    """
    Path(path).write_text(svg(timeline, width=width, arrows=arrows), encoding="utf-8")
