"""Plans for measured costs under a memory cap, and named schedules side by side."""

from pipegrid.schedules.search.compare import COMPARED, Row, compare, comparison_table
from pipegrid.schedules.search.greedy import Found, candidates, greedy
from pipegrid.schedules.search.network import Objective
from pipegrid.schedules.search.search import Progress, search

Candidate = Found  # the older name

__all__ = [
    "COMPARED",
    "Candidate",
    "Found",
    "Objective",
    "Progress",
    "Row",
    "candidates",
    "compare",
    "comparison_table",
    "greedy",
    "search",
]
