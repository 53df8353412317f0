"""The boundary of a call: to the topology's neighbours, or to those that the caller names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict, Unpack

import torch.distributed as dist
from attrs import frozen

from pipegrid.bridges.vtp.boundary import VTPBoundary
from pipegrid.core.edge import Edge
from pipegrid.reshard.errors import BridgeError

Ranks: TypeAlias = int | Sequence[int] | None


class Named(TypedDict, total=False):
    """The neighbours of one call, where they are not the topology's; see `Peers`."""

    group: Any
    next_rank: Ranks
    prev_rank: Ranks


@frozen
class Peers:
    """The neighbours of ``rank`` in its replica of the pipeline, across ``boundaries``.

    A caller that names neighbours (``next_rank``, ``prev_rank``; or by ``group``, the ones that are next to this rank
    in its order, cyclic) chooses the boundary across which lies the stage that holds them. All ranks of both stages
    exchange their slices all the same, whichever of them are named. Another rank is a `BridgeError`.
    """

    rank: int
    boundaries: tuple[VTPBoundary, ...]

    def next(self, **named: Unpack[Named]) -> Edge | None:
        """The edge on which activations leave this rank; None on the last stage without a ring."""
        following, _ = self._checked(**named)
        return self._edge(following, "next")

    def previous(self, **named: Unpack[Named]) -> Edge | None:
        """The edge on which activations reach this rank; None on stage 0 without a ring."""
        _, before = self._checked(**named)
        return self._edge(before, "previous")

    def _checked(
        self, group: Any = None, next_rank: Ranks = None, prev_rank: Ranks = None
    ) -> tuple[Sequence[int], Sequence[int]]:
        if group is None and next_rank is None and prev_rank is None:
            return (), ()
        following, before = _as_list(next_rank), _as_list(prev_rank)
        for named, side in ((following, "next"), (before, "previous")):  # also the one that this call does not use
            self._edge(named, side)
        beside = [self._beside(dist.get_process_group_ranks(one)) for one in _as_list(group)]
        return following or [after for _, after in beside], before or [previous for previous, _ in beside]

    def _edge(self, named: Sequence[int], side: str) -> Edge | None:
        ends = [(b.edge, b.source.ranks, b.destination.ranks) for b in self.boundaries]
        if side == "previous":
            ends = [(edge, there, here) for edge, here, there in ends]
        across = [(edge, there) for edge, here, there in ends if self.rank in here]
        found = [edge for edge, there in across if set(named) <= set(there)]
        if named and not found:
            where = f"ranks {list(across[0][1])}" if across else "nowhere, at the end of a chain"
            raise BridgeError(
                f"rank {self.rank} names {list(named)} as its {side} ranks, but its lanes lead to {where}"
            )
        return found[0] if found else None

    def _beside(self, ranks: Sequence[int]) -> tuple[int, int]:
        """The ranks before and after this one in the order of a pipeline group, cyclic."""
        if self.rank not in ranks:
            raise BridgeError(f"rank {self.rank} is not in the group of ranks {list(ranks)}")
        index = ranks.index(self.rank)
        return ranks[index - 1], ranks[(index + 1) % len(ranks)]


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
