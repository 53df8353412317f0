"""A lane as plain data: one direction of traffic between two ranks. No torch."""

from __future__ import annotations

import operator
from typing import Any

from attrs import field, frozen

from pipegrid.transport.errors import LaneSpecError

_LABEL_BYTES = 4096


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
        LaneSpecError: a rank that is not an integer of at least 0, or a label that is not a text of at most 4096 bytes
            (in UTF-8).
    """

    source: int = field(converter=_as_rank)
    destination: int = field(converter=_as_rank)
    label: str = ""

    def __attrs_post_init__(self) -> None:
        here = f"the label of lane {self.source}>{self.destination}"
        if not isinstance(self.label, str):
            raise LaneSpecError(f"{here} is a text, got {self.label!r}")
        try:
            size = len(self.label.encode())
        except UnicodeEncodeError:
            raise LaneSpecError(
                f"{here} is {self.label!r}, which UTF-8 has no bytes for; leave the half characters out"
            ) from None
        if size > _LABEL_BYTES:
            raise LaneSpecError(
                f"{here} has {size} bytes in UTF-8 and begins with {self.label[:40]!r}; it stands in every error and "
                f"in the names of groups and threads, so give one of at most {_LABEL_BYTES}"
            )

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


@frozen(kw_only=True)
class LaneStats:
    """Counts of one end of a lane since it was opened.

    Attributes:
        messages: payloads sent, or received.
        transfers: tensors that went over the wire for them.
        bytes: their size.
        headers: announcements sent or received beside them, on a CPU group.
        host_syncs: times the host had to wait for something other than the payload it asked for: a header, or
            a device.
        allocations: receives that got new buffers. Where buffers are given back, this is how many were ever in
            use at once.
        live: receives whose buffers were not given back.
    """

    messages: int = 0
    transfers: int = 0
    bytes: int = 0
    headers: int = 0
    host_syncs: int = 0
    allocations: int = 0
    live: int = 0


class Tally:
    """The counts while they grow. What the steady state sends is counted by its numbers alone (see `Lane.stats`)."""

    def __init__(self) -> None:
        self.messages = 0
        self.transfers = 0
        self.bytes = 0
        self.headers = 0
        self.host_syncs = 0
        self.allocations = 0
        self.released = 0
