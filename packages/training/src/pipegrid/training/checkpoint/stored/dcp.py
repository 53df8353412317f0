"""Writing and reading by `torch.distributed.checkpoint`. What this package knows of the format of its files is here.

Torch writes its metadata, and the frame of each tensor, as pickles. They are for other readers: `load` goes by the
manifest and reads plain bytes.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from pipegrid.training.checkpoint.stored import archive
from pipegrid.training.checkpoint.stored.manifest import Chunk, Manifest, TensorEntry, checksum_of
from pipegrid.training.checkpoint.stored.plain import dtype_name, dtype_of
from pipegrid.training.errors import CheckpointError

METADATA = ".metadata"
"""The file with torch's own metadata; never read here."""

Box = tuple[WriteItem, Tensor]
"""A box of a named tensor, as torch's planner has it, and the memory with its values."""


def items_of(tensors: Mapping[str, Tensor]) -> list[WriteItem]:
    """The boxes of this rank: each tensor whole, or the part of a DTensor."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    return planner.create_local_plan().items


def local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offset and shape of this rank's part of a tensor; None without a part."""
    for item in items_of({"tensor": tensor}):
        if item.tensor_data is not None and 0 not in item.tensor_data.chunk.sizes:
            return tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)
    return None


class _Planner(DefaultSavePlanner):
    """Writes boxes. Of the ranks that hold the same one, one writes it: the least busy, or the lowest."""

    def __init__(self, boxes: Iterable[Box], *, lowest: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=lowest)
        self._values = {item.index: values for item, values in boxes}
        self.plan = SavePlan([item for item, _ in boxes])

    def create_local_plan(self) -> SavePlan:
        """The boxes of this rank."""
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The values of a box."""
        return self._values[write_item.index]


class _Writer(FileSystemWriter):
    """Keeps where this rank has written each box; says what failed on the disk, which `torch.save` hides."""

    written: list[tuple[WriteItem, Any]]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As torch's."""
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise cause from None
        places = {result.index: result.storage_data for result in written.value()}
        self.written = [(item, places[item.index]) for item in plan.items]
        return written


class _Reader(StorageReader):
    """Reads tensors as the manifest describes them."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self._manifest = path, manifest
        self._chunks = {
            MetadataIndex(key, chunk.offset): chunk for key, entry in manifest.tensors.items() for chunk in entry.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in torch's form."""
        del args, kwargs
        return Metadata(
            {
                key: TensorStorageMetadata(
                    TensorProperties(dtype=dtype_of(entry.dtype)),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.shape)) for one in entry.chunks],
                )
                for key, entry in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the boxes of ``plan`` into their tensors."""
        for item in plan.items:
            index = item.storage_index
            stored = archive.read_tensor(
                self._path, self._chunks[index], dtype_of(self._manifest.tensors[index.fqn].dtype)
            )
            box = tuple(slice(at, at + size) for at, size in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored[box])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True: the path is known."""
        del checkpoint_id
        return True


def save(
    path: Path, boxes: Sequence[Box], group: dist.ProcessGroup | None, *, lowest: bool
) -> tuple[dict[str, TensorEntry], list[tuple[WriteItem, Any]]]:
    """Write the files of a checkpoint and sync them; all ranks of ``group`` together, or this process alone.

    Args:
        path: the folder.
        boxes: of this rank.
        group: of the ranks.
        lowest: the lowest of the ranks that hold a box writes it, or else the least busy.

    Returns:
        The tensors of all ranks by key, without their chunks; the boxes that this rank has written, for `chunks`.
    """
    writer = _Writer(path)
    with _told():
        metadata: Any = state_dict_saver.save(
            {},
            storage_writer=writer,
            planner=_Planner(boxes, lowest=lowest),
            process_group=group,
            no_dist=_alone(group),
        )
    tensors = {
        key: TensorEntry(dtype_name(stored.properties.dtype), tuple(stored.size), ())
        for key, stored in sorted(metadata.state_dict_metadata.items())
        if isinstance(stored, TensorStorageMetadata)
    }
    return tensors, writer.written


def load(path: Path, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
    """Fill ``tensors`` in place; each rank by itself."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _told():
        state_dict_loader.load(tensors, storage_reader=_Reader(path, manifest), planner=planner, no_dist=_alone(None))


def chunks(path: Path, written: Iterable[tuple[WriteItem, Any]]) -> list[tuple[str, Chunk]]:
    """The bytes of each written box in the files of ``path``, read back for their checksums."""
    found = []
    for item, stored in written:
        if item.tensor_data is None:
            raise TypeError(f"{item.index.fqn} is no tensor")
        file, start, length = stored.relative_path, stored.offset, stored.length
        box = item.tensor_data.chunk
        crc32 = checksum_of(path / file, start, length)
        found.append((item.index.fqn, Chunk(tuple(box.offsets), tuple(box.sizes), file, start, length, crc32)))
    return found


def _alone(group: dist.ProcessGroup | None) -> bool:
    """Whether there is only this process. Torch warns of that, which is meant here."""
    if group is None:  # for good: filters of a block are no affair of threads
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    return group is None


@contextmanager
def _told() -> Iterator[None]:
    """Torch collects what failed on each rank."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, CheckpointError):
            raise type(cause)(str(cause)) from error
        raise CheckpointError(f"rank {rank}: {type(cause).__name__}: {cause}") from error
