"""Tensors of ``.safetensors`` files: where each one is, and its values, read when they are needed.

The format: eight bytes with the length of a JSON header, the header (name to dtype, shape and bytes), the tensors.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from pipegrid.core.strict_json import read_json
from pipegrid.stages.errors import CorruptCheckpointError

CODES: Final = {  # the format's name of each dtype
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES: Final = {code: dtype for dtype, code in CODES.items()}
_BLOCK = 2**22
_LARGE = 2**16  # bytes from which memory has pages of its own
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@frozen
class Stored:
    """A tensor in a file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # of its bytes, from the beginning of the file

    @property
    def nbytes(self) -> int:
        """Of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """The values. No page of the file is mapped: the memory is anonymous, and goes back to the system when freed.

        malloc would keep it: between tensors that stay, those that are freed once they are cast leave holes. Raises
        CorruptCheckpointError where the file has become shorter.
        """
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        memory = bytearray(self.nbytes) if self.nbytes < _LARGE else mmap.mmap(-1, self.nbytes, flags=_PRIVATE)
        with self.path.open("rb", buffering=0) as file:
            self._fill(file.fileno(), memoryview(memory), self.start)
        return torch.frombuffer(memory, dtype=self.dtype).view(self.shape)

    def equals(self, other: Stored) -> bool:
        """Whether both have the same dtype, shape and bytes; a few megabytes are in memory at a time."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        with self.path.open("rb", buffering=0) as one, other.path.open("rb", buffering=0) as two:
            for at in range(0, self.nbytes, _BLOCK):
                blocks = [bytearray(min(_BLOCK, self.nbytes - at)) for _ in range(2)]
                self._fill(one.fileno(), memoryview(blocks[0]), self.start + at)
                other._fill(two.fileno(), memoryview(blocks[1]), other.start + at)
                if blocks[0] != blocks[1]:
                    return False
        return True

    def _fill(self, file: int, memory: memoryview, start: int) -> None:
        done = 0
        while done < len(memory):
            read = os.preadv(file, [memory[done:]], start + done)
            if not read:
                raise CorruptCheckpointError(f"{self.path} ends within {self.name}")
            done += read


def stored_in(path: str | os.PathLike[str]) -> dict[str, Stored]:
    """The tensors of a file by name, without those of dtypes that are not in `CODES`; only its header is read.

    Raises CorruptCheckpointError where it is no safetensors file, or not all of one.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        with safe_open(path, framework="pt"):  # checks the header, and the length of the file
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = read_json(file.read(length).decode())
    except (SafetensorError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} is no safetensors file: {error}") from error
    return {
        name: Stored(path, name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in _DTYPES
    }
