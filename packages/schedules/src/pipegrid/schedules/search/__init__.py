"""Plans for measured costs under a memory cap, and named schedules side by side."""

from pipegrid.schedules.search.compare import COMPARED, HEADINGS, Row, compare, comparison_cells, comparison_table
from pipegrid.schedules.search.greedy import Candidate, candidates, greedy

__all__ = [
    "COMPARED",
    "HEADINGS",
    "Candidate",
    "Row",
    "candidates",
    "compare",
    "comparison_cells",
    "comparison_table",
    "greedy",
]
