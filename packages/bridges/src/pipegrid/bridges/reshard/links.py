"""What the links between two sides are like, and what a choice of messages takes over them. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from numbers import Real

from attrs import field, frozen

from pipegrid.bridges.checks import as_integer, as_tuple, shown
from pipegrid.bridges.errors import BridgeError

Transfer = tuple[int, int, float]
"""A message: sending rank, receiving rank, bytes."""


def _as_groups(value: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    sets = value if isinstance(value, AbstractSet) else as_tuple(value, "shared", "sets of ranks")
    return tuple(
        tuple(
            sorted(
                as_integer(rank, "a rank of a shared link", least=0)
                for rank in (ranks if isinstance(ranks, AbstractSet) else as_tuple(ranks, "a set of shared", "ranks"))
            )
        )
        for ranks in sets
    )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


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
        if not _is_number(self.bandwidth) or not self.bandwidth > 0:
            raise BridgeError(f"bandwidth={shown(self.bandwidth)} of a link: give bytes per second, more than 0")
        if not _is_number(self.latency) or not self.latency >= 0:
            raise BridgeError(f"latency={shown(self.latency)} of a link: give seconds per message, at least 0")
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
        rank = as_integer(rank, "rank", least=0)
        return self._first_of.get(rank, rank)

    def seconds(self, transfers: Sequence[Transfer]) -> float:
        """How long the busiest link takes for all ``transfers``; what a rank gives to itself takes nothing."""
        busy: dict[tuple[int, bool], float] = {}
        for transfer in as_tuple(transfers, "transfers", "(source, destination, bytes)"):
            if not isinstance(transfer, tuple) or len(transfer) != 3 or not _is_number(transfer[2]):
                raise BridgeError(f"a transfer is {shown(transfer)}; it must be (source rank, destination rank, bytes)")
            source, destination, nbytes = transfer
            if source == destination:
                continue
            for end in ((self.link_of(source), True), (self.link_of(destination), False)):
                busy[end] = busy.get(end, 0.0) + self.latency + nbytes / self.bandwidth
        return max(busy.values(), default=0.0)
