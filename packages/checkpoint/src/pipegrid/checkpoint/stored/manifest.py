"""The manifest of a checkpoint: what it holds, in which bytes of which files, with a checksum of each. No torch.

``manifest.json`` is ``{"checksum": ..., "content": {...}}``; the checksum is that of the content in its shortest form.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import cattrs
from attrs import field, frozen

from pipegrid.checkpoint.stored import folder
from pipegrid.core.fields import Index, Rule, checked_fields, integer
from pipegrid.stages.errors import CorruptCheckpointError

FORMAT = 1
_BLOCK = 2**22


def _file_name(value: Any) -> str:
    if not isinstance(value, str) or value in {"", ".", ".."} or not value.isprintable() or {*"/\\"} & {*value}:
        raise ValueError
    return value


FileName: TypeAlias = Annotated[str, Rule(_file_name, "the name of a file in the checkpoint's own folder")]
Size: TypeAlias = Annotated[int, integer(0, 2**63 - 1)]
Crc32: TypeAlias = Annotated[int, integer(0, 2**32 - 1)]
_checked = checked_fields(CorruptCheckpointError)


@frozen(field_transformer=_checked)
class Chunk:
    """A box of a tensor, and its bytes in a file."""

    offset: tuple[Size, ...]
    shape: tuple[Size, ...]
    file: FileName
    start: Size
    length: Size
    crc32: Crc32


@frozen(field_transformer=_checked)
class TensorEntry:
    """A stored tensor of the whole model."""

    dtype: str
    shape: tuple[Size, ...]
    chunks: tuple[Chunk, ...]


@frozen(field_transformer=_checked)
class FileEntry:
    """A file beside those of the tensors."""

    length: Size
    crc32: Crc32


@frozen(field_transformer=_checked)
class GroupEntry:
    """A parameter group of an optimizer: options, and the parameters that have them, as ``[module, name]``."""

    optimizer: Index
    index: Index
    options: dict[str, Any]
    parameters: tuple[tuple[str, str], ...]
    kind: str = ""  # such as ``torch.optim.AdamW``; empty in checkpoints written before it was kept
    defaults: dict[str, Any] = field(factory=dict)  # of its making; a schedule changes those of the group alone


@frozen(kw_only=True, field_transformer=_checked)
class Manifest:
    """The contents of a checkpoint."""

    step: Size
    tensors: dict[str, TensorEntry]  # by ``model/MODULE/NAME``, ``optimizer/MODULE/NAME/ENTRY``, ``random/RANK/KIND``
    files: dict[str, FileEntry]  # those without tensors
    groups: tuple[GroupEntry, ...]
    values: dict[str, Any]  # entries of optimizer states that are no tensors, by the same keys
    scaler: Any
    data: Any  # the data position
    seed: int  # torch's initial seed on the first rank
    ranks: tuple[tuple[tuple[str, int], ...], ...]  # the stages ``[module, number]`` of each rank
    grids: dict[str, Any] | None  # shape and first rank of each grid
    layout: Any
    format: int = FORMAT

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules."""
        return tuple(dict.fromkeys(key.split("/")[1] for key in self.tensors if key.startswith("model/")))


def write(path: Path, manifest: Manifest) -> None:
    """Write the manifest of the checkpoint in the folder ``path``."""
    content = cattrs.unstructure(manifest)
    folder.write(path / folder.MANIFEST, _short({"checksum": checksum(content), "content": content}))


def _short(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), sort_keys=True)


def checksum(content: Any) -> int:
    """The checksum of a manifest's content."""
    return zlib.crc32(_short(content).encode())


def checksum_of(path: Path, start: int, length: int) -> int:
    """The checksum of some bytes of a file."""
    found = 0
    with folder.opened(path) as file:
        file.seek(start)
        left = length
        while left:
            block = file.read(min(left, _BLOCK))
            if not block:
                raise CorruptCheckpointError(f"{path.name} ends {left} bytes early")
            found = zlib.crc32(block, found)
            left -= len(block)
    return found


def parts(manifest: Manifest, only: Container[str] | None = None) -> Iterator[tuple[str, str, int, int, int]]:
    """The checksummed parts (name, file, start, length, checksum): all, or ``only`` those of some keys and files."""
    for name, entry in manifest.files.items():
        if only is None or name in only:
            yield f"the file {name}", name, 0, entry.length, entry.crc32
    for key, tensor in manifest.tensors.items():
        for chunk in tensor.chunks if only is None or key in only else ():
            yield f"the tensor {key}", chunk.file, chunk.start, chunk.length, chunk.crc32


def faults(path: Path, checked: Iterable[tuple[str, str, int, int, int]]) -> list[str]:
    """The faults of the `parts` ``checked`` of the checkpoint in ``path``; empty where all is as saved."""
    found = []
    for what, file, start, length, crc32 in checked:
        try:
            actual = checksum_of(path / file, start, length)
        except (CorruptCheckpointError, OSError) as error:
            found.append(f"{what}: {error}")
            continue
        if actual != crc32:
            found.append(f"{what}: checksum {actual:08x} in {file}, saved {crc32:08x}")
    return found
