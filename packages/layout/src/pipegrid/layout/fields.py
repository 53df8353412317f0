"""Whole numbers from a caller, in their one form: the part of `pipegrid.core.fields` that layouts need.

This package imports no other one, so it has a copy; a test compares the two.
"""

from __future__ import annotations

import operator
from typing import Any

from pipegrid.layout.errors import LayoutError

MAX_LAYERS = 1_000_000
"""The most layers, and the most stages, of a layout."""

_SHOWN = 80  # characters of a value that an error repeats


def shown(value: object) -> str:
    """The representation of a value for an error: one line, shortened, with the type where it is not obvious."""
    text = " ".join(f"{value!r:.{_SHOWN}}".split())
    return text if value is None or isinstance(value, (bool, int, float, str)) else f"{text} ({type(value).__name__})"


def index_of(value: Any) -> int | None:
    """``value`` as an int, None where it is none: integers of numpy and torch are integers, booleans are not."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises its own errors for tensors that are no index
        return None


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
