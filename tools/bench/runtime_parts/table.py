"""Cells of the printed tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from attrs import frozen

MISSING = "-"
SPREAD_WIDTH = 28


@frozen
class Spread:
    """What pairs of steps say of two runners: the median of their ratios, and the quartiles around it."""

    median: float
    lower: float
    upper: float


def pair_ratios(ours: Sequence[float], others: Sequence[float]) -> Spread | None:
    """Of the steps of the same rounds; None without any."""
    ratios = [mine / other for mine, other in zip(ours, others, strict=True)] if others else []
    if not ratios:
        return None
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    return Spread(median, lower, upper)


def spread_against(ratios: Spread | None, bound: float, *, digits: int = 2) -> str:
    """A median, the bound that it is to stay under, and the quartiles."""
    if ratios is None:
        return f"{MISSING:>{SPREAD_WIDTH}}"
    quartiles = f"[{ratios.lower:.{digits}f}, {ratios.upper:.{digits}f}]"
    return f"{f'{ratios.median:.{digits}f} {relation(meets(ratios, bound))} {bound:g} {quartiles}':>{SPREAD_WIDTH}}"


def meets(ratios: Spread | None, bound: float) -> bool:
    """Whether the median holds the bound; where nothing was measured, it is not missed."""
    return ratios is None or ratios.median <= bound


def against(value: float | None, bound: float, *, digits: int = 2) -> str:
    """A figure and the bound that it is to stay under."""
    if value is None:
        return f"{MISSING:>16}"
    return f"{f'{value:.{digits}f} {relation(value <= bound)} {bound:g}':>16}"


def relation(met: bool) -> str:
    """How a figure stands to its bound."""
    return "<=" if met else "> "


def number(value: float | None, width: int = 9, digits: int = 1) -> str:
    """A figure, or a dash."""
    return f"{MISSING:>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def shown(notes: Mapping[str, str]) -> list[str]:
    """Notes, as lines below their row."""
    return [f"    {name}: {note}" for name, note in notes.items()]
