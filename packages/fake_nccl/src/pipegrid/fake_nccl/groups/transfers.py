"""Transfers of the fake NCCL: how the data of a batch moves over a hidden gloo group, and what both ends compare."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor

from pipegrid.fake_nccl.device import FakeDevice
from pipegrid.fake_nccl.entries import MismatchError
from pipegrid.fake_nccl.torch_compat import WeakStorage, living

BACKEND = "fake_nccl"
# Gloo's own limit: never the first to end a wait.
NEVER = timedelta(days=36_500)
# Tags of the hidden group: payloads, the receiver's answers, one that no rank ever sends, and what a payload is.
_DATA, _ANSWER, _UNSENT, _KIND = 0, 1, 2, 3
_KIND_BYTES = 48
_UNREAD_BYTE = 0x7F
_LOOK_SECONDS = 0.002  # between two looks for the other end of a first message


class Freeable:
    """A tensor that a receive writes to, whose memory its user may free meanwhile: the backend does not keep it."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage: Any = WeakStorage(tensor.untyped_storage())
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._dtype = tensor.dtype

    def living(self) -> Tensor | None:
        """The tensor; None where its memory is gone."""
        storage, found = living(self._storage), torch.empty(0, dtype=self._dtype)
        return None if storage is None else found.set_(storage, *self._place)


@define(eq=False)
class PostedTransfer:
    """One send or receive of a batch."""

    sending: bool
    tensor: Tensor | Freeable
    peer: int
    # Sends: the values at the call (on a late device at the start). Receives: where data waits for the entry's end.
    copy: Tensor

    @property
    def memory(self) -> Tensor | None:
        """The tensor that is sent, or received into; None where its user has freed it."""
        return self.tensor.living() if isinstance(self.tensor, Freeable) else self.tensor


