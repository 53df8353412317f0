"""A lane as plain data: its ends and label, and the counts of what it has moved. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from attrs import define, frozen

from pipegrid.core.errors import P2PUsageError
from pipegrid.core.fields import Index, Rule, checked_fields

_LABEL_BYTES = 4096


def _label(value: Any) -> str:
    if not isinstance(value, str) or len(value.encode()) > _LABEL_BYTES:  # UnicodeEncodeError is a ValueError
        raise ValueError
    return value


@frozen(order=True, field_transformer=checked_fields(P2PUsageError))
class LaneSpec:
    """Traffic from one rank to another.

    Attributes:
        source: the global rank that sends.
        destination: the global rank that receives.
        label: tells apart lanes of the same ranks; part of the names of groups and threads and of every error.

    Examples:
        >>> lane = LaneSpec(3, 1, "images")
        >>> str(lane), lane.pair
        ('3>1[images]', (1, 3))
    """

    source: Index
    destination: Index
    label: Annotated[str, Rule(_label, f"a string of at most {_LABEL_BYTES} bytes in UTF-8")] = ""

    def __str__(self) -> str:
        return f"{self.source}>{self.destination}" + (f"[{self.label}]" if self.label else "")

    @property
    def is_local(self) -> bool:
        """Whether both ends are one rank: a copy, without a process group."""
        return self.source == self.destination

    @property
    def pair(self) -> tuple[int, int]:
        """Both ranks, ascending: the key of a shared communicator."""
        return min(self.source, self.destination), max(self.source, self.destination)


def opening_key(ranks: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """The place of a pair of ranks, or of the members of a communicator, in the one order in which all ranks open.

    A key of the ranks alone (ascending), and another for each set: every rank, whichever lanes it knows, connects its
    own in a restriction of one total order, which cannot deadlock (`creation_order` of topology).

    Pairs come by distance, and those of one distance ``d`` in two rounds: ``a // d`` is even for one end of a pair
    and odd for the other, so no rank is in two pairs of a round. A chain of ranks, of any stride, opens in two rounds,
    and the way from its last rank to its first is a third. Where all ranks of two sides pair up, a rank waits for at
    most two rounds for each distance that occurs.
    """
    distance = ranks[-1] - ranks[0]
    return distance, ranks[0] // distance % 2 if distance else 0, ranks


@frozen(kw_only=True)
class LaneStats:
    """Counts of one end of a lane since it was opened.

    Attributes:
        messages: payloads sent, or received.
        transfers: tensors moved for them.
        bytes: size of these tensors.
        headers: announcements sent or received beside them, on a CPU group.
        host_syncs: waits of the host for anything but the payload it asked for: a header, or a device.
        allocations: receives that got new buffers. Where all buffers are released, the number of buffers that were in
            use at once.
        live: receives whose buffers were not released.

    Examples:
        >>> LaneStats(messages=2, bytes=64).messages
        2
    """

    messages: int = 0
    transfers: int = 0
    bytes: int = 0
    headers: int = 0
    host_syncs: int = 0
    allocations: int = 0
    live: int = 0


@define(eq=False)
class Tally:
    """The counts of a lane while they grow; see `LaneStats`."""

    transfers: int = 0
    bytes: int = 0
    headers: int = 0
    host_syncs: int = 0
    allocations: int = 0
    released: int = 0

    def count(self, tensors: Iterable[Any]) -> None:
        """Count tensors that are moved."""
        for tensor in tensors:
            self.transfers += 1
            self.bytes += tensor.nbytes
