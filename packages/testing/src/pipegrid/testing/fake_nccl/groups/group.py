"""The process group and the works of the fake NCCL, over a hidden gloo group.

`torch.distributed` finds the group by the backend's name, as it finds NCCL's. It is a subclass of `ProcessGroup`, since
torch's `Backend` cannot be subclassed in Python; hence ``type(group) is ProcessGroup`` is false, and
`batch_isend_irecv` posts its operations one by one: bracket a batch with `_start_coalescing` and `_end_coalescing`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor

from pipegrid.testing.fake_nccl.device import FakeDevice
from pipegrid.testing.fake_nccl.entries import Entry, MismatchError, Operation
from pipegrid.testing.fake_nccl.groups.ending import Ending
from pipegrid.testing.fake_nccl.torch_compat import GroupBase, WorkBase, tree_map

BACKEND = "fake_nccl"
# Gloo's own limit: never the first to end a wait.
_NEVER = timedelta(days=36_500)
# Tags of the hidden group: payloads, the receiver's answers, one that no rank ever sends, and what a payload is.
_DATA, _ANSWER, _UNSENT, _KIND = 0, 1, 2, 3
_KIND_BYTES = 48
_UNREAD_BYTE = 0x7F
# Collectives whose first argument is written and never read.
_WRITES_FIRST = frozenset(
    {"_allgather_base", "_reduce_scatter_base", "allgather", "alltoall", "alltoall_base", "reduce_scatter"}
)


@define(eq=False)
class _Transfer:
    """One send or receive of a batch."""

    sending: bool
    tensor: Tensor
    peer: int
    # Sends: the values at the call (on a late device at the start). Receives: where data waits for the entry's end.
    copy: Tensor


class FakeWork(WorkBase):  # type: ignore[misc]
    """The work of one entry, with the behaviour of NCCL's.

    `is_completed` is true for an entry that failed, too; then `exception` returns the error. `wait` raises nothing,
    as that of nccl-legacy; nccl2's raises an error that is known by then (`nccl2.Nccl2Work`). Its two forms: see
    `FakeDevice`. With a timeout it holds the host in both, and raises past the timeout or what the entry failed with.
    """

    def __init__(self, entry: Entry, device: FakeDevice, *, holds: bool) -> None:
        super().__init__()
        self.entry = entry
        self._device = device
        self._holds = holds

    def is_completed(self) -> bool:
        """The entry has ended, well or not. On virtual streams a poll orders nothing: it might have come sooner."""
        self._device.streams.poll(self.entry.signal)
        return self.entry.ended.is_set()

    def is_success(self) -> bool:
        """The entry has ended well."""
        return self.entry.ended.is_set() and self.entry.error is None

    def exception(self) -> Exception | None:
        """The error of an entry that failed."""
        return self.entry.error if self.entry.ended.is_set() else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order later work of the current stream after the entry."""
        streams = self._device.streams
        self._device.order(self.entry)
        if timeout is not None and timeout > timedelta(0):
            with streams.host_waiting():
                if not self.entry.ended.wait(timeout.total_seconds()):
                    raise dist.DistBackendError(f"{self.entry} is not done after {timeout.total_seconds():g} s")
            streams.host_waits("Work.wait(timeout)", self.entry.clock)
            if self.entry.error is not None:
                raise self.entry.error
        elif self._holds:
            with streams.host_waiting():
                self.entry.released.wait()
        return True

    synchronize = wait

    def get_future(self) -> Any:
        """A future of no value, done at the entry's end."""
        return self._future(lambda: None)

    def get_future_result(self) -> Any:
        """A future of the work's status, done at the entry's end: NCCL's are 0 for success, 2 for a lost connection."""
        return self._future(lambda: 0 if self.entry.error is None else 2)

    def _future(self, value: Callable[[], Any]) -> Any:
        future: Any = torch.futures.Future()
        self.entry.when_ended(lambda: future.set_result(value()))
        return future


