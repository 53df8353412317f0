"""The rules of torch 2.15's ``nccl-lazy`` where they differ from those of nccl2.

A group has a primary, for batches and collectives, and a communicator for each peer, for lone messages: see `pairs`.

The name of a pair's communicator has a count of the pairs of those two *ranks in their groups*, of all groups of the
process. A rank that has made more pairs of the same ranks than its peer looks for another name, and both wait for each
other until the timeout.
"""

from __future__ import annotations

from typing import ClassVar

from pipegrid.fake_nccl.groups.group import FakeGroup
from pipegrid.fake_nccl.groups.nccl2 import Nccl2Group
from pipegrid.fake_nccl.groups.pairs import PairsGroup


class LazyGroup(PairsGroup, Nccl2Group):
    """A group of the backend ``fake_nccl`` by the rules of nccl-lazy; its own communicator is the primary."""

    pair_class: ClassVar[type[FakeGroup]] = Nccl2Group

    def abort(self) -> None:
        """Abort the primary, then each pair: a primary's abort waits for a lone message that is under way."""
        super().abort()
        for pair in self.pairs.values():
            pair.abort()

    def _pair_name(self, both: tuple[int, int]) -> str:
        attempts = self.device.pair_attempts
        attempts[both] += 1
        return f"{super()._pair_name(both)}/{attempts[both] - 1}"
