"""The rules of torch 2.15's ``nccl-lazy``, where they differ from those of nccl2."""

from __future__ import annotations

from typing import ClassVar

from pipegrid.fake_nccl.groups.group import FakeGroup
from pipegrid.fake_nccl.groups.nccl2 import Nccl2Group
from pipegrid.fake_nccl.groups.pairs import PairsGroup


class LazyGroup(PairsGroup, Nccl2Group):
    """A group of the backend ``fake_nccl`` by the rules of nccl-lazy, where they differ from `Nccl2Group`'s.

    Batches and collectives are on the group's own communicator (the primary), lone messages on one of their pair, each
    with a stream of its own.

    - A pair connects at its first lone message: the host waits until the peer has one, for the group's timeout at
      most; the error names the ranks that did not connect.
    - A batch never matches a lone message, and a lone message may overtake the batch before it.
    - `abort` waits for lone messages under way, since the primary goes first.
    - The name of a pair's communicator counts the pairs of those two *ranks in their groups*, of all groups of the
      process. Ranks with different numbers of such groups look for different names, and both wait until the timeout.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> device = FakeDevice(nccl2=Nccl2Rules(), lazy=True)
        >>> dist.init_process_group(register(device), store=dist.HashStore(), rank=0, world_size=1)
        >>> type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
        'LazyGroup'
        >>> device.close()
    """

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
