"""The messages between two sets of copies, and their time over the links. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Literal

from attrs import field, frozen

from pipegrid.core.fields import Amount, Index, checked_fields, number, shown
from pipegrid.reshard.box import shares
from pipegrid.reshard.errors import BridgeError


def _as_groups(value: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    try:
        return tuple(tuple(sorted(ranks)) for ranks in value)
    except TypeError:
        raise BridgeError(f"Links.shared is {shown(value)}; it must be a list of sets of ranks") from None


@frozen(slots=False, field_transformer=checked_fields(BridgeError))
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

    Examples:
        >>> Links(bandwidth=50e9, latency=5e-6, shared=[(0, 1)]).seconds([(0, 2, 50e6), (1, 3, 50e6)])
        0.00201
    """

    bandwidth: Annotated[float, number(above=0.0)]
    latency: Amount
    shared: tuple[tuple[Index, ...], ...] = field(default=(), converter=_as_groups, kw_only=True)

    def __attrs_post_init__(self) -> None:
        ranks = [rank for link in self.shared for rank in link]
        if len(set(ranks)) != len(ranks):
            raise BridgeError(f"Links.shared is {self.shared}; a rank has one link")

    @cached_property
    def _first_of(self) -> dict[int, int]:
        return {rank: ranks[0] for ranks in self.shared for rank in ranks}

    def link_of(self, rank: int) -> int:
        """The link of a rank, named after the first rank on it."""
        return self._first_of.get(rank, rank)

    def seconds(self, messages: Sequence[tuple[int, int, float]]) -> float:
        """Seconds that the busiest link takes for all messages (sending rank, receiving rank, bytes).

        A message of a rank to itself takes no time.
        """
        busy: dict[tuple[int, bool], float] = {}
        for source, destination, nbytes in messages:
            if source == destination:
                continue
            for end in ((self.link_of(source), True), (self.link_of(destination), False)):
                busy[end] = busy.get(end, 0.0) + self.latency + nbytes / self.bandwidth
        return max(busy.values(), default=0.0)


Strategy = Literal["direct", "leader", "auto"]
"""Sending of copies: all share it, one sends all to one that passes it on, or the one that keeps links less busy."""

AUTO_LEADER_BYTES = 64 * 1024
"""Below this many bytes between two sets of copies, ``"auto"`` uses a leader where no links are given."""

Route = tuple[int, int]
"""The ranks that a message goes from and to."""


def leaders(givers: Sequence[int], takers: Sequence[int], *, backward: bool) -> Route:
    """The last of the source's copies and the first of the destination's, in either direction."""
    return (givers[0], takers[-1]) if backward else (givers[-1], takers[0])


@frozen(field_transformer=checked_fields(BridgeError))
class StrategyChoice:
    """A strategy, and the figures by which ``"auto"`` decides.

    Attributes:
        strategy: of sending copies (`plan_reshard`).
        leader_below: bytes below which ``"auto"`` takes a leader, where the links are not known.
        links: speeds, where they are known.

    Examples:
        >>> StrategyChoice("auto", leader_below=4096).leads([0, 1], [2, 3], nbytes=1024, backward=False)
        True
    """

    strategy: Strategy = "direct"
    leader_below: Index = AUTO_LEADER_BYTES
    links: Links | None = None

    def leads(self, givers: Sequence[int], takers: Sequence[int], nbytes: int, *, backward: bool) -> bool:
        """Whether one of ``givers`` sends all ``nbytes`` to one of ``takers``.

        With links, the strategy that keeps the busiest link busy for less time; where both take the same, all ranks
        share, since the completion then moves less. The time of the completion is not counted: it moves about the same
        bytes in both, inside a side.
        """
        if self.strategy != "auto":
            return self.strategy == "leader"
        if self.links is None:
            return nbytes < self.leader_below
        parts = shares(len(givers), len(takers))
        direct = [(givers[i], takers[j], float(nbytes * (high - low))) for i, j, low, high in parts]
        alone = [(*leaders(givers, takers, backward=backward), float(nbytes))]
        return self.links.seconds(alone) < self.links.seconds(direct)
