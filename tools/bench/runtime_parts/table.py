"""Cells of the printed tables."""

from __future__ import annotations

from collections.abc import Mapping

MISSING = "-"


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
