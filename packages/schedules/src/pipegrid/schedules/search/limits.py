"""A cap on memory, as people give it."""

from __future__ import annotations

import math

from pipegrid.schedules.arguments import shown
from pipegrid.schedules.errors import PlanError


def as_limit(memory_limit: float | None) -> float:
    """``memory_limit`` as a number: infinite for None.

    Raises:
        PlanError: negative, or no number.
    """
    if memory_limit is None:
        return math.inf
    is_number = isinstance(memory_limit, int | float) and not isinstance(memory_limit, bool)
    if not is_number or not memory_limit >= 0:  # the comparison is False for nan, too
        raise PlanError(f"memory_limit is {shown(memory_limit)}; give a number from 0, or None for no limit")
    try:
        return float(memory_limit)
    except OverflowError:  # an integer above all floats
        return math.inf
