"""The tensors of a training state copied to the CPU, so that the next step may change them.

The copies live from save to save: a save costs one copy and no allocation. On an accelerator they are pinned, and the
copy is ordered on the current stream before whatever the step does next; the host does not wait for it.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from pipegrid.schedules.gradients import foreach
from pipegrid.training.checkpoint.stored.plain import raw_bytes


@frozen(eq=False)
class Snapshot:
    """Copies of tensors.

    Attributes:
        items: what is to be written: a box of a named tensor each, as torch's planner has it.
        copies: by the index of the item.
        events: end when the copies are complete.
    """

    items: tuple[WriteItem, ...]
    copies: Mapping[MetadataIndex, Tensor]
    events: tuple[Any, ...]

    def wait(self) -> None:
        """Wait until the copies are complete."""
        for event in self.events:
            event.synchronize()

    def checksums(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """The checksum of the values of each box, by key and offset."""
        return {
            (index.fqn, tuple(index.offset or ())): zlib.crc32(raw_bytes(copy)) for index, copy in self.copies.items()
        }


class Copies:
    """Makes snapshots of the same tensors over and over."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._items: tuple[WriteItem, ...] = ()
        self._kept: list[Tensor] = []
        self._copies: dict[MetadataIndex, Tensor] = {}

    def fit(self, tensors: dict[str, Tensor]) -> bool:
        """Whether the copies have the shapes of ``tensors``."""
        if tensors.keys() != self._tensors.keys():
            return False
        pairs = zip(tensors.values(), (self._tensors[key] for key in tensors), strict=True)
        return all(tensor is known or _alike(tensor, known) for tensor, known in pairs) and all(
            kept.shape == local.shape for kept, local in zip(self._kept, self._locals(tensors), strict=True)
        )

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> Snapshot:
        """Copy ``tensors``; overwrites the copies of the snapshot before."""
        if not self.fit(tensors):
            self._plan(tensors)
        self._tensors = tensors
        sources = self._locals(tensors)
        devices = {source.device for source in sources if not source.is_cpu}
        if not devices:
            foreach.copy_(self._kept, sources)
        for source, kept in zip(sources, self._kept, strict=True) if devices else ():
            kept.copy_(source, non_blocking=True)
        return Snapshot(self._items, self._copies, tuple(_recorded(device) for device in devices))

    def _locals(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        return [_local(tensors[item.index.fqn]) for item in self._items]

    def _plan(self, tensors: dict[str, Tensor]) -> None:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors))
        self._items = tuple(planner.create_local_plan().items)
        self._kept = [_kept(source) for source in self._locals(tensors)]
        self._copies = {item.index: kept for item, kept in zip(self._items, self._kept, strict=True)}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _alike(tensor: Tensor, known: Tensor) -> bool:
    if isinstance(tensor, DTensor) or isinstance(known, DTensor):
        return False  # the sharding may be another one
    return (tensor.shape, tensor.dtype, tensor.device) == (known.shape, known.dtype, known.device)


def _kept(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not tensor.is_cpu)


def _recorded(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    event = module.Event()
    event.record(module.current_stream(device))
    return event


class SnapshotPlanner(DefaultSavePlanner):
    """Writes a snapshot. Of the ranks that hold the same box, one writes it: the least busy, or the lowest."""

    def __init__(self, snapshot: Snapshot, random_states: Mapping[str, Tensor], *, lowest: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=lowest)
        self._snapshot, self._random = snapshot, random_states

    def create_local_plan(self) -> SavePlan:
        """The boxes of this rank."""
        own = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        own.set_up_planner(dict(self._random))
        self.plan = SavePlan([*self._snapshot.items, *own.create_local_plan().items])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The copy of a box."""
        index = write_item.index
        return self._random[index.fqn] if index.fqn in self._random else self._snapshot.copies[index]


def local_box(key: str, tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offset and shape of this rank's part of a tensor; None without a part."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({key: tensor})
    for item in planner.create_local_plan().items:
        if item.tensor_data is not None and 0 not in item.tensor_data.chunk.sizes:
            return tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)
    return None
