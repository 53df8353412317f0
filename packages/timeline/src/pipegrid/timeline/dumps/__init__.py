"""Reads flight-recorder dumps of the ranks of a hung job, and explains what the job was doing."""

from pipegrid.timeline.dumps.explain import Explanation, Root, explain
from pipegrid.timeline.dumps.places import RankPlace
from pipegrid.timeline.dumps.read import Dump, DumpError, Entry, read_dump, read_dumps, read_records
from pipegrid.timeline.dumps.waits import Wait

__all__ = [
    "Dump",
    "DumpError",
    "Entry",
    "Explanation",
    "RankPlace",
    "Root",
    "Wait",
    "explain",
    "read_dump",
    "read_dumps",
    "read_records",
]
