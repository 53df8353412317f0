"""How two grids stand to each other. No torch."""

from __future__ import annotations

import enum
from typing import Protocol

from pipegrid.topology._checks import shown
from pipegrid.topology.errors import GridShapeError


class Relation(enum.Enum):
    """The four relations of two spans of ranks."""

    EQUAL = "equal"
    DISJOINT = "disjoint"
    NESTED = "nested"
    OVERLAPPING = "overlapping"


class HasRanks(Protocol):
    """A grid, as far as its span goes."""

    @property
    def ranks(self) -> range:
        """The span: consecutive ranks."""
        ...


def relation(a: HasRanks, b: HasRanks) -> Relation:
    """EQUAL spans, DISJOINT ones, one NESTED in the other (whichever), or OVERLAPPING in part.

    Raises:
        GridShapeError: something without a span of ranks.
    """
    for given in (a, b):
        if not isinstance(getattr(given, "ranks", None), range):
            raise GridShapeError(f"a relation is between two grids, got {shown(given)}; place() makes them")
    if a.ranks == b.ranks:
        return Relation.EQUAL
    start, stop = max(a.ranks.start, b.ranks.start), min(a.ranks.stop, b.ranks.stop)
    if start >= stop:
        return Relation.DISJOINT
    if range(start, stop) in (a.ranks, b.ranks):
        return Relation.NESTED
    return Relation.OVERLAPPING
