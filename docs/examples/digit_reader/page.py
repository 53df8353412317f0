"""The page of a run, ``index.html``: written anew as the run goes on, and complete at its end. One file, no network."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from attrs import define, frozen

from digit_reader.check import BOUNDS
from digit_reader.display import Figures
from digit_reader.opening import plan_of_step, shape
from digit_reader.options import Options
from digit_reader.vocabulary import words_of
from digit_reader.words import spell
from pipegrid.schedules import Timeline
from pipegrid.schedules import timeline as timeline_of
from pipegrid.timeline import html

NAME = "index.html"
WIDE, HIGH, LEFT, BELOW = 1000, 240, 56, 26
"""The size of the chart of loss and accuracy, and its margins, in units of its SVG."""


@frozen
class Strip:
    """A strip of unseen scans, ``pixels`` ``[height][width]`` from 0 to 1, and what was read: token ids."""

    number: int
    pixels: list[list[float]]
    tokens: list[int]

    @property
    def words(self) -> str:
        """What was read."""
        return " ".join(words_of(self.tokens))

    @property
    def is_right(self) -> bool:
        """Whether that is the number."""
        return self.words == " ".join(spell(self.number))


@define
class RunPage:
    """What the page shows, filled as the run goes on.

    ``rows``: the figures so far. ``difference``: of any gradient of the first step from one process, where it was
    measured. ``timelines``: of a step; before the last one, its plan.
    """

    options: Options
    rows: list[Figures]
    difference: float | None = None
    timelines: Sequence[Timeline] = ()
    strips: Sequence[Strip] = ()

    def write(self, *, done: bool) -> str:
        """Write the page; one that is not ``done`` loads itself again every few seconds. Returns its name."""
        template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
        step = self.rows[-1].step if self.rows else 0
        drawn = self.timelines or [timeline_of(plan_of_step(self.options), title=f"plan, {self.options.schedule}")]
        page = template.substitute(
            refresh="" if done else '<meta http-equiv="refresh" content="5"/>',
            state=f"step {step} of {self.options.steps}",
            shape=escape(shape(self.options)),
            figures=self._figures(step),
            curves=curves(self.rows, self.options.steps),
            gradients=self._gradients(),
            strips=self._strips(),
            timeline_title="The last step, as planned with its measured costs, and as measured"
            if self.timelines
            else "The plan of a step",
            timeline=escape(html(drawn), quote=True),
            out=escape(str(self.options.out)),
        )
        self.options.out.mkdir(parents=True, exist_ok=True)
        aside = self.options.out / f".{NAME}"
        aside.write_text(page, encoding="utf-8")
        aside.replace(self.options.out / NAME)
        return NAME

    def _figures(self, step: int) -> str:
        shown = [("step", f"{step} of {self.options.steps}")]
        if self.rows:
            last = self.rows[-1]
            shown += [("loss per word", f"{last.loss:.3g}"), ("samples a second", f"{last.samples_per_second:.0f}")]
            shown += [] if last.accuracy is None else [("of unseen strips, all words right", f"{last.accuracy:.1%}")]
            shown += [] if last.bubble is None else [("bubble, measured", f"{last.bubble:.0%}")]
        return "".join(f'<div><b>{value}</b><span class="soft">{name}</span></div>' for name, value in shown)

    def _gradients(self) -> str:
        if self.difference is None:
            return '<span class="soft">Not measured in this run: it went on from a checkpoint.</span>'
        bound = BOUNDS[self.options.dtype]
        css, mark = ("good", "&#10003;") if self.difference < bound else ("bad", "&#10007;")
        return (
            f'<span class="{css}">{mark} After the first step, '
            f"the largest relative difference of the gradient of any parameter is {self.difference:.1e}</span> "
            f"({self.options.dtype}; the bound is {bound:.0e})."
        )

    def _strips(self) -> str:
        figures = [
            f'<figure><img alt="{strip.number}" src="data:image/png;base64,{png(strip.pixels)}"/>'
            f'<figcaption class="{"good" if strip.is_right else "bad"}">'
            f"{strip.number}: {escape(strip.words)}</figcaption></figure>"
            for strip in self.strips
        ]
        return f'<h2>Strips it has never seen</h2><div class="strips">{"".join(figures)}</div>' if figures else ""


def curves(rows: Sequence[Figures], steps: int) -> str:
    """The loss, on a logarithmic scale, and the accuracy over the steps, as an SVG picture."""
    if not rows:
        return '<p class="soft">The first figures come after a few steps.</p>'
    losses = [max(row.loss, 1e-6) for row in rows]
    low, high = (math.floor(math.log10(min(losses))), math.ceil(math.log10(max(losses)) + 1e-9))
    right, bottom = WIDE - LEFT, HIGH - BELOW

    def x(step: int) -> float:
        return LEFT + (right - LEFT) * step / steps

    def level(share: float) -> float:
        return 10 + (bottom - 10) * (1 - share)

    def path(points: Sequence[tuple[int, float]], css: str) -> str:
        if len(points) == 1:  # a short run
            ((step, share),) = points
            return f'<circle class="{css}" cx="{x(step):.1f}" cy="{level(share):.1f}" r="3" fill="currentColor"/>'
        line = "L".join(f"{x(step):.1f} {level(share):.1f}" for step, share in points)
        return f'<path class="{css}" d="M{line}"/>' if points else ""

    powers = max(1, high - low)
    falling = [(row.step, (math.log10(loss) - low) / powers) for row, loss in zip(rows, losses, strict=True)]
    rising = [(row.step, row.accuracy) for row in rows if row.accuracy is not None]
    lines = [level(power / powers) for power in range(high - low + 1)]
    parts = [
        *(f'<path class="axis" d="M{LEFT} {y:.1f}H{right}"/>' for y in lines),
        *(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0 ** (low + at):g}</text>'
            for at, y in enumerate(lines)
        ),
        *(f'<text x="{right + 8}" y="{level(share) + 4:.1f}">{share:.0%}</text>' for share in (0, 0.5, 1)),
        *(
            f'<text x="{x(step):.1f}" y="{HIGH - 6}" text-anchor="middle">{step}</text>'
            for step in (0, steps // 2, steps)
        ),
        path(falling, "loss"),
        path(rising, "exact"),
    ]
    legend = '<span class="loss">loss per word</span>, <span class="exact">unseen strips read right</span>, by step'
    return f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img">{"".join(parts)}</svg><p class="soft">{legend}</p>'


def png(pixels: list[list[float]]) -> str:
    """A grey picture of rows of values from 0 to 1, in base64 (W3C, "Portable Network Graphics Specification")."""
    rows = b"".join(b"\0" + bytes(round(255 * min(max(value, 0.0), 1.0)) for value in row) for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 0, 0, 0, 0)
    chunks = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows, 9)), chunk(b"IEND", b""))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
