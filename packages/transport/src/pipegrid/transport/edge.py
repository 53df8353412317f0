"""An edge between two pipeline stages, and the two directions of traffic along it. No torch."""

from __future__ import annotations

import enum

from attrs import frozen


@frozen(order=True, cache_hash=True)  # a runtime looks up lanes by it, for every message
class Edge:
    """Data flows from stage ``source`` to stage ``destination`` (global numbers); gradients flow back."""

    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.source}>{self.destination}"


class Direction(enum.Enum):
    """What travels: activations along an edge, or gradients against it."""

    FORWARD = "F"
    BACKWARD = "B"
