"""A lane as plain data: one direction of traffic between two ranks. No torch."""

from __future__ import annotations

import operator
from typing import Any

from attrs import field, frozen

from pipegrid.transport.errors import LaneSpecError


def _as_rank(value: Any) -> int:
    try:
        rank = operator.index(value)
    except TypeError:
        raise LaneSpecError(f"a lane runs between global ranks, which are integers; got {value!r}") from None
    if rank < 0 or isinstance(value, bool):
        raise LaneSpecError(f"a lane runs between global ranks, counted from 0; got {value!r}")
    return rank


@frozen(order=True)
class LaneSpec:
    """Traffic from the global rank ``source`` to ``destination``; ``label`` tells apart lanes of the same ranks.

    Its order is the order in which every rank opens its lanes.

    Raises:
        LaneSpecError: a rank that is not an integer of at least 0, or a label that is not a text.
    """

    source: int = field(converter=_as_rank)
    destination: int = field(converter=_as_rank)
    label: str = ""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.label, str):
            raise LaneSpecError(f"the label of lane {self.source}>{self.destination} is a text, got {self.label!r}")

    def __str__(self) -> str:
        return f"{self.source}>{self.destination}" + (f"[{self.label}]" if self.label else "")

    @property
    def is_local(self) -> bool:
        """Whether the lane stays on one rank: a copy, without a process group."""
        return self.source == self.destination

    @property
    def pair(self) -> tuple[int, int]:
        """Both ranks, ascending: lanes of equal pairs share a communicator where they share one at all."""
        return min(self.source, self.destination), max(self.source, self.destination)
