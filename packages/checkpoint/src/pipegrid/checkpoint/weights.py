"""Weights as ``.safetensors``: of whole models into the stages of a run, and of a checkpoint into files.

An export is one file, or a folder that ``from_pretrained`` reads; no ranks are needed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipegrid.checkpoint.errors import CheckpointMismatchError
from pipegrid.checkpoint.state.names import TensorPlace, TrainingState, known_state
from pipegrid.checkpoint.stored import dcp, manifest, reading
from pipegrid.checkpoint.stored.manifest import Manifest
from pipegrid.checkpoint.stored.plain import dtype_of, raw_bytes
from pipegrid.core.fields import checked_arguments, shown
from pipegrid.core.strict_json import read_json
from pipegrid.stages.errors import CheckpointError, CorruptCheckpointError
from pipegrid.stages.safetensors_files import CODES

SHARD_SIZE: Final = "50GB"  # the default of transformers' ``save_pretrained``
INDEX: Final = "model.safetensors.index.json"
_TOGETHER = 2**28  # bytes of tensors in memory at a time
_UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_BESIDE: Final = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
_NOT_BESIDE: Final = ("*.index.json", "adapter_*", "trainer_*")


@torch.no_grad()
@checked_arguments(CheckpointError, kinds=True)
def load_safetensors(state: TrainingState, path: str | os.PathLike[str]) -> None:
    """Fill the parameters and buffers of ``state`` from a file with whole-model names; each rank reads its own part.

    Or from a folder with such files, such as the shards of a Hugging Face model.

    Names of a module may begin with the module's, ``"language."``. A tied parameter is found under any of its names.
    Values are converted to the types of the state. Optimizers and the rest of the state are left alone.

    Raises:
        CheckpointMismatchError: a name is not in the file, or has another shape.
        CorruptCheckpointError: it is no safetensors file.

    Examples:
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> stage = torch.nn.Linear(4, 4, bias=False)
        >>> save_file({"weight": torch.ones(4, 4)}, "ones.safetensors")
        >>> load_safetensors(TrainingState(stages={"model": {0: stage}}), "ones.safetensors")
    """
    from safetensors import SafetensorError, safe_open

    by_module: dict[str, list[TensorPlace]] = {}
    for slot in known_state(state).slots():
        by_module.setdefault(slot.held.module, []).append(slot)
    where = Path(path)
    paths = sorted(where.glob("*.safetensors")) if where.is_dir() else [where]
    try:
        with ExitStack() as opened:
            files = [opened.enter_context(safe_open(each, framework="pt")) for each in paths]
            there = {name: file for file in files for name in file.keys()}  # noqa: SIM118 -- no mapping
            for module, slots in by_module.items():
                for slot, name in _found(module, slots, there, where.name):
                    _fill(slot, name, there[name])
    except SafetensorError as error:
        raise CorruptCheckpointError(f"{path} is no safetensors file: {error}") from error


def _found(
    module: str, slots: Sequence[TensorPlace], there: Mapping[str, Any], file: str
) -> list[tuple[TensorPlace, str]]:
    for prefix in ("", f"{module}."):
        named = [
            (slot, next((prefix + name for name in (slot.held.name, *slot.aliases) if prefix + name in there), None))
            for slot in slots
        ]
        found = [(slot, name) for slot, name in named if name is not None]
        if len(found) == len(slots):
            return found
    names = [slot.held.name for slot in slots]
    missing = next(name for name in names if not {name, f"{module}.{name}"} & there.keys())
    raise CheckpointMismatchError(f"{file} has no {missing}, nor {module}.{missing}, for module {module!r}")


def _fill(slot: TensorPlace, name: str, file: Any) -> None:
    tensor = slot.tensor()
    shape = file.get_slice(name).get_shape()
    if list(tensor.shape) != list(shape):
        raise CheckpointMismatchError(
            f"{name} has shape {list(shape)} in the file, and {list(tensor.shape)} in module {slot.held.module!r}"
        )
    if not isinstance(tensor, DTensor):
        tensor.copy_(file.get_tensor(name))
        return
    part = dcp.own_part(tensor)
    if part is not None:
        local, offset = part
        box = tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True))
        local.copy_(file.get_slice(name)[box])


@checked_arguments(CheckpointError, kinds=True)
def export_safetensors(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    module: str | None = None,
    source: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = SHARD_SIZE,
) -> list[str]:
    """Write the parameters and buffers of a checkpoint's model; no ranks are needed.

    At most 256 MiB of tensors, or one larger tensor, are in memory at a time. Tied parameters are written once.

    Args:
        checkpoint: the folder of a checkpoint.
        target: one file, where it ends with ``.safetensors``; otherwise a folder for ``from_pretrained``: one file or
            shards with an index. Files are written aside and renamed, the index last.
        module: the only one to write. Of several, each name begins with that of its module.
        source: the folder with the model's ``config.json``, such as the one it was started from. Into ``target`` go
            its config, with the dtype of the weights, its generation config, tokenizer files and model code.
        max_shard_size: bytes of tensors in a shard, as a number or such as ``"5GB"``; a larger tensor has its own.

    Returns:
        The names.

    Raises:
        CorruptCheckpointError: a byte is not as saved; the text names the tensor.
        CheckpointError: there is no such module, a tensor has a type that safetensors has not, ``target`` has weights
            already, or ``source`` has no config.

    Examples:
        >>> import torch
        >>> checkpoints = Checkpoints("runs/c")
        >>> checkpoints.save(TrainingState(stages={"model": {0: torch.nn.Linear(4, 4)}}), step=1)
        >>> checkpoints.close()
        >>> export_safetensors("runs/c/save-0001-step-00000001", "model.safetensors")
        ['bias', 'weight']
    """
    checkpoint, target = Path(checkpoint), Path(target)
    found = reading.read(checkpoint)
    names = _names(found, module)
    for key, name in names.items():
        if dtype_of(found.tensors[key].dtype) not in CODES:
            raise CheckpointError(f"{name} has dtype {found.tensors[key].dtype}, which safetensors has not")
    faults = manifest.faults(checkpoint, manifest.parts(found, names.keys()))
    if faults:
        raise CorruptCheckpointError("; ".join(faults[:3]))
    if target.suffix == ".safetensors":
        if source is not None:
            raise CheckpointError(f"target is the file {target.name}; a config goes beside weights in a folder")
        _write(checkpoint, found, names, target)
        return list(names.values())
    shards = _shards(found, names, _bytes_of(max_shard_size))
    beside = {} if source is None else _beside(Path(source), {found.tensors[key].dtype for key in names})
    target.mkdir(parents=True, exist_ok=True)
    if any(target.glob("*.safetensors")):
        raise CheckpointError(f"{target} has weights already; give a new folder")
    for file, held in shards.items():
        _write(checkpoint, found, held, target / file)
    for name, content in beside.items():
        if isinstance(content, Path):
            shutil.copyfile(content, target / name)
        else:
            (target / name).write_text(content)
    if len(shards) > 1:
        size = sum(_nbytes(found, key) for key in names)
        files = {name: file for file, held in shards.items() for name in held.values()}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return list(names.values())


def _names(found: Manifest, module: str | None) -> dict[str, str]:
    if module is not None and module not in found.modules:
        raise CheckpointError(f"the checkpoint has no module {module!r}; it has {', '.join(found.modules)}")
    alone = module is not None or len(found.modules) == 1
    names = {}
    for key in found.tensors:
        kind, of, name = key.split("/", 2)
        if kind == "model" and module in (None, of):
            names[key] = name if alone else f"{of}.{name}"
    return dict(sorted(names.items(), key=lambda item: -dtype_of(found.tensors[item[0]].dtype).itemsize))  # aligned


def _bytes_of(size: int | str) -> int:
    parts = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]I?B)?", str(size).upper())
    found = 0 if parts is None else int(float(parts[1]) * _UNITS[parts[2] or ""])
    if isinstance(size, bool) or found < 1:
        raise CheckpointError(f"max_shard_size is {shown(size)}; give bytes, or a text such as '5GB' or '500MiB'")
    return found


def _shards(found: Manifest, names: Mapping[str, str], limit: int) -> dict[str, dict[str, str]]:
    shards = [{key: names[key] for key in keys} for keys in _together(found, names, limit)]
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{at:05}-of-{len(shards):05}.safetensors": held for at, held in enumerate(shards, 1)}


def _together(found: Manifest, keys: Iterable[str], limit: int) -> list[list[str]]:
    """Keys in order, in lists of at most ``limit`` bytes of tensors, or of one larger tensor."""
    lists: list[list[str]] = [[]]
    size = 0
    for key in keys:
        if lists[-1] and size + _nbytes(found, key) > limit:
            lists.append([])
            size = 0
        lists[-1].append(key)
        size += _nbytes(found, key)
    return lists


def _beside(source: Path, stored: set[str]) -> dict[str, str | Path]:
    """The text of the config, and the other files that go beside weights of the dtypes ``stored``."""
    config = source / "config.json"
    if not config.is_file():
        raise CheckpointError(f"source {source} has no config.json")
    without = {path for pattern in _NOT_BESIDE for path in source.glob(pattern)}
    paths = [path for pattern in _BESIDE for path in sorted(source.glob(pattern)) if path not in without]
    found: dict[str, str | Path] = {path.name: path for path in paths}
    floating = {name for name in stored if dtype_of(name).is_floating_point}
    try:
        content = read_json(config.read_text(), finite=False)  # Mamba's have Infinity
    except ValueError as error:
        raise CheckpointError(f"{config} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{config} is no object in JSON: {content!r:.80}")
    if len(floating) == 1:
        content = _with_dtype({"dtype": None, **content}, *floating)
    return found | {config.name: json.dumps(content, indent=2, sort_keys=True) + "\n"}


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A config whose dtype, and that of the configs in it, is that of the weights."""
    changed = {key: _with_dtype(value, dtype) if isinstance(value, dict) else value for key, value in config.items()}
    return changed | {key: dtype for key in ("dtype", "torch_dtype") if key in config}


def _nbytes(found: Manifest, key: str) -> int:
    entry = found.tensors[key]
    return int(torch.Size(entry.shape).numel()) * dtype_of(entry.dtype).itemsize


def _write(checkpoint: Path, found: Manifest, names: Mapping[str, str], target: Path) -> None:
    """Write one file, aside at first: eight bytes with the length of a JSON header, the header, the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(found.step)}}
    end = 0
    for key, name in names.items():
        entry = found.tensors[key]
        start, end = end, end + _nbytes(found, key)
        code = CODES[dtype_of(entry.dtype)]
        header[name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    aside = target.with_name(f".{target.name}.part")
    with aside.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for keys in _together(found, names, _TOGETHER):
            for tensor in _read(checkpoint, found, keys):  # no name: these are freed before the next ones are made
                file.write(raw_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())
    aside.rename(target)


def _read(checkpoint: Path, found: Manifest, keys: Sequence[str]) -> list[Tensor]:
    entries = {key: found.tensors[key] for key in keys}
    tensors = {key: torch.empty(entry.shape, dtype=dtype_of(entry.dtype)) for key, entry in entries.items()}
    dcp.load(checkpoint, found, tensors)
    return list(tensors.values())
