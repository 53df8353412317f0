"""Weights of whole models, ``.safetensors``, into the stages of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from pipegrid.training.checkpoint.state.names import Slot, TrainingState, known_state
from pipegrid.training.checkpoint.stored.dcp import own_part
from pipegrid.training.errors import CheckpointMismatchError, CorruptCheckpointError


@torch.no_grad()
def load_safetensors(state: TrainingState, path: str | os.PathLike[str]) -> None:
    """Fill the parameters and buffers of ``state`` from a file with whole-model names; each rank reads its own part.

    Or from a folder with such files, such as the shards of a Hugging Face model.

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
        by_module.setdefault(slot.held.module, []).append(slot)
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(each, framework="pt")) for each in paths]
        there = {name: file for file in files for name in file.keys()}  # noqa: SIM118 -- no mapping
        for module, slots in by_module.items():
            for slot, name in _found(module, slots, there, path.name):
                _fill(slot, name, there[name])


def _found(module: str, slots: Sequence[Slot], there: Mapping[str, Any], file: str) -> list[tuple[Slot, str]]:
    """The name of each slot in a file."""
    for prefix in ("", f"{module}."):
        named = [
            (slot, next((prefix + name for name in (slot.held.name, *slot.aliases) if prefix + name in there), None))
            for slot in slots
        ]
        found = [(slot, name) for slot, name in named if name is not None]
        if len(found) == len(slots):
            return found
    missing = next(
        slot.held.name for slot in slots if not {slot.held.name, f"{module}.{slot.held.name}"} & there.keys()
    )
    raise CheckpointMismatchError(f"{file} has no {missing}, nor {module}.{missing}, for module {module!r}")


def _fill(slot: Slot, name: str, file: Any) -> None:
    tensor = slot.tensor()
    shape = file.get_slice(name).get_shape()
    if list(tensor.shape) != list(shape):
        raise CheckpointMismatchError(
            f"{name} has shape {list(shape)} in the file, and {list(tensor.shape)} in module {slot.held.module!r}"
        )
    if not isinstance(tensor, DTensor):
        tensor.copy_(file.get_tensor(name))
        return
    part = own_part(tensor)
    if part is not None:
        local, offset = part
        box = tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True))
        local.copy_(file.get_slice(name)[box])
