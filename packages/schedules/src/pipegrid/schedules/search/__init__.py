"""Plans for measured costs under a memory cap, and named schedules side by side."""

from pipegrid.schedules.search.compare import COMPARED, Row, compare, comparison_table
from pipegrid.schedules.search.greedy import Candidate, candidates, greedy

__all__ = [
    "COMPARED",
    "Candidate",
    "Row",
    "candidates",
    "compare",
    "comparison_table",
    "greedy",
]
