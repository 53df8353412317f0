"""What the links between two sides are like, and what a choice of messages takes over them. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

from attrs import field, frozen

from pipegrid.bridges.errors import BridgeError

Transfer = tuple[int, int, float]
"""A message: sending rank, receiving rank, bytes."""


def _as_groups(value: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(ranks)) for ranks in value)


@frozen(slots=False)
class Links:
    """The links that carry a boundary: measured once for a cluster, and declared on every rank alike.

    Each link passes what its ranks send one message after another, and what they receive likewise, at the same time.
    `tools/bench/p2p.py` of the source tree measures both numbers.

    Attributes:
        bandwidth: bytes per second of one link, each way.
        latency: seconds that a message takes beside its bytes, at the sender and at the receiver.
        shared: sets of ranks that share one link, such as all ranks of a node with one network card. Every other
            rank has a link of its own.

    Raises:
        BridgeError: a bandwidth that is not positive, a negative latency, a rank with two links.
    """

    bandwidth: float
    latency: float
    shared: tuple[tuple[int, ...], ...] = field(default=(), converter=_as_groups, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not self.bandwidth > 0 or not math.isfinite(self.bandwidth):
            raise BridgeError(f"bandwidth={self.bandwidth} of a link: give bytes per second, more than 0")
        if not self.latency >= 0 or not math.isfinite(self.latency):
            raise BridgeError(f"latency={self.latency} of a link: give seconds per message, at least 0")
        seen: set[int] = set()
        for ranks in self.shared:
            for rank in ranks:
                if rank in seen:
                    raise BridgeError(f"rank {rank} is in two of the shared links {self.shared}; a rank has one link")
                seen.add(rank)

    @cached_property
    def _first_of(self) -> dict[int, int]:
        return {rank: ranks[0] for ranks in self.shared for rank in ranks}

    def link_of(self, rank: int) -> int:
        """The link of a rank, named after the first rank on it."""
        return self._first_of.get(rank, rank)

    def seconds(self, transfers: Sequence[Transfer]) -> float:
        """How long the busiest link takes for all ``transfers``; what a rank gives to itself takes nothing."""
        busy: dict[tuple[int, bool], float] = {}
        for source, destination, nbytes in transfers:
            if source == destination:
                continue
            for end in ((self.link_of(source), True), (self.link_of(destination), False)):
                busy[end] = busy.get(end, 0.0) + self.latency + nbytes / self.bandwidth
        return max(busy.values(), default=0.0)
