"""Timelines as one HTML file that needs nothing else: zoom, hover, search, arrows of a microbatch through all rows.

The data is a JSON document in the page. Numbers are columns (little-endian, zlib, base64), so that a step of 130,000
actions is a file of about a megabyte. Style and scripts are the files of ``page/``; the arithmetic of the picture
(``data.js``, ``model.js``) knows no document and runs in node.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from string import Template
from typing import Any

from pipegrid.timeline.kinds import COLOURS, COMPUTE_KINDS, HATCHED, MEANING, OTHER, TRANSFER_KINDS
from pipegrid.timeline.timeline import Timeline, as_panels, summary

NONE = -(2**31)
"""The value of None in a column of integers."""

SCRIPTS = ("data.js", "model.js", "view.js", "page.js")
_CODES = {"f64": "d", "i32": "i", "u32": "I"}


_OF_SPANS = (("u32", ("row",)), ("f64", ("start", "end", "memory")), ("i32", ("stage", "microbatch", "slice", "home")))
_OF_FLOWS = (("u32", ("source", "destination")), ("f64", ("bytes",)))


def _column(kind: str, values: Iterable[float | None]) -> dict[str, str]:
    """Numbers packed for the page; None is NaN, or `NONE` among integers."""
    none = math.nan if kind == "f64" else NONE
    numbers = [none if value is None else value for value in values]
    packed = struct.pack(f"<{len(numbers)}{_CODES[kind]}", *numbers)
    return {"type": kind, "data": base64.b64encode(zlib.compress(packed, 9)).decode()}


def _places(values: Iterable[str]) -> dict[str, int]:
    """Each different text with its number, in order."""
    return {text: number for number, text in enumerate(dict.fromkeys(values))}


def _panel(timeline: Timeline) -> dict[str, Any]:
    spans, flows = timeline.spans, timeline.flows
    kinds = _places(span.kind for span in spans)
    labels = _places(("", *(span.label for span in spans)))
    counters = []
    for counter in timeline.counters:
        times = _column("f64", (time for time, _ in counter.points))
        values = _column("f64", (value for _, value in counter.points))
        counters.append({"row": counter.row, "name": counter.name, "columns": {"time": times, "value": values}})
    return {
        "title": timeline.title,
        "unit": timeline.unit,
        "summary": summary(timeline),
        "rows": timeline.rows,
        "notes": timeline.notes,
        "replicas": timeline.replicas,
        "kinds": list(kinds),
        "labels": list(labels),
        "columns": {
            **{name: _column(kind, map(attrgetter(name), spans)) for kind, names in _OF_SPANS for name in names},
            **{name: _column(kind, map(attrgetter(name), flows)) for kind, names in _OF_FLOWS for name in names},
            "kind": _column("u32", (kinds[span.kind] for span in spans)),
            "label": _column("u32", (labels[span.label] for span in spans)),
        },
        "counters": counters,
    }


def html(timeline: Timeline | Sequence[Timeline], *, arrows: bool = False) -> str:
    """The text of a page with ``timeline``, or with several (planned, then measured) whose rows can be aligned.

    Timelines with the same unit share one scale. ``arrows`` draws every flow at first, where they are few enough.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> "<html" in html(timeline(gpipe(2, 2)))
        True
    """
    panels = as_panels(timeline)
    page = files("pipegrid.timeline") / "page"
    words = {
        "computes": COMPUTE_KINDS,
        "transfers": TRANSFER_KINDS,
        "hatched": HATCHED,
        "meaning": MEANING,
        "colours": COLOURS,
        "other": OTHER,
    }
    document = {"words": words, "arrows": arrows, "panels": [_panel(panel) for panel in panels]}
    return Template((page / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape("; ".join(panel.title for panel in panels if panel.title) or "pipeline schedule"),
        style=(page / "page.css").read_text(encoding="utf-8"),
        data=json.dumps(document, separators=(",", ":")).replace("<", "\\u003c"),  # no text ends the script element
        scripts="".join((page / name).read_text(encoding="utf-8") for name in SCRIPTS),
    )


def write_html(timeline: Timeline | Sequence[Timeline], path: str | Path, *, arrows: bool = False) -> None:
    """Write `html` to ``path``.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> write_html(timeline(gpipe(2, 2)), "gpipe.html")
    """
    Path(path).write_text(html(timeline, arrows=arrows), encoding="utf-8")
