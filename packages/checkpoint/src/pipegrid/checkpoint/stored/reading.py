"""Reading a manifest that anyone may have written: strict JSON, checked in itself before a file or memory is touched.

A checksum finds damage, not intent: it can be computed for any content. So a manifest is data of a stranger here. What
it describes takes no more memory than its own files have bytes, names no file outside of its folder, and runs no code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import cattrs
from cattrs import BaseValidationError

from pipegrid.checkpoint.stored import folder
from pipegrid.checkpoint.stored.manifest import FORMAT, FileName, Manifest, TensorEntry, checksum
from pipegrid.checkpoint.stored.plain import dtype_of, from_plain
from pipegrid.core.fields import checked, shown
from pipegrid.core.strict_json import exactly, first_fault, read_json
from pipegrid.stages.errors import CheckpointError, CorruptCheckpointError

_MOST_CUT_AXES = 8  # of a tensor: DTensor meshes have fewer dims
_KINDS = {"model": 3, "optimizer": 4, "random": 3}  # parts of a key at least


def read(path: Path) -> Manifest:
    """The manifest of the checkpoint in the folder ``path``.

    Raises CorruptCheckpointError: it is missing, damaged or contradicts itself, CheckpointError of another format.
    """
    where = path / folder.MANIFEST
    try:
        with folder.opened(where) as file:
            written = read_json(file.read().decode())
        saved, content = written["checksum"], written["content"]
        actual = checksum(content)
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where} cannot be read: {error}") from error
    if actual != saved:
        raise CorruptCheckpointError(f"{where} does not have its checksum {shown(saved)}")
    try:
        return _structured(content)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{where}: {error}") from None


def _structured(content: Any) -> Manifest:
    """The manifest of the JSON ``content``, sound in itself."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise CheckpointError(f"the checkpoint has format {shown(found)}; this version reads format {FORMAT}")
    try:
        found = _converter().structure(content, Manifest)
    except BaseValidationError as error:
        where, what = first_fault(error, CorruptCheckpointError)
        raise CorruptCheckpointError(f"{what} at {where}") from None
    for name in found.files:
        checked(name, FileName, "a key of files", CorruptCheckpointError)
    for key, entry in found.tensors.items():
        _require_key(key)
        _require_tiles(key, entry)
    for key in found.values:
        _require_key(key)
    chunks = (chunk for entry in found.tensors.values() for chunk in entry.chunks)
    ordered = sorted((chunk.file, chunk.start, chunk.start + chunk.length) for chunk in chunks)
    for (file, _, end), (other, start, _) in pairwise(ordered):  # apart: all tensors are no larger than the files
        if file == other and start < end:
            raise CorruptCheckpointError(f"two chunks share the bytes from {start} of {file}")
    try:  # what `from_plain` cannot read is known before anything is filled
        for part in (found.values, found.scaler, found.data, *((one.options, one.defaults) for one in found.groups)):
            from_plain(list(part) if isinstance(part, tuple) else part)
    except (ValueError, TypeError, RuntimeError, RecursionError) as error:
        raise CorruptCheckpointError(f"stored values cannot be read: {error}") from None
    return found


def _require_key(key: str) -> None:
    parts = key.split("/")
    if len(parts) < _KINDS.get(parts[0], len(parts) + 1) or not key.isprintable():
        raise CorruptCheckpointError(f"{key!r:.80} is no key; keys are {', '.join(f'{kind}/...' for kind in _KINDS)}")


def _require_tiles(key: str, entry: TensorEntry) -> None:
    """Raise unless the chunks cover the tensor once, and have its bytes.

    The sum of the boxes' indicator functions is that of the whole tensor if, and only if, their signed corners cancel
    down to its corners: taking differences along every axis loses nothing of a function that is zero far out.
    """
    try:
        itemsize = dtype_of(entry.dtype).itemsize
    except ValueError as error:
        raise CorruptCheckpointError(f"{key}: {error}") from None
    whole, axes = ((0,) * len(entry.shape), entry.shape), len(entry.shape)
    boxes = [(chunk.offset, chunk.shape) for chunk in entry.chunks]
    if any(len(offset) != axes or len(shape) != axes for offset, shape in boxes):
        raise CorruptCheckpointError(f"{key} has {axes} axes, and a chunk has another number")
    cut = [axis for axis in range(axes) if any((o[axis], s[axis]) != (0, entry.shape[axis]) for o, s in boxes)]
    if len(cut) > _MOST_CUT_AXES:
        raise CorruptCheckpointError(f"{key} is cut along {len(cut)} axes; at most {_MOST_CUT_AXES} are read")
    if math.prod(entry.shape) and _corners(boxes, cut) != _corners([whole], cut):
        raise CorruptCheckpointError(f"{key}: the chunks do not cover the shape {list(entry.shape)} once")
    for chunk in entry.chunks:
        if math.prod(chunk.shape) * itemsize > chunk.length:
            what = f"{chunk.length} bytes do not hold {list(chunk.shape)} of {entry.dtype}"
            raise CorruptCheckpointError(f"{key}: {what}")


def _corners(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]], axes: list[int]) -> dict[tuple[int, ...], int]:
    found: Counter[tuple[int, ...]] = Counter()
    for offset, shape in boxes:
        for ends in product((0, 1), repeat=len(axes)):
            corner = tuple(offset[axis] + end * shape[axis] for axis, end in zip(axes, ends, strict=True))
            found[corner] += (-1) ** sum(ends)
    return {corner: count for corner, count in found.items() if count}


@cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    converter.register_structure_hook(int, exactly)
    converter.register_structure_hook(str, exactly)
    converter.register_structure_hook_func(_has_rule, lambda value, _: value)  # checked by the class
    return converter


def _has_rule(kind: Any) -> bool:
    return get_origin(kind) is Annotated or (get_origin(kind) is tuple and get_origin(get_args(kind)[0]) is Annotated)
