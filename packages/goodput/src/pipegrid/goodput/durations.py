"""Durations as seconds: read from a number or a text such as ``"1h30m"``, and written as such a text."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, TypeAlias

from pipegrid.core.fields import Rule, number

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
_PART = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|[dhms])")


def seconds_of(value: Any) -> float:
    """Seconds of a number, or of a text such as ``"1h30m"``; `ValueError`: without units, negative or infinite."""
    if isinstance(value, str):
        parts = [match.groups() for match in _PART.finditer(value)]
        if not parts or _PART.sub("", value).strip():
            raise ValueError(f"{value!r} is no duration")
        value = sum(float(amount) * _UNITS[unit] for amount, unit in parts)
    return float(number().convert(value))


def _above_zero(value: Any) -> float:
    return float(number(above=0.0).convert(seconds_of(value)))


def _or_never(value: Any) -> float:
    return math.inf if value in ("never", math.inf) else seconds_of(value)


DURATION = f'a number of seconds, or a text such as "1h30m" ({", ".join(_UNITS)})'
Duration: TypeAlias = Annotated[float, Rule(seconds_of, DURATION)]
PositiveDuration: TypeAlias = Annotated[float, Rule(_above_zero, f"{DURATION}, above 0")]
DurationOrNever: TypeAlias = Annotated[float, Rule(_or_never, f'{DURATION}, or "never"')]
"""Infinite where it is ``"never"``."""

GivenPositive: TypeAlias = Annotated[float | str, Rule(_above_zero, f"{DURATION}, above 0")]
GivenOrNever: TypeAlias = Annotated[float | str, Rule(_or_never, f'{DURATION}, or "never"')]


def duration_text(seconds: float) -> str:
    """The two largest units of a duration: ``"1h 30m"``, ``"45m"``, ``"12.5s"``; below a second, milliseconds."""
    if math.isinf(seconds):
        return "never"
    if 0 < seconds < 0.9995:  # less than a second in three digits
        return f"{seconds * 1000:.3g}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    names = ["d", "h", "m", "s"]
    first = next(at for at, name in enumerate(names) if seconds >= _UNITS[name])
    small = _UNITS[names[first + 1]]
    whole, rest = divmod(round(seconds / small), round(_UNITS[names[first]] / small))
    return f"{whole}{names[first]}" + (f" {rest}{names[first + 1]}" if rest else "")
