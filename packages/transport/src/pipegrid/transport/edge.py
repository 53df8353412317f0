"""An edge between two pipeline stages, and the two directions of traffic along it. No torch."""

from __future__ import annotations

import enum
import operator
from typing import Any

from attrs import field, frozen

from pipegrid.transport.errors import P2PUsageError


def _as_stage(value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise P2PUsageError(f"an edge leads from stage to stage, which are integers; got {value!r}")


@frozen(order=True, cache_hash=True)  # a runtime looks up lanes by it, for every message
class Edge:
    """Data flows from stage ``source`` to stage ``destination`` (global numbers); gradients flow back.

    Raises:
        P2PUsageError: a stage that is not an integer.
    """

    source: int = field(converter=_as_stage)
    destination: int = field(converter=_as_stage)

    def __str__(self) -> str:
        return f"{self.source}>{self.destination}"


class Direction(enum.Enum):
    """What travels: activations along an edge, or gradients against it."""

    FORWARD = "F"
    BACKWARD = "B"

    __hash__ = object.__hash__  # members are single; Enum's own hashes their names, several times as slowly
