"""Writing by `torch.distributed.checkpoint`, and reading of what it wrote: all that is known of its boxes and files.

Torch writes its metadata, and the frame of each tensor, as pickles. They are for other readers: `load` goes by the
manifest and reads plain bytes. `torch.save` of one contiguous tensor is a zip archive of stored members, among them
``NAME/data/0``, the tensor's memory, and ``NAME/byteorder``; the bytes are found by the zip directory alone.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from pipegrid.checkpoint.stored import folder
from pipegrid.checkpoint.stored.manifest import Chunk, Manifest, TensorEntry, checksum_of
from pipegrid.checkpoint.stored.plain import dtype_name, dtype_of
from pipegrid.stages.errors import CheckpointError, CorruptCheckpointError

METADATA = ".metadata"  # the file with torch's own metadata; never read here
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip member: the lengths of name and extra field

Box = tuple[WriteItem, Tensor]  # A box of a named tensor, as torch's planner has it, and the memory with its values


def items_of(tensors: Mapping[str, Tensor]) -> list[WriteItem]:
    """The boxes of this rank: each tensor whole, or the part of a DTensor."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    return planner.create_local_plan().items


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """The part of a tensor on this rank, in place, and its offset in the whole; None without a part."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    for item in items_of({"tensor": tensor}):
        if item.tensor_data is not None and 0 not in item.tensor_data.chunk.sizes:
            return tensor.to_local(), tuple(item.tensor_data.chunk.offsets)
    return None


class _Planner(DefaultSavePlanner):
    """Writes boxes. Of the ranks that hold the same one, one writes it: the least busy, or the lowest."""

    def __init__(self, boxes: Sequence[Box], *, lowest: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=lowest)
        self._values = {item.index: values for item, values in boxes}
        self.plan = SavePlan([item for item, _ in boxes])

    def create_local_plan(self) -> SavePlan:
        """The boxes of this rank."""
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The values of a box."""
        return self._values[write_item.index]


class _ChunkWriter(FileSystemWriter):
    """A writer that keeps the place of each box, and raises the disk's error, which `torch.save` hides."""

    written: list[tuple[WriteItem, Any]]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the boxes as torch does; an `OSError` under torch's error is raised itself."""
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


def save(
    path: Path, boxes: Sequence[Box], group: dist.ProcessGroup | None, *, lowest: bool
) -> tuple[dict[str, TensorEntry], list[tuple[WriteItem, Any]]]:
    """Write the files of a checkpoint and sync them; all ranks of ``group`` together, or this process alone.

    ``boxes``: of this rank. ``lowest``: the lowest of the ranks that hold a box writes it, or else the least busy.

    Returns:
        The tensors of all ranks by key, without their chunks; the boxes that this rank has written, for `written`.
    """
    if group is None:  # torch warns of that; for good: filters of a block are no affair of threads
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    writer, planner = _ChunkWriter(path), _Planner(boxes, lowest=lowest)
    try:
        metadata: Any = state_dict_saver.save(
            {}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None
        )
    except CheckpointException as error:  # torch collects what failed on each rank
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, CheckpointError):
            raise type(cause)(str(cause)) from error
        raise CheckpointError(f"rank {rank}: {type(cause).__name__}: {cause}") from error
    tensors = {
        key: TensorEntry(dtype_name(stored.properties.dtype), tuple(stored.size), ())
        for key, stored in sorted(metadata.state_dict_metadata.items())
        if isinstance(stored, TensorStorageMetadata)
    }
    return tensors, writer.written


