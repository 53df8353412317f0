"""Who sends to whom between two sets of copies: everybody a share, or one rank to one rank. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attrs import field, frozen

from pipegrid.bridges.checks import as_integer, as_kind, shown
from pipegrid.bridges.errors import BridgeError
from pipegrid.bridges.reshard.box import shares
from pipegrid.bridges.reshard.links import Links

Strategy = Literal["direct", "leader", "auto"]
STRATEGIES: tuple[Strategy, ...] = ("direct", "leader", "auto")

AUTO_LEADER_BYTES = 64 * 1024
"""Below this many bytes between two sets of copies, ``"auto"`` leads where it is not told of the links."""

Route = tuple[int, int]


def check_strategy(strategy: str) -> None:
    """Refuse a strategy that does not exist."""
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise BridgeError(f"strategy {shown(strategy)} is unknown; use one of {list(STRATEGIES)}")


def leaders(givers: Sequence[int], takers: Sequence[int], *, backward: bool) -> Route:
    """The last of the source's copies and the first of the destination's, in either direction."""
    return (givers[0], takers[-1]) if backward else (givers[-1], takers[0])


def _as_bytes(value: int) -> int:
    return as_integer(value, "leader_below (bytes)", least=0)


@frozen
class Choice:
    """A strategy, and what ``"auto"`` decides by: the links where they are known, bytes where they are not."""

    strategy: Strategy = "direct"
    leader_below: int = field(default=AUTO_LEADER_BYTES, converter=_as_bytes)
    links: Links | None = None

    def __attrs_post_init__(self) -> None:
        check_strategy(self.strategy)
        if self.links is not None:
            as_kind(self.links, "links", Links, "bandwidth and latency of the links, or None")

    def leads(self, givers: Sequence[int], takers: Sequence[int], nbytes: int, *, backward: bool) -> bool:
        """Whether one of ``givers`` sends all ``nbytes`` to one of ``takers``.

        With links, whatever keeps the busiest link busy for less time; where both take the same, everybody
        shares, since the completion then moves less. What the completion takes is not counted: it moves about the
        same bytes either way, inside a side.
        """
        if self.strategy != "auto":
            return self.strategy == "leader"
        if self.links is None:
            return nbytes < self.leader_below
        direct = [
            (givers[i], takers[j], float(nbytes * (high - low))) for i, j, low, high in shares(len(givers), len(takers))
        ]
        alone = [(*leaders(givers, takers, backward=backward), float(nbytes))]
        return self.links.seconds(alone) < self.links.seconds(direct)
