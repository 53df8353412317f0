"""Communicators of pairs beside that of a group: for lone messages, as in ``nccl-legacy`` and ``nccl-lazy``.

A batch or a collective is on the group's communicator; a lone message is on that of the two ranks, in both directions,
made at the first one: the host waits there until the peer has one as well. Each communicator has a stream, so
nothing orders a lone message and a batch, or lone messages of two peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipegrid.fake_nccl.device import FakeDevice
from pipegrid.fake_nccl.groups.group import FakeGroup
from pipegrid.fake_nccl.groups.meeting import global_ranks
from pipegrid.fake_nccl.groups.nccl2 import Nccl2Group


class PairsGroup(FakeGroup):
    """A group with a communicator for each pair of its ranks that exchanges lone messages: ``pairs``, by peer."""

    pair_class: ClassVar[type[FakeGroup]] = FakeGroup

    def __init__(self, device: FakeDevice, options: Any, chosen: Any = None) -> None:
        super().__init__(device, options, chosen)
        self._store = options.store
        self._members = global_ranks(options)
        self.pairs: dict[int, FakeGroup] = {}

    def _post(self, tensors: Sequence[Tensor], peer: int, *, sending: bool) -> Any:
        """Add a message to the batch; a lone one is launched on the communicator of the pair."""
        if self._batch is not None or not self._has_pairs():
            return super()._post(tensors, peer, sending=sending)
        pair = self._pair(peer)
        return (pair.send if sending else pair.recv)(tensors, int(peer > self._here))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the operations of all communicators."""
        super().set_timeout(timeout)
        for pair in self.pairs.values():
            pair.set_timeout(timeout)

    def shutdown(self) -> None:
        """Shut each pair down, then the group's communicator."""
        for pair in self.pairs.values():
            pair.shutdown()
        super().shutdown()

    def _has_pairs(self) -> bool:
        """Whether a lone message is on the communicator of its pair."""
        return True

    def _pair_name(self, both: tuple[int, int]) -> str:
        """The name of a new communicator of two ranks of the group, the same on both."""
        return f"{self._name}/{both[0]}-{both[1]}"

    def _pair(self, peer: int) -> FakeGroup:
        if peer == self._here:
            raise ValueError(f"a lone message of group {self._name} names this rank itself as its peer")
        self._require_not_aborted()
        if peer not in self.pairs:
            both = (min(self._here, peer), max(self._here, peer))
            name = self._pair_name(both)
            options = SimpleNamespace(  # as torch gives them to a backend
                store=dist.PrefixStore(name, self._store),  # type: ignore[attr-defined]  # public, untyped
                group_rank=both.index(self._here),
                group_size=2,
                timeout=timedelta(seconds=self.timeout),
                group_id=name,
                global_ranks_in_group=[self._members[rank] for rank in both],
            )
            self.pairs[peer] = self.pair_class(self.device, options, self.options)
        return self.pairs[peer]


class LegacyGroup(PairsGroup):
    """A group of the backend ``fake_nccl`` by the rules of nccl-legacy.

    It connects at its first batch or collective, which holds the host until all members have reached one. A lone
    message is on a communicator of the pair, with a stream of its own, which both ends make at their first one. A group
    with a bound device (``device_id``, or `eager_connect_single_device`) is connected before, and has one communicator
    for everything; new groups beside a bound default group are splits of it. An abort ends all communicators of a group
    together.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> device = FakeDevice(lazy=True)
        >>> dist.init_process_group(register(device), store=dist.HashStore(), rank=0, world_size=1)
        >>> type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
        'LegacyGroup'
        >>> device.close()
    """

    supports_splitting = True
    _set_default_timeout = PairsGroup.set_timeout

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connect with all members, and bind the group to the device."""
        super().eager_connect_single_device(device)
        self.bound_device_id = device

    def _connects_at_use(self) -> bool:
        return True

    def _has_pairs(self) -> bool:
        return not self.connected

    def _aborted_together(self) -> list[FakeGroup]:
        return [self, *self.pairs.values()]


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
