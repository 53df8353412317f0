"""The bytes of a tensor out of what `torch.save` has written, by the zip directory alone: nothing is unpickled.

`torch.save` of one contiguous tensor is a zip archive of stored members, among them ``NAME/data/0``, the tensor's
memory, and ``NAME/byteorder``. Shape and type are those of the manifest.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from pipegrid.training.checkpoint.stored import folder
from pipegrid.training.checkpoint.stored.manifest import Chunk
from pipegrid.training.errors import CorruptCheckpointError

_LOCAL_HEADER = struct.Struct("<26xHH")  # the lengths of name and extra field


def read_tensor(folder_path: Path, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """The box of a tensor in ``chunk``; its memory is the bytes read.

    Raises:
        CorruptCheckpointError: the bytes are not those of such a tensor, or of another byte order.
    """
    with folder.opened(folder_path / chunk.file) as file:
        file.seek(chunk.start)
        archive = io.BytesIO(file.read(chunk.length))
    nbytes = math.prod(chunk.shape) * dtype.itemsize
    try:
        data = _data(archive, nbytes)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        raise CorruptCheckpointError(
            f"{chunk.file} has no tensor of {nbytes} bytes at {chunk.start}: {error}"
        ) from error
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