class HiddenGroup:
    """The gloo group that moves the data of one communicator, of members with these global ``ranks``.

    ``options``: of the communicator's group, as torch gives them to a backend.
    """

    def __init__(self, options: Any, ranks: Sequence[int], device: FakeDevice) -> None:
        self._name: str = options.group_id
        self._here: int = options.group_rank
        self._ranks, self._device, self._violations = ranks, device, device.violations
        self._lock = threading.Lock()
        self._buffered: Counter[int] = Counter()  # bytes of eager sends on their way, by peer
        self._cut = threading.Event()
        # Ways ("0>1") that had a message, and what each end says of its first: the ways that its batch connects.
        self._met: set[str] = set()
        self._first = dist.PrefixStore("fake_nccl/first", options.store)  # type: ignore[attr-defined]  # untyped
        store = dist.PrefixStore(BACKEND, options.store)  # type: ignore[attr-defined]
        self.gloo: Any = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
        self.gloo.set_timeout(NEVER)

    def exchange(self, transfers: Sequence[PostedTransfer], *, batched: bool) -> None:
        """Move a batch or a lone message, and compare the two ends of each transfer."""
        if self._device.connects_in_batches:
            self._connect_peers(transfers, batched=batched)
        kinds, others = self._move(transfers)
        for transfer, kind, other in zip(transfers, kinds, others, strict=True):
            if not torch.equal(kind, other):
                raise self._mismatch(transfer, _text(kind), _text(other))
        for transfer in transfers:
            there = transfer.memory
            if there is None:
                self._violations.append(
                    f"memory of a receive of {transfer.copy.nbytes} bytes from rank {self._ranks[transfer.peer]} in "
                    f"group {self._name} was freed before the transfer ended, which the backend does not wait for"
                )
            elif not transfer.sending:
                there.detach().copy_(transfer.copy)
            elif not torch.equal(_bytes(there), _bytes(transfer.copy)):
                self._violations.append(
                    f"a send of {there.nbytes} bytes to rank {self._ranks[transfer.peer]} in group "
                    f"{self._name}: its tensor was written to between the call and the end of the transfer"
                )

    def _move(self, transfers: Sequence[PostedTransfer]) -> tuple[list[Tensor], list[Tensor]]:
        """Move a batch, all sends posted before anything is waited for; the kinds of message here and there."""
        hidden = self.gloo
        kinds = [_kind(transfer.copy) for transfer in transfers]
        others = [torch.zeros_like(kind) for kind in kinds]  # of the other side: told with a send, and in the answer
        posted: list[list[Any]] = []
        for transfer, kind, other in zip(transfers, kinds, others, strict=True):
            if transfer.sending:
                payload = cast("Tensor", transfer.memory).detach().clone()  # as it is when the entry starts
                told = hidden.send([kind], transfer.peer, _KIND), hidden.recv([other], transfer.peer, _ANSWER)
                posted.append([payload, hidden.send([payload], transfer.peer, _DATA), *told])
            else:
                posted.append([hidden.recv([other], transfer.peer, _KIND)])
        for transfer, kind, other, works in zip(transfers, kinds, others, posted, strict=True):
            if not transfer.sending:
                works.pop().wait(NEVER)
                there = transfer.copy if torch.equal(kind, other) else torch.empty(_nbytes(other), dtype=torch.uint8)
                hidden.recv([there], transfer.peer, _DATA).wait(NEVER)
                works.append(hidden.send([kind], transfer.peer, _ANSWER))
        for index, (transfer, works) in enumerate(zip(transfers, posted, strict=True)):
            if transfer.sending and self._buffer(transfer):
                self._end_later(transfer, [*works, others[index]])
                others[index] = kinds[index]  # the receive compares them
            else:
                _wait_all(works)
        return kinds, others

    def _connect_peers(self, transfers: Sequence[PostedTransfer], *, batched: bool) -> None:
        """Wait until each batch has started that the first message of a way joins to this one, or to such a one."""
        here = self._here
        ways = {f"{here}>{each.peer}" if each.sending else f"{each.peer}>{here}" for each in transfers} - self._met
        self._met |= ways
        for way in ways:
            self._first.set(f"{way}/{here}", " ".join(sorted(ways)) if batched else "")
        ready = sorted(ways) if batched else []
        seen = set(ready)
        while ready:
            ends = [f"{ready[-1]}/{rank}" for rank in ready[-1].split(">")]
            if self._first.check(ends):
                ready.pop()
                joined = {way for end in ends for way in self._first.get(end).decode().split()} - seen
                ready += joined
                seen |= joined
            elif self._cut.wait(_LOOK_SECONDS):
                raise RuntimeError(f"group {self._name} was cut while its ranks connected")

    def _buffer(self, transfer: PostedTransfer) -> bool:
        """Whether a send ends before its receive is posted: its bytes fit into the buffer."""
        with self._lock:
            fits = self._buffered[transfer.peer] + transfer.copy.nbytes <= self._device.eager_bytes
            eager = self._device.eager_bytes > 0 and fits
            self._buffered[transfer.peer] += transfer.copy.nbytes if eager else 0
        return eager

    def _end_later(self, transfer: PostedTransfer, works: Sequence[Any]) -> None:
        """Wait for a buffered send in a thread of its own: torch has no poll of gloo's transfers."""

        def wait() -> None:
            with contextlib.suppress(RuntimeError):  # its connection was cut
                _wait_all(works)
            with self._lock:
                self._buffered[transfer.peer] -= transfer.copy.nbytes

        threading.Thread(target=wait, name="fake eager send", daemon=True).start()

    def _mismatch(self, transfer: PostedTransfer, here: str, there: str) -> MismatchError:
        verb, other = ("sends", "receives") if transfer.sending else ("receives", "sends")
        text = (
            f"rank {self._ranks[self._here]} {verb} {here} in group {self._name} where rank "
            f"{self._ranks[transfer.peer]} {other} {there}; NCCL compares neither, and hangs or moves a part"
        )
        self._violations.append(text)
        return MismatchError(text)

    def cut(self) -> None:
        """Close the connections: a gloo wait that times out does, at both ends."""
        self._cut.set()
        for peer in range(len(self._ranks)):
            if peer != self._here:
                with contextlib.suppress(RuntimeError):
                    work = self.gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNSENT)
                    work.wait(timedelta(milliseconds=1))


def _wait_all(works: Sequence[Any]) -> None:
    """Wait for the works among what a transfer keeps."""
    for work in works:
        if not isinstance(work, Tensor):
            work.wait(NEVER)


def make_unreadable(tensor: Tensor) -> None:
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


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
