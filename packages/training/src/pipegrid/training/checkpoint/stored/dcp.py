"""Reading and writing by `torch.distributed.checkpoint`. What this package knows of the format of its files is here."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipegrid.training.checkpoint.stored.manifest import Chunk, checksum_of
from pipegrid.training.errors import CheckpointError

METADATA = ".metadata"
"""The file with torch's own metadata."""


class _Writer(FileSystemWriter):
    """Says what failed on the disk, which `torch.save` hides behind an error of its zip writer."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As torch's."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise cause from None


def save(path: Path, planner: SavePlanner, group: dist.ProcessGroup | None) -> Metadata:
    """Write the files of a checkpoint and sync them; all ranks of ``group`` together, or this process alone."""
    with _told():
        written: Any = state_dict_saver.save(
            {}, storage_writer=_Writer(path), planner=planner, process_group=group, no_dist=_alone(group)
        )
    metadata: Metadata = written
    if metadata.storage_data is None:  # torch 2.11 returns what it wrote without the places in the files
        metadata = FileSystemReader(path).read_metadata()
    return metadata


def load(path: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill ``tensors`` in place; all ranks of ``group`` together, or this process alone."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _told():
        reader = FileSystemReader(path)
        state_dict_loader.load(
            tensors, storage_reader=reader, planner=planner, process_group=group, no_dist=_alone(group)
        )


def chunks(path: Path, metadata: Metadata, items: list[WriteItem]) -> list[tuple[str, Chunk]]:
    """The bytes that each of ``items`` has in the files of ``path``, read back for their checksums."""
    found = []
    for item in items:
        if item.tensor_data is None:
            raise TypeError(f"{item.index.fqn} is no tensor")
        stored = metadata.storage_data[item.index]
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
        raise CheckpointError(f"rank {rank}: {type(cause).__name__}: {cause}") from error
