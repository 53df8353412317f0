"""An edge between two pipeline stages, and the two directions of traffic along it. No torch."""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

from attrs import frozen

from pipegrid.core.errors import P2PUsageError
from pipegrid.core.fields import checked_fields, integer


# The hash is cached: a runtime finds the lane of every message by its edge.
@frozen(order=True, cache_hash=True, field_transformer=checked_fields(P2PUsageError))
class Edge:
    """An edge: activations flow from stage ``source`` to ``destination`` (global numbers), gradients the other way.

    Attributes:
        source: the stage that makes the activation.
        destination: the stage that takes it.

    Examples:
        >>> str(Edge(0, 1))
        '0>1'
    """

    source: Annotated[int, integer()]
    destination: Annotated[int, integer()]

    def __str__(self) -> str:
        return f"{self.source}>{self.destination}"

    def end(self, direction: Direction, *, sends: bool) -> int:
        """The stage that sends in ``direction``, or the one that receives."""
        return self.source if sends is (direction is Direction.FORWARD) else self.destination


class Direction(enum.Enum):
    """Direction of a message: activations along an edge, or gradients against it.

    Examples:
        >>> Direction.FORWARD.value, Direction.BACKWARD.value
        ('F', 'B')
    """

    FORWARD = "F"
    BACKWARD = "B"

    __hash__ = object.__hash__  # members are single; Enum's own hash of the name is several times as slow


Crossing: TypeAlias = tuple[Edge, Direction, int]
"""An edge, its direction, and the replica at the other end."""
