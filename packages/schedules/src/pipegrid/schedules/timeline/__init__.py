"""Planned, simulated and measured timelines, as SVG, HTML, text and Perfetto traces."""

from pipegrid.schedules.timeline.ascii import ascii_timeline, terminal_timeline
from pipegrid.schedules.timeline.html import html, write_html
from pipegrid.schedules.timeline.of_orders import order_timeline
from pipegrid.schedules.timeline.perfetto import perfetto, write_perfetto
from pipegrid.schedules.timeline.recorder import Recorder
from pipegrid.schedules.simulate.recording import Aside, Recorded, Recording, TimelineError, Track
from pipegrid.schedules.timeline.recording_json import recording_from_json, recording_to_json
from pipegrid.schedules.timeline.sources import position_name, timeline
from pipegrid.schedules.timeline.svg import svg, write_svg
from pipegrid.schedules.timeline.timeline import (
    Counter,
    Flow,
    Span,
    Timeline,
    amount,
    scaled,
    summary,
    time_text,
)

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
