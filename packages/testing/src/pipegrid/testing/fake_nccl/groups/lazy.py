"""The rules of torch 2.15's ``nccl-lazy`` where they differ from those of nccl2.

A group has a primary, for batches and collectives, and a communicator for each peer, for lone messages in both
directions: made at the first one, when the host waits until the peer has come to one as well. Each has a stream, so
nothing orders a lone message and a batch, or lone messages of two peers.

The name of a pair's communicator has a count of the pairs of those two *ranks in their groups*, of all groups of the
process. A rank that has made more pairs of the same ranks than its peer looks for another name, and both wait for each
other until the timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from pipegrid.testing.fake_nccl.device import FakeDevice
from pipegrid.testing.fake_nccl.groups.meeting import global_ranks
from pipegrid.testing.fake_nccl.groups.nccl2 import Nccl2Group
from pipegrid.testing.fake_nccl.rules import Nccl2Rules


@frozen(kw_only=True)
class _PairOptions:
    """What torch gives a backend of its group, here of two ranks of a group."""

    store: Any
    group_rank: int
    group_size: int = 2
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


class LazyGroup(Nccl2Group):
    """A group of the backend ``fake_nccl`` by the rules of nccl-lazy; its own communicator is the primary."""

    def __init__(self, device: FakeDevice, options: Any, chosen: Any, rules: Nccl2Rules) -> None:
        super().__init__(device, options, chosen, rules)
        self._store = options.store
        self._members = global_ranks(options)
        self.pairs: dict[int, Nccl2Group] = {}

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Any:
        """Add a send to the batch; a lone one is launched on the communicator of the pair."""
        if self._batch is not None:
            return super().send(tensors, peer, tag)
        return self._pair(peer).send(tensors, int(peer > self._here), tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Any:
        """Add a receive to the batch; a lone one is launched on the communicator of the pair."""
        if self._batch is not None:
            return super().recv(tensors, peer, tag)
        return self._pair(peer).recv(tensors, int(peer > self._here), tag)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the operations of all communicators."""
        super().set_timeout(timeout)
        for pair in self.pairs.values():
            pair.set_timeout(timeout)

    def abort(self) -> None:
        """Abort the primary, then each pair: a primary's abort waits for a lone message that is under way."""
        super().abort()
        for pair in self.pairs.values():
            pair.abort()

    def shutdown(self) -> None:
        """Shut each pair down, then the primary."""
        for pair in self.pairs.values():
            pair.shutdown()
        super().shutdown()

    def _pair(self, peer: int) -> Nccl2Group:
        if peer == self._here:
            raise ValueError(f"a lone message of group {self._name} names this rank itself as its peer")
        self._require_not_aborted()
        if peer not in self.pairs:
            both = (min(self._here, peer), max(self._here, peer))
            attempts = self.device.pair_attempts
            attempt = attempts[both]
            attempts[both] += 1
            name = f"{self._name}/{both[0]}-{both[1]}/{attempt}"
            options = _PairOptions(
                store=dist.PrefixStore(name, self._store),  # type: ignore[attr-defined]  # public, untyped
                group_rank=both.index(self._here),
                timeout=timedelta(seconds=self.timeout),
                group_id=name,
                global_ranks_in_group=[self._members[rank] for rank in both],
            )
            self.pairs[peer] = Nccl2Group(self.device, options, self.options, self.rules)
        return self.pairs[peer]
