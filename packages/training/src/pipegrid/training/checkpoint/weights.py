"""Whole models as one ``.safetensors`` file: out of a checkpoint, tensor by tensor, and into the stages of a run.

The format: eight bytes with the length of a JSON header, the header (name to dtype, shape and bytes), the tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipegrid.training.checkpoint.state.names import Slot, TrainingState, known_state
from pipegrid.training.checkpoint.state.snapshot import local_box
from pipegrid.training.checkpoint.stored import dcp, manifest, reading
from pipegrid.training.checkpoint.stored.manifest import Manifest
from pipegrid.training.checkpoint.stored.plain import dtype_of, raw_bytes
from pipegrid.training.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError

_TOGETHER = 2**28  # bytes of tensors in memory at a time
_DTYPES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def export_safetensors(
    checkpoint: str | os.PathLike[str], target: str | os.PathLike[str], *, module: str | None = None
) -> list[str]:
    """Write the parameters and buffers of a checkpoint's model as one file; no ranks are needed.

    Args:
        checkpoint: the folder of a checkpoint.
        target: the file, ``model.safetensors``; written aside and renamed.
        module: the only one to write. Of several, each name begins with that of its module.

    Returns:
        The names.

    Raises:
        CorruptCheckpointError: a byte is not as saved; the text names the tensor.
        CheckpointError: there is no such module, or a tensor has a type that safetensors has not.
    """
    checkpoint, target = Path(checkpoint), Path(target)
    found = reading.read(checkpoint)
    names = _names(found, module)
    faults = manifest.faults(checkpoint, manifest.parts(found, names.keys()))
    if faults:
        raise CorruptCheckpointError("; ".join(faults[:3]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(found.step)}}
    end = 0
    for key, name in names.items():
        entry = found.tensors[key]
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{name} has dtype {entry.dtype}, which safetensors has not")
        start, end = end, end + _nbytes(found, key)
        header[name] = {"dtype": _DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    aside = target.with_name(f".{target.name}.part")
    with aside.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensors in _read(checkpoint, found, list(names)):
            for tensor in tensors.values():
                file.write(raw_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())
    aside.rename(target)
    return list(names.values())


def _names(found: Manifest, module: str | None) -> dict[str, str]:
    """The name in the file of each key."""
    if module is not None and module not in found.modules:
        raise CheckpointError(f"the checkpoint has no module {module!r}; it has {', '.join(found.modules)}")
    alone = module is not None or len(found.modules) == 1
    names = {}
    for key in found.tensors:
        kind, of, name = key.split("/", 2)
        if kind == "model" and module in (None, of):
            names[key] = name if alone else f"{of}.{name}"
    return dict(sorted(names.items(), key=lambda item: -dtype_of(found.tensors[item[0]].dtype).itemsize))  # aligned


def _nbytes(found: Manifest, key: str) -> int:
    entry = found.tensors[key]
    return int(torch.Size(entry.shape).numel()) * dtype_of(entry.dtype).itemsize


def _read(checkpoint: Path, found: Manifest, keys: list[str]) -> Iterator[dict[str, Tensor]]:
    """The tensors of ``keys``, a few at a time."""
    tensors: dict[str, Tensor] = {}
    held = 0
    for key in keys:
        entry = found.tensors[key]
        tensors[key] = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
        held += tensors[key].nbytes
        if held >= _TOGETHER:
            dcp.load(checkpoint, found, tensors)
            yield tensors
            tensors, held = {}, 0
    if tensors:
        dcp.load(checkpoint, found, tensors)
        yield tensors


@torch.no_grad()
def load_safetensors(state: TrainingState, path: str | os.PathLike[str]) -> None:
    """Fill the parameters and buffers of ``state`` from a file with whole-model names; each rank reads its own part.

    Names of a module may begin with the module's, ``"language."``. A tied parameter is found under any of its names.
    Values are converted to the types of the state. Optimizers and the rest of the state are left alone.

    Raises:
        CheckpointMismatchError: a name is not in the file, or has another shape.
        CorruptCheckpointError: it is no safetensors file.
    """
    from safetensors import SafetensorError

    try:
        _load(known_state(state), Path(path))
    except SafetensorError as error:
        raise CorruptCheckpointError(f"{path} is no safetensors file: {error}") from error


def _load(state: TrainingState, path: Path) -> None:
    from safetensors import safe_open

    by_module: dict[str, list[Slot]] = {}
    for slot in state.slots():
        by_module.setdefault(slot.module, []).append(slot)
    with safe_open(path, framework="pt") as file:
        there = set(file.keys())
        for module, slots in by_module.items():
            for slot, name in _found(module, slots, there, path.name):
                _fill(slot, name, file)


def _found(module: str, slots: Sequence[Slot], there: set[str], file: str) -> list[tuple[Slot, str]]:
    """The name of each slot in a file."""
    for prefix in ("", f"{module}."):
        named = [
            (slot, next((prefix + name for name in (slot.name, *slot.aliases) if prefix + name in there), None))
            for slot in slots
        ]
        found = [(slot, name) for slot, name in named if name is not None]
        if len(found) == len(slots):
            return found
    missing = next(slot.name for slot in slots if not {slot.name, f"{module}.{slot.name}"} & there)
    raise CheckpointMismatchError(f"{file} has no {missing}, nor {module}.{missing}, for module {module!r}")


def _fill(slot: Slot, name: str, file: Any) -> None:
    tensor = slot.tensor()
    shape = file.get_slice(name).get_shape()
    if list(tensor.shape) != list(shape):
        raise CheckpointMismatchError(
            f"{name} has shape {list(shape)} in the file, and {list(tensor.shape)} in module {slot.module!r}"
        )
    if not isinstance(tensor, DTensor):
        tensor.copy_(file.get_tensor(name))
        return
    box = local_box(slot.key, tensor)
    if box is not None:
        part = tuple(slice(at, at + size) for at, size in zip(*box, strict=True))
        tensor.to_local().copy_(file.get_slice(name)[part])
