"""The process group of the fake NCCL, over a hidden gloo group.

`torch.distributed` finds the group by the backend's name, as it finds NCCL's. It is a subclass of `ProcessGroup`, since
torch's `Backend` cannot be subclassed in Python; hence ``type(group) is ProcessGroup`` is false, and
`batch_isend_irecv` posts its operations one by one: bracket a batch with `_start_coalescing` and `_end_coalescing`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipegrid.fake_nccl.device import FakeDevice
from pipegrid.fake_nccl.entries import QueueEntry, TransferRecord
from pipegrid.fake_nccl.groups.meeting import Ending, Meeting, global_ranks
from pipegrid.fake_nccl.groups.transfers import BACKEND, NEVER, Freeable, HiddenGroup, PostedTransfer, make_unreadable
from pipegrid.fake_nccl.groups.work import FakeWork
from pipegrid.fake_nccl.torch_compat import SPLITS_BACKENDS, BackendBase, GroupBase, tree_leaves, tree_map

# Collectives whose first argument is written and never read.
_WRITES_FIRST = frozenset(
    {"_allgather_base", "_reduce_scatter_base", "allgather", "alltoall", "alltoall_base", "reduce_scatter"}
)


class FakeGroup(GroupBase):  # type: ignore[misc]
    """A group of the backend ``fake_nccl``.

    Between `_start_coalescing` and `_end_coalescing` sends and receives gather into one entry, whose transfers are
    simultaneous. A send is done when its receive has the data. A receive's tensor holds NaN (integers 0x7f7f...) until
    its entry ends. A send's tensor is read when its entry starts; a tensor that no longer holds the posted values at
    the entry's end is a violation.

    A group connects when it is made. Of the groups that do so at their first use, the first batch or collective holds
    the host until every member has reached one.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> device = FakeDevice()
        >>> dist.init_process_group(register(device), store=dist.HashStore(), rank=0, world_size=1)
        >>> type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
        'FakeGroup'
        >>> device.close()
    """

    supports_coalescing = True
    supports_splitting = False
    shuts_down_alone = False  # whether a shutdown waits for the group's entries alone

    def __init__(self, device: FakeDevice, options: Any, chosen: Any = None) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.device, self.options = device, chosen
        self._name: str = options.group_id
        self._end = Ending(options, device)
        self.timeout: float = options.timeout.total_seconds()
        self.aborted = False
        # The devices that the group was connected to before its first use.
        self.connected: list[torch.device] = []
        self._here: int = options.group_rank
        self._ranks = global_ranks(options)
        self._meeting, self._connecting = partial(Meeting, options=options), threading.Lock()
        self._make_hidden = partial(HiddenGroup, options, self._ranks, device)
        self._hidden: HiddenGroup | None = None
        self._batch: list[tuple[PostedTransfer, Tensor]] | None = None
        self._splits = 0
        if not self._connects_at_use():
            self._connect()

    def _connects_at_use(self) -> bool:
        """Whether the group connects at its first use, and not when it is made."""
        return False

    def _connect(self) -> HiddenGroup:
        """The connections of the communicator; where there are none, made with all members."""
        self._require_not_aborted()
        with self._connecting:
            if self._hidden is None:
                self._meeting("make").connect(self.timeout)
                hidden = self._make_hidden()
                # Gloo fails at a member that still connects when another one, connected before it, cuts already.
                self._meeting("go").connect(self.timeout)
                self._hidden = hidden
                self.device.add_group(self._name, self._hidden.cut, self._ranks, self._here)
            return self._hidden

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> FakeWork | None:
        """Launch a send, or add it to the batch. Tags are ignored, as NCCL ignores them."""
        del tag
        return self._post(tensors, peer, sending=True)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> FakeWork | None:
        """Launch a receive, or add it to the batch."""
        del tag
        return self._post(tensors, peer, sending=False)

    def _start_coalescing(self, device: Any = None) -> None:
        del device
        self._batch = []

    def _end_coalescing(self, device: Any = None) -> FakeWork | None:
        del device
        batch, self._batch = self._batch, None
        if batch is None:
            raise RuntimeError("_end_coalescing without _start_coalescing")
        return self._launch_transfers(batch, batched=True) if batch else None

    def _post(self, tensors: Sequence[Tensor], peer: int, *, sending: bool) -> FakeWork | None:
        verb = "send" if sending else "receive"
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError(f"a tensor to {verb} is not contiguous; NCCL moves plain memory")
        if peer == self._here:
            raise ValueError(f"a {verb} names this rank itself as its peer")
        transfers = []
        streams = self.device.streams
        with streams.paused():
            for tensor in tensors:
                if not sending and streams.late is None:
                    make_unreadable(tensor)
                there = streams.on_device(tensor)
                copy = there.detach().clone() if sending else torch.empty_like(there, requires_grad=False)
                memory = there if sending or self._runs_later() else self._received_into(there)
                transfers.append((PostedTransfer(sending, memory, peer, copy), tensor))
        if self._batch is None:
            return self._launch_transfers(transfers, batched=False)
        self._batch += transfers
        return None

    def _received_into(self, tensor: Tensor) -> Tensor | Freeable:
        """The reference that the backend keeps to a tensor to receive: the tensor, or one that its user may free."""
        return tensor

    def _launch_transfers(self, batch: Sequence[tuple[PostedTransfer, Tensor]], *, batched: bool) -> FakeWork:
        transfers, late, hidden = [transfer for transfer, _ in batch], self._runs_later(), self._connect()
        operations = tuple(
            TransferRecord("send" if each.sending else "recv", self._ranks[each.peer], each.copy.nbytes)
            for each in transfers
        )

        def run() -> None:
            if late:  # what was posted is there now
                for each in transfers:
                    if isinstance(each.tensor, Tensor):
                        each.copy.copy_(each.tensor) if each.sending else make_unreadable(each.tensor)
            hidden.exchange(transfers, batched=batched)

        reads = [given for each, given in batch if each.sending]
        writes = [given for each, given in batch if not each.sending]
        return self._launch("p2p", operations, run, reads=reads, writes=writes)

    def _collective(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> FakeWork:
        tensors = [tensor for argument in arguments for tensor in _tensors(argument)]
        written = _tensors(arguments[0]) if name in _WRITES_FIRST else tensors
        streams = self.device.streams
        late, hidden = self._runs_later(), self._connect()
        with streams.paused():
            there = tree_map(lambda value: streams.on_device(value) if isinstance(value, Tensor) else value, arguments)
            inputs = _tensors(there[0]) if name in _WRITES_FIRST else []
            for tensor in () if late else inputs:
                make_unreadable(tensor)

        def run() -> None:
            for tensor in inputs if late else ():
                make_unreadable(tensor)
            getattr(hidden.gloo, name)(*there, **options).wait(NEVER)

        return self._launch(name, (), run, reads=tensors, writes=written, holds=name == "barrier")

    def _launch(
        self,
        kind: str,
        operations: tuple[TransferRecord, ...],
        run: Callable[[], None],
        *,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        holds: bool = False,
    ) -> FakeWork:
        entry = self.device.launch(self._name, kind, operations, run, self.timeout, reads=reads, writes=writes)
        return self._work_of(entry, reads, holds=holds or self.device.waits_hold)

    def _runs_later(self) -> bool:
        """Whether tensors get their values after the launch: on a late device, and in a graph."""
        return self.device.streams.late is not None or self.device.graph is not None

    def _require_not_aborted(self) -> None:
        if self.aborted:
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._here} of group {self._name}")

    def _work_of(self, entry: QueueEntry, reads: Sequence[Tensor], *, holds: bool) -> FakeWork:
        del reads
        return FakeWork(entry, self.device, holds=holds, abort=self.abort)

    def abort(self) -> None:
        """End the group's entries with an error, then wait for the whole device."""
        groups = self._aborted_together()
        for group in groups:
            group._end.abort()  # noqa: SLF001 (of the same class)
            group.aborted = True
        error = dist.DistBackendError(f"group {self._name} was aborted")
        self.device.abort([group.group_name for group in groups], error)

    def _aborted_together(self) -> list[FakeGroup]:
        """The communicators that an abort of the group ends at the same time."""
        return [self]

    def shutdown(self) -> None:
        """Wait for the whole device and the other members, but not after an abort; the group takes no more entries."""
        if not self.aborted:
            self.device.shut_down(self._name, alone=self.shuts_down_alone)
            if self._hidden is not None:
                self._end.meet()
        self.aborted = True

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connect before the first use, with all members.

        Raises:
            DistBackendError: some did not arrive before the group's timeout.
        """
        self._meeting("connect").connect(self.timeout)
        self._connect()
        self.connected.append(device)

    def perform_nocolor_split(self, device: Any = None) -> None:
        """Take part in a split as a rank that the new group leaves out."""
        del device
        self.split(self.timeout)

    def split(self, seconds: float) -> None:
        """Split this group's communicator for a new group, in which all members of this one take part.

        Raises:
            DistBackendError: some did not arrive within ``seconds``.
        """
        self._splits += 1
        self._meeting(f"split {self._splits}").connect(seconds, ", to split this group for a new one")

    def _get_backend(self, device: Any) -> Any:
        # Only splits ask by the device that a group is bound to.
        return SplitSource(self) if SPLITS_BACKENDS and torch.device(device).index is not None else self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout.total_seconds()

    set_timeout = _set_default_timeout

    def getBackendName(self) -> str:  # noqa: N802 (torch's trampoline calls it so)
        """The backend's name."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """The group's name, the same on all members."""
        return self._name


class SplitSource(BackendBase):  # type: ignore[misc]  # torch's stubs have no such class
    """A backend around a group: torch 2.15 splits backends, and the groups of the fake are process groups."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    @property
    def supports_splitting(self) -> bool:
        """Whether new groups are split from this one."""
        return bool(self._group.supports_splitting)

    def perform_nocolor_split(self, device: Any) -> None:
        """Take part in a split as a rank that the new group leaves out."""
        self._group.perform_nocolor_split(device)

    def eager_connect_single_device(self, device: Any) -> None:
        """Connect before the first use."""
        self._group.eager_connect_single_device(device)


def _forward(name: str) -> Callable[..., FakeWork]:
    def collective(self: FakeGroup, *arguments: Any, **options: Any) -> FakeWork:
        return self._collective(name, arguments, options)

    collective.__name__ = name
    collective.__doc__ = f"Launch gloo's ``{name}`` in stream order."
    return collective


# Newer names of torch's (2.13), and those of its gloo groups.
_RENAMED = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}
for _name in (
    *("allgather", "allgather_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "barrier", "broadcast"),
    *("gather", "reduce", "reduce_scatter", "scatter", *_RENAMED, *_RENAMED.values()),
):
    setattr(FakeGroup, _name, _forward(_RENAMED.get(_name, _name)))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