class FakeGroup(GroupBase):  # type: ignore[misc]
    """A group of the backend ``fake_nccl``.

    Between `_start_coalescing` and `_end_coalescing` sends and receives gather into one entry, whose transfers are
    simultaneous. A send is done when its receive has the data. A receive's tensor holds NaN (integers 0x7f7f...) until
    its entry ends. A send's tensor is read when its entry starts; a tensor that no longer holds the posted values at
    the entry's end is a violation.
    """

    supports_coalescing = True
    supports_splitting = False

    def __init__(self, device: FakeDevice, options: Any, chosen: Any = None) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.device = device
        self.options = chosen
        self._name: str = options.group_id
        self._end = Ending(self._name, options, device)
        self.timeout: float = options.timeout.total_seconds()
        self.aborted = False
        # The devices that the group was connected to before its first use.
        self.connected: list[torch.device] = []
        self._here: int = options.group_rank
        self._size: int = options.group_size
        self._ranks: list[int] = list(options.global_ranks_in_group) or list(range(options.group_size))
        self._hidden: Any = dist.ProcessGroupGloo(
            dist.PrefixStore(BACKEND, options.store),  # type: ignore[attr-defined]
            options.group_rank,
            options.group_size,
            options.timeout,
        )
        self._hidden.set_timeout(_NEVER)
        self._batch: list[tuple[_Transfer, Tensor]] | None = None
        device.add_group(self._name, self._cut)

    # Point to point

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
        return self._launch_transfers(batch) if batch else None

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
                    _make_unreadable(tensor)
                there = streams.on_device(tensor)
                copy = there.detach().clone() if sending else torch.empty_like(there, requires_grad=False)
                transfers.append((_Transfer(sending, there, peer, copy), tensor))
        if self._batch is None:
            return self._launch_transfers(transfers)
        self._batch += transfers
        return None

    def _launch_transfers(self, batch: Sequence[tuple[_Transfer, Tensor]]) -> FakeWork:
        transfers, late = [transfer for transfer, _ in batch], self.device.streams.late is not None
        operations = tuple(
            Operation("send" if each.sending else "recv", self._ranks[each.peer], each.tensor.nbytes)
            for each in transfers
        )

        def run() -> None:
            if late:  # what was posted is there now
                for each in transfers:
                    each.copy.copy_(each.tensor) if each.sending else _make_unreadable(each.tensor)
            self._exchange(transfers)

        return self._launch(
            "p2p",
            operations,
            run,
            reads=[given for each, given in batch if each.sending],
            writes=[given for each, given in batch if not each.sending],
        )

    def _exchange(self, transfers: Sequence[_Transfer]) -> None:
        """Move a batch, and compare the two ends of each transfer."""
        kinds, others = self._move(transfers)
        for transfer, kind, other in zip(transfers, kinds, others, strict=True):
            if not torch.equal(kind, other):
                raise self._mismatch(transfer, _text(kind), _text(other))
        for transfer in transfers:
            if not transfer.sending:
                transfer.tensor.detach().copy_(transfer.copy)
            elif not _same_bytes(transfer.tensor, transfer.copy):
                self.device.violations.append(
                    f"a send of {transfer.tensor.nbytes} bytes to rank {self._ranks[transfer.peer]} in group "
                    f"{self._name}: its tensor was written to between the call and the end of the transfer"
                )

    def _move(self, transfers: Sequence[_Transfer]) -> tuple[list[Tensor], list[Tensor]]:
        """Move a batch, all sends posted before anything is waited for; the kinds of message here and there."""
        hidden = self._hidden
        kinds = [_kind(transfer.tensor) for transfer in transfers]
        others = [torch.zeros_like(kind) for kind in kinds]  # of the other side: told with a send, and in the answer
        posted: list[list[Any]] = []
        for transfer, kind, other in zip(transfers, kinds, others, strict=True):
            if transfer.sending:
                payload = transfer.tensor.detach().clone()
                told = hidden.send([kind], transfer.peer, _KIND), hidden.recv([other], transfer.peer, _ANSWER)
                posted.append([payload, hidden.send([payload], transfer.peer, _DATA), *told])
            else:
                posted.append([hidden.recv([other], transfer.peer, _KIND)])
        for transfer, kind, other, works in zip(transfers, kinds, others, posted, strict=True):
            if not transfer.sending:
                works.pop().wait(_NEVER)
                there = transfer.copy if torch.equal(kind, other) else torch.empty(_nbytes(other), dtype=torch.uint8)
                hidden.recv([there], transfer.peer, _DATA).wait(_NEVER)
                works.append(hidden.send([kind], transfer.peer, _ANSWER))
        for works in posted:
            for work in works:
                if not isinstance(work, Tensor):
                    work.wait(_NEVER)
        return kinds, others

    def _mismatch(self, transfer: _Transfer, here: str, there: str) -> MismatchError:
        verb, other = ("sends", "receives") if transfer.sending else ("receives", "sends")
        text = (
            f"rank {self._ranks[self._here]} {verb} {here} in group {self._name} where rank "
            f"{self._ranks[transfer.peer]} {other} {there}; NCCL compares neither, and hangs or moves a part"
        )
        self.device.violations.append(text)
        return MismatchError(text)

    # Collectives: gloo's, in stream order

    def _collective(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> FakeWork:
        tensors = [tensor for argument in arguments for tensor in _tensors(argument)]
        written = _tensors(arguments[0]) if name in _WRITES_FIRST else tensors
        streams = self.device.streams
        late = streams.late is not None
        with streams.paused():
            there = tree_map(lambda value: streams.on_device(value) if isinstance(value, Tensor) else value, arguments)
            unread = _tensors(there[0]) if name in _WRITES_FIRST else []
            for tensor in () if late else unread:
                _make_unreadable(tensor)

        def run() -> None:
            for tensor in unread if late else ():
                _make_unreadable(tensor)
            getattr(self._hidden, name)(*there, **options).wait(_NEVER)

        return self._launch(name, (), run, reads=tensors, writes=written, holds=name == "barrier")

    # Launching and ending

    def _launch(
        self,
        kind: str,
        operations: tuple[Operation, ...],
        run: Callable[[], None],
        *,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        holds: bool = False,
    ) -> FakeWork:
        if self.aborted:
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._here} of group {self._name}")
        entry = self.device.launch(self._name, kind, operations, run, self.timeout, reads=reads, writes=writes)
        return self._work_of(entry, reads, holds=holds or self.device.waits_hold)

    def _work_of(self, entry: Entry, reads: Sequence[Tensor], *, holds: bool) -> FakeWork:
        del reads
        return FakeWork(entry, self.device, holds=holds)

    def abort(self) -> None:
        """End the group's entries with an error, then wait for the whole device."""
        self._end.abort()
        self.aborted = True
        self.device.abort(self._name, dist.DistBackendError(f"group {self._name} was aborted"))

    def shutdown(self) -> None:
        """Wait for the whole device and for the other members; the group takes no entries from then on."""
        if not self.aborted:
            self.device.shut_down(self._name)
            self._end.meet()
        self.aborted = True

    def _cut(self) -> None:
        """Close the hidden group's connections: a gloo wait that times out does, at both ends."""
        for peer in range(self._size):
            if peer != self._here:
                with contextlib.suppress(RuntimeError):
                    work = self._hidden.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNSENT)
                    work.wait(timedelta(milliseconds=1))

    # What callers ask a group or its backend for

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connect before the first use; the fake only records it."""
        self.connected.append(device)

    def _get_backend(self, device: Any) -> FakeGroup:
        del device
        return self

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
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def _make_unreadable(tensor: Tensor) -> None:
    """Fill with NaN, or with 0x7f in each byte of an integer."""
    plain = tensor.detach()
    if plain.is_floating_point() or plain.is_complex():
        plain.fill_(float("nan"))
    elif plain.dtype is torch.bool:
        plain.fill_(True)
    else:
        plain.fill_(int.from_bytes([_UNREAD_BYTE] * plain.element_size(), "little"))


def _kind(tensor: Tensor) -> Tensor:
    """Size and dtype of a tensor, as text in bytes."""
    text = f"{tensor.nbytes} bytes of {tensor.dtype}"
    return torch.tensor(list(text.encode().ljust(_KIND_BYTES)), dtype=torch.uint8)


def _text(kind: Tensor) -> str:
    return bytes(kind.tolist()).decode().strip()


def _nbytes(kind: Tensor) -> int:
    return int(_text(kind).split()[0])


def _same_bytes(tensor: Tensor, other: Tensor) -> bool:
    here, there = tensor.detach().contiguous(), other.contiguous()
    return torch.equal(here.reshape(-1).view(torch.uint8), there.reshape(-1).view(torch.uint8))
