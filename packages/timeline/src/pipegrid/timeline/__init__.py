"""Planned, simulated and measured timelines, as SVG, HTML, text and Perfetto traces."""

from pipegrid.timeline.ascii import ascii_timeline, terminal_timeline
from pipegrid.timeline.html import html, write_html
from pipegrid.timeline.of_orders import order_timeline
from pipegrid.timeline.perfetto import perfetto, write_perfetto
from pipegrid.timeline.recorder import Recorder
from pipegrid.timeline.measured import recorded_costs
from pipegrid.timeline.recording import (
    Aside,
    Recorded,
    Recording,
    TimelineError,
    Track,
    recording_from_json,
    recording_to_json,
)
from pipegrid.timeline.sources import position_name, timeline
from pipegrid.timeline.svg import svg, write_svg
from pipegrid.timeline.timeline import Counter, Flow, Span, Timeline, amount, scaled, summary, time_text

__all__ = [
    "Aside",
    "Counter",
    "Flow",
    "Recorded",
    "Recorder",
    "Recording",
    "Span",
    "Timeline",
    "TimelineError",
    "Track",
    "amount",
    "ascii_timeline",
    "html",
    "order_timeline",
    "perfetto",
    "position_name",
    "recorded_costs",
    "recording_from_json",
    "recording_to_json",
    "scaled",
    "summary",
    "svg",
    "terminal_timeline",
    "time_text",
    "timeline",
    "write_html",
    "write_perfetto",
    "write_svg",
]
