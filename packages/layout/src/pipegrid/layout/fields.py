"""Whole numbers from a caller, in their one form."""

from __future__ import annotations

from typing import Any

from pipegrid.core.fields import index_of, shown
from pipegrid.layout.errors import LayoutError

MAX_LAYERS = 1_000_000
"""The most layers, and the most stages, of a layout."""


def integer(value: Any, what: str, *, least: int, most: int | None = None) -> int:
    """``value`` as an int in the closed range from ``least`` to ``most``."""
    number = index_of(value)
    if number is None or number < least or (most is not None and number > most):
        bound = f"at least {least}" if most is None else f"{least} to {most}"
        raise LayoutError(f"{what} is {shown(value)}; it must be an integer of {bound}")
    return number


def sizes_of_pipeline(pp: Any, vpp: Any) -> tuple[int, int]:
    """Number of pp ranks and of chunks per rank, whose product is at most `MAX_LAYERS`."""
    ranks, chunks = integer(pp, "pp", least=1), integer(vpp, "vpp", least=1)
    if ranks * chunks > MAX_LAYERS:
        raise LayoutError(f"pp {ranks} and vpp {chunks} make {ranks * chunks} stages; the most are {MAX_LAYERS:,}")
    return ranks, chunks