@torch.no_grad()
def load(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's parts of ``tensors`` in place, from the chunks that they overlap; each rank by itself."""
    for key, tensor in tensors.items():
        part = own_part(tensor)
        if part is None:
            continue
        local, offset = part
        entry = manifest.tensors[key]
        for chunk in entry.chunks:
            box = [
                (max(start, other), min(start + size, other + length))
                for start, size, other, length in zip(offset, local.shape, chunk.offset, chunk.shape, strict=True)
            ]
            if any(start >= stop for start, stop in box):
                continue
            try:
                stored = _read_tensor(path, chunk, dtype_of(entry.dtype))
            except OSError as error:
                raise CheckpointError(f"{key}: {type(error).__name__}: {error}") from error
            except CorruptCheckpointError as error:
                raise CorruptCheckpointError(f"{key}: {error}") from error
            local[_slices(box, offset)].copy_(stored[_slices(box, chunk.offset)])


def _slices(box: Iterable[tuple[int, int]], offset: Iterable[int]) -> tuple[slice, ...]:
    """``box`` in a tensor that begins at ``offset``."""
    return tuple(slice(start - at, stop - at) for (start, stop), at in zip(box, offset, strict=True))


def _read_tensor(path: Path, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """The box of a tensor in ``chunk``; its memory is the bytes read, which must be those of such a tensor."""
    with folder.opened(path / chunk.file) as file:
        file.seek(chunk.start)
        archive = io.BytesIO(file.read(chunk.length))
    if (actual := zlib.crc32(archive.getbuffer())) != chunk.crc32:  # verified as another rank, or host, has read it
        raise CorruptCheckpointError(f"checksum {actual:08x} in {chunk.file}, saved {chunk.crc32:08x}")
    nbytes = math.prod(chunk.shape) * dtype.itemsize
    try:
        data = _data(archive, nbytes)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        what = f"{chunk.file} has no tensor of {nbytes} bytes at {chunk.start}"
        raise CorruptCheckpointError(f"{what}: {error}") from error
    flat = torch.frombuffer(data, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(chunk.shape)


def _data(archive: io.BytesIO, nbytes: int) -> memoryview:
    """The ``nbytes`` bytes of the tensor in an archive of this machine's byte order."""
    with zipfile.ZipFile(archive) as directory:
        members = {member.filename.partition("/")[2]: member for member in directory.infolist()}
    order, data = members.get("byteorder"), members.get("data/0")
    if order is None or data is None or any(one.compress_type != zipfile.ZIP_STORED for one in (order, data)):
        raise ValueError("it is not written by torch.save")
    byteorder = bytes(_stored(archive, order)[: len("little")])
    if byteorder != sys.byteorder.encode():
        raise ValueError(f"byte order {byteorder!r} on a machine of {sys.byteorder}")
    if data.file_size != nbytes:
        raise ValueError(f"its tensor has {data.file_size}")
    return _stored(archive, data)


def _stored(archive: io.BytesIO, member: zipfile.ZipInfo) -> memoryview:
    """The bytes of a member that is not compressed."""
    view, header = archive.getbuffer(), member.header_offset
    if header < 0:
        raise ValueError(f"a place {header} before its start")
    start = header + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(view[header : header + _LOCAL_HEADER.size]))
    if len(view) < start + member.file_size:
        raise ValueError(f"it ends {start + member.file_size - len(view)} bytes early")
    return view[start : start + member.file_size]


def written(
    path: Path, tensors: Mapping[str, TensorEntry], boxes: Iterable[tuple[WriteItem, Any]]
) -> dict[str, TensorEntry]:
    """``tensors`` with the chunks of the boxes that this rank has written, read back for their checksums."""
    found: dict[str, TensorEntry] = {}
    for item, stored in boxes:
        if item.tensor_data is None:
            raise TypeError(f"{item.index.fqn} is no tensor")
        file, start, length = stored.relative_path, stored.offset, stored.length
        box = item.tensor_data.chunk
        crc32 = checksum_of(path / file, start, length)
        chunk = Chunk(tuple(box.offsets), tuple(box.sizes), file, start, length, crc32)
        entry = found.get(item.index.fqn, tensors[item.index.fqn])
        found[item.index.fqn] = evolve(entry, chunks=(*entry.chunks, chunk))
    return found
