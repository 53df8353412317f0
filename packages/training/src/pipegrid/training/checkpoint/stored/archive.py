"""The bytes of a tensor out of what `torch.save` has written, by the zip directory alone: nothing is unpickled.

`torch.save` of one contiguous tensor is a zip archive of stored members, among them ``NAME/data/0``, the tensor's
memory, and ``NAME/byteorder``. Shape and type are those of the manifest.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from pipegrid.training.checkpoint.stored import folder
from pipegrid.training.checkpoint.stored.manifest import Chunk
from pipegrid.training.checkpoint.stored.plain import raw_bytes
from pipegrid.training.errors import CorruptCheckpointError

_LOCAL_HEADER = struct.Struct("<26xHH")  # the lengths of name and extra field
_BYTEORDERS = ("little", "big")


def read_tensor(folder_path: Path, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """The box of a tensor in ``chunk``.

    Raises:
        CorruptCheckpointError: the bytes are not those of such a tensor, or of another byte order.
    """
    tensor = torch.empty(chunk.shape, dtype=dtype)
    with folder.opened(folder_path / chunk.file) as file:
        try:
            _read_into(raw_bytes(tensor), _Part(file, chunk.start, chunk.length))
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
            raise CorruptCheckpointError(
                f"{chunk.file} has no tensor of {tensor.nbytes} bytes at {chunk.start}: {error}"
            ) from error
    return tensor


def _read_into(target: memoryview, part: _Part) -> None:
    with zipfile.ZipFile(part) as archive:
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
    order, data = members.get("byteorder"), members.get("data/0")
    if order is None or data is None or any(one.compress_type != zipfile.ZIP_STORED for one in (order, data)):
        raise ValueError("it is not written by torch.save")
    byteorder = memoryview(bytearray(min(order.file_size, max(map(len, _BYTEORDERS)))))
    _fill(byteorder, part, order.header_offset)
    if bytes(byteorder) != sys.byteorder.encode():
        raise ValueError(f"byte order {bytes(byteorder)!r} on a machine of {sys.byteorder}")
    if data.file_size != len(target):
        raise ValueError(f"its tensor has {data.file_size}")
    _fill(target, part, data.header_offset)


def _fill(target: memoryview, part: _Part, header: int) -> None:
    """Read the member whose header is at ``header``."""
    part.seek(header)
    part.seek(header + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(part.read(_LOCAL_HEADER.size))))
    at = 0
    while at < len(target):
        count = part.readinto(target[at:])
        if not count:
            raise ValueError(f"it ends {len(target) - at} bytes early")
        at += count


class _Part(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of a file; ValueError before its start."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"a place {offset} before its start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typed as private in typeshed
        """As of a file."""
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
