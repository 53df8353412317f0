"""Plain data as JSON and back, exactly: tuples stay tuples, infinity a number, small tensors keep dtype and bits."""

from __future__ import annotations

import base64
import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipegrid.core.fields import shown
from pipegrid.stages.errors import CheckpointError


def to_plain(value: Any, what: str, tensors: list[Tensor] | None = None) -> Any:
    """``value`` as JSON can hold it; ``what`` names it in errors. Where ``tensors`` is given, tensors go into that."""
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no word for it
        return {"$float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        entries = [to_plain(item, f"{what}[{at}]", tensors) for at, item in enumerate(value)]
        return entries if isinstance(value, list) else {"$tuple": entries}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor) and tensors is not None:
        tensors.append(value)
        return {"$number": len(tensors) - 1}
    if isinstance(value, Tensor):
        kept = value.detach().cpu().contiguous()
        return {"$tensor": [dtype_name(kept.dtype), list(kept.shape), base64.b64encode(raw_bytes(kept)).decode()]}
    if isinstance(value, Mapping):
        items = [(key, to_plain(item, f"{what}[{key!r}]", tensors)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$dict": [[to_plain(key, f"a key of {what}"), item] for key, item in items]}
    raise CheckpointError(f"{what} is {shown(value)}; a checkpoint holds plain data and tensors")


def from_plain(value: Any, tensors: Sequence[Tensor] = ()) -> Any:
    """The data that `to_plain` was called with."""
    if isinstance(value, list):
        return [from_plain(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, held),) = value.items()
        if tag == "$tuple":
            return tuple(from_plain(item, tensors) for item in held)
        if tag == "$number":
            return tensors[held]
        if tag == "$float":
            return float(held)
        if tag == "$bytes":
            return base64.b64decode(held)
        if tag == "$dict":
            return {from_plain(key): from_plain(item, tensors) for key, item in held}
        if tag == "$tensor":
            dtype, shape, text = held
            data = bytearray(base64.b64decode(text))
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            return flat.view(dtype_of(dtype)).reshape(shape)
    return {key: from_plain(item, tensors) for key, item in value.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """`torch.float32` for ``float32``; ValueError for another name."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{shown(name)} is no dtype of torch {torch.__version__}")  # noqa: TRY004 -- of a file
    return dtype


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; valid while the tensor lives."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
