"""Rows of a batch's entries, and their axes: a tensor is cut along them, or whole in each microbatch.

What has one entry for each row is cut: tensors, arrays, lists and tuples, of a batch and of dicts in it. A list is an
axis, before those of its entries. Entries of Hugging Face's batches are known by name, and what a script says comes
first. What could be cut along two axes, or along none, is an error with the remedy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch
from attrs import define, field

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Index, checked

Axis = int | None  # of the rows; None: an entry is whole in each microbatch
INSIDE: Final = -1  # the first axis of every tensor inside of a list
_ROWS_FIRST: Final = ("input_ids", "inputs_embeds", "decoder_input_ids", "input_features", "input_values", "labels")
_WHOLE: Final = ("cache_position", "head_mask", "decoder_head_mask", "cross_attn_head_mask", "num_items_in_batch")
_MASKS: Final = ("attention_mask", "decoder_attention_mask", "encoder_attention_mask")
_LAYERS: Final = ("encoder_outputs", "past_key_values")
_POSITIONS: Final = "position_ids"
_PACKED: Final = ("cu_seq", "max_seq", "max_length_")
"""Beginnings of the names that describe a packed batch: ``cu_seqlens_q``, ``cu_seq_lens_k``, ``max_length_q``."""
_PATCHES: Final = {
    "image_grid_thw": ("image_grid_thw", "pixel_values"),
    "video_grid_thw": ("video_grid_thw", "pixel_values_videos", "second_per_grid_ts"),
}
"""By what says how many patches an image has, the entries without rows."""
_PLANES: Final = (3, 4)  # of positions in time, height and width, and of the text beside them
_KEPT: Final = 64
_T = TypeVar("_T")
_REMEDY = "for what has no rows (patches of images, packed texts) give a list with a dict for each microbatch"


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@define(eq=False)
class Rows:
    """The way in which batches are cut; a batch that cannot be cut so, or in two ways, is a `StepArgumentError`."""

    axes: Mapping[str, int] = field(factory=dict)  # of rows, by name; "images.sizes" is an entry of a dict inside
    whole: tuple[str, ...] = field(default=(), converter=_names)  # entries that are whole in each microbatch
    _used: dict[str, Axis] = field(factory=dict, init=False, repr=False)
    _known: dict[tuple[object, ...], Any] = field(factory=dict, init=False, repr=False)  # by names and shapes

    def __attrs_post_init__(self) -> None:
        for name, axis in self.axes.items():
            checked(axis, Index, f"rows[{name!r}]", StepArgumentError)
        if both := sorted(self.axes.keys() & set(self.whole)):
            raise StepArgumentError(f"{both[0]!r} is in rows and in whole; an entry is cut, or it is not")

    def number(self, batch: Mapping[str, Any]) -> int:
        """The rows of a batch, by what is known to have them, else by its tensors, else by its lists."""
        lengths = self._lengths(batch)
        if not lengths or 0 in lengths.values() or len(set(lengths.values())) > 1:
            raise StepArgumentError(
                f"the first axes of the batch are {lengths}; they must be the same rows, at least one. Name other axes "
                "in Pipeline(rows={name: axis}) and entries for each microbatch in whole=(name,); " + _REMEDY
            )
        return next(iter(lengths.values()))

    def number_or_first(self, part: Mapping[str, Any]) -> int:
        """The rows of a microbatch that a script has cut: of what is known to have them, else of its first tensor."""
        return next(iter(self._lengths(part).values()), 1)

    def split(self, batch: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
        """``count`` parts of a batch of at least as many rows; the first ones have a row more."""
        if count == 1:
            return [batch]
        rows = self.number(batch)
        axes = self._once("axes", batch, lambda: self._axes(batch, rows, count))
        sizes = [rows // count + (number < rows % count) for number in range(count)]
        bounds = list(pairwise(accumulate(sizes, initial=0)))
        return _split(batch, lambda path, value: _parts(value, axes[path], bounds), count)

    def joined(self, parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The batch that is cut into ``parts``; None where they are not of one."""
        rows = [self.number_or_first(part) for part in parts]
        entries = [dict(_entries(part)) for part in parts]
        if any(each.keys() != entries[0].keys() for each in entries):
            return None
        made: dict[str, Any] = {}
        for path, first in entries[0].items():
            values = [each[path] for each in entries]
            axis = self._used.get(path, self.axes.get(path, None if self._is_whole(path) else 0))
            try:
                if axis is not None and (axis < 0 or [_length(value, axis) for value in values] == rows):
                    made[path] = _cat(values, axis)
                    continue
            except (RuntimeError, TypeError, ValueError):  # of other lengths
                return None
            if not all(_same(value, first) for value in values):
                return None
            made[path] = first
        (whole,) = _split(parts[0], lambda path, _: [made[path]], 1)
        return whole

    def _once(self, what: str, batch: Mapping[str, Any], derive: Callable[[], _T]) -> _T:
        """``derive()``, which names and shapes decide where all entries are tensors: then once for such batches."""
        form: list[object] = [what]
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor):
                return derive()
            form += (name, value.shape)
        if (key := tuple(form)) not in self._known:
            found = derive()
            if len(self._known) == _KEPT:
                self._known.clear()
            self._known[key] = found
        return cast("_T", self._known[key])

    def _axes(self, batch: Mapping[str, Any], rows: int, count: int) -> dict[str, Axis]:
        """The axes of the rows of all entries; those of an entry that could have several are the ones of before."""
        axes = {path: self._axis(path, value, rows, batch, count) for path, value in _entries(batch)}
        used = {path: axes[path] for path, value in _entries(batch) if _has_axes(value)}
        if not used.items() <= self._used.items():
            self._used |= used
            self._known.clear()
        return axes

    def _lengths(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """The rows that entries have, by name: of those that are known, else of tensors, else of lists."""
        return self._once("lengths", batch, lambda: self._lengths_now(batch))

    def _lengths_now(self, batch: Mapping[str, Any]) -> dict[str, int]:
        entries = [(path, value) for path, value in _entries(batch) if not self._is_whole(path)]
        said = {path: _length(value, self.axes[path]) for path, value in entries if path in self.axes}
        known = {path: len(value) for path, value in entries if path in _ROWS_FIRST and _has_axes(value)}
        special = {*_MASKS, *_LAYERS, *_WHOLE, _POSITIONS, *_without_rows(batch)}
        others = [(path, value) for path, value in entries if path not in special]
        tensors = {path: len(value) for path, value in others if _is_array(value) and value.ndim}
        masks = {path: len(value) for path, value in entries if path in _MASKS and _is_array(value) and value.ndim}
        lists = {path: len(value) for path, value in others if isinstance(value, (list, tuple))}
        known |= {path: length for path, length in said.items() if length is not None}
        return known or tensors or masks or lists

    def _is_whole(self, path: str) -> bool:
        return any(path == name or path.startswith(f"{name}.") for name in self.whole)

    def _axis(self, path: str, value: Any, rows: int, batch: Mapping[str, Any], count: int) -> Axis:
        """The axis of the rows of an entry."""
        if self._is_whole(path) or value is None:
            return None
        if path in self.axes:
            if _length(value, self.axes[path]) != rows:
                raise StepArgumentError(
                    f"rows has axis {self.axes[path]} of {path!r}, {_described(value)}, and the batch has {rows} rows"
                )
            return self.axes[path]
        if path in _without_rows(batch):
            raise StepArgumentError(
                f"{path!r} is of the whole batch, and has no rows to cut into {count} microbatches: give a list with a "
                "dict for each microbatch (or say what it is in Pipeline(rows=..., whole=...))"
            )
        possible = _known_axes(path, value, rows, batch)
        if possible is None:
            possible = _axes(value, rows, [other for name, other in _entries(batch) if name != path])
        used = self._used.get(path)
        if path in self._used and used in possible:
            return used
        if not possible or (used is not None and possible == [None]):
            raise StepArgumentError(
                f"{path!r} is {_described(value)}, and the batch has {rows} rows: its first axis is not the rows. Give "
                f"Pipeline(rows={{{path!r}: axis}}) where another axis is, or whole=({path!r},) where each microbatch "
                f"is to have all of it; {_REMEDY}"
            )
        if len(possible) > 1 and None not in possible:
            raise StepArgumentError(
                f"{path!r} is {_described(value)}, and the batch has {rows} rows, which may be its first axis or its "
                f"second. Give Pipeline(rows={{{path!r}: 0}}) or rows={{{path!r}: 1}}"
            )
        return possible[0]


def _entries(batch: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of a batch and of the dicts in it, by dotted names."""
    for name, value in batch.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _split(
    batch: Mapping[str, Any], cut: Callable[[str, Any], list[Any]], count: int, prefix: str = ""
) -> list[Mapping[str, Any]]:
    """``count`` batches of the pieces that ``cut`` makes of each entry; dicts inside keep their type."""
    parts: list[Any] = [{} for _ in range(count)]
    if prefix and isinstance(batch, MutableMapping):
        parts = [copy.copy(batch) for _ in parts]
    for name, value in batch.items():
        path = f"{prefix}{name}"
        pieces = _split(value, cut, count, f"{path}.") if isinstance(value, Mapping) else cut(path, value)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


def _without_rows(batch: Mapping[str, Any]) -> set[str]:
    """The names in a batch of Hugging Face that belong to no row, or to none that is known."""
    found = {name for name in batch if str(name).startswith(_PACKED)}
    return found.union(*(names for grid, names in _PATCHES.items() if grid in batch))


def _known_axes(path: str, value: Any, rows: int, batch: Mapping[str, Any]) -> list[Axis] | None:
    """The axes that the name of an entry allows; None: the name is not known."""
    shape = tuple(value.shape) if _is_array(value) else ()
    broadcast = shape[:1] == (1,) and rows > 1
    if path in _WHOLE or (broadcast and path in (*_MASKS, _POSITIONS)):
        return [None]
    if path == _POSITIONS and shape:
        ids = batch.get("input_ids", batch.get("inputs_embeds"))
        like_ids = _is_array(ids) and shape[1:] == tuple(ids.shape[:2])
        if len(shape) == 1 or (len(shape) > 2 and shape[1] == rows and (like_ids or shape[0] in _PLANES)):
            return [None] if len(shape) == 1 else [1]
    if path.partition(".")[0] in _LAYERS and not _has_axes(value):
        return []
    if path in _LAYERS:
        return [INSIDE] if _all_inside(value, rows) else []
    return [0] if path in (*_ROWS_FIRST, *_MASKS, _POSITIONS, "pixel_values") and _length(value, 0) == rows else None


def _axes(value: Any, rows: int, others: Sequence[Any]) -> list[Axis]:
    """The axes along which a value may have its rows, as far as lengths tell."""
    if _is_array(value):
        if not value.ndim:
            return [None]
        if len(value) != rows:
            return []
        inner = tuple(value.shape[1:])
        alike = (tuple(other.shape) for other in others if _is_array(other) and other.ndim > 1 and len(other) == rows)
        return [0, 1] if any(inner[: len(shape)] == shape for shape in alike) else [0]
    if isinstance(value, (list, tuple)):
        by_entry = len(value) == rows and not hasattr(value, "_fields")
        found: list[Axis] = [0] if by_entry else []
        if _all_inside(value, rows):
            return [*found, INSIDE]
        return found if _has_tensors(value) else [*found, None]
    sized = hasattr(value, "__len__") and not isinstance(value, (str, bytes))
    unknown = _has_tensors(list(getattr(value, "__dict__", {}).values())) or (sized and len(value) == rows)
    return [] if unknown else [None]


def _all_inside(value: Any, rows: int) -> bool:
    """Whether a list has tensors inside, and all of them these rows along their first axes."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(each is None or _all_inside(each, rows) for each in value)
    return _is_array(value) and value.ndim > 0 and len(value) == rows


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    return _is_array(value) and value.ndim > 0


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _has_axes(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (_is_array(value) and value.ndim > 0)


def _length(value: Any, axis: int) -> int | None:
    """The length of an axis; None where there is none, or entries of a list differ."""
    if _is_array(value):
        return int(value.shape[axis]) if axis < value.ndim else None
    if not isinstance(value, (list, tuple)):
        return None
    if axis == 0:
        return len(value)
    lengths = {_length(each, axis - 1) for each in value}
    return lengths.pop() if len(lengths) == 1 else None


def _parts(value: Any, axis: Axis, bounds: Sequence[tuple[int, int]]) -> list[Any]:
    """The rows between ``bounds``."""
    if axis is None or value is None:
        return [value for _ in bounds]
    if not isinstance(value, (list, tuple)):
        before = (slice(None),) * max(axis, 0)
        return [value[(*before, slice(start, stop))] for start, stop in bounds]
    if axis == 0:
        return [value[start:stop] for start, stop in bounds]
    inside = [_parts(each, axis if axis == INSIDE else axis - 1, bounds) for each in value]
    made = [[parts[number] for parts in inside] for number in range(len(bounds))]
    return [type(value)(*each) if hasattr(value, "_fields") else type(value)(each) for each in made]


def _cat(values: Sequence[Any], axis: int) -> Any:
    """Values of `_part` as one."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values), dim=max(axis, 0))
    if _is_array(first):
        return np.concatenate(values, axis=max(axis, 0))
    if axis == 0:
        return type(first)([each for value in values for each in value])
    inner = [_cat(each, axis if axis == INSIDE else axis - 1) for each in zip(*values, strict=True)]
    return type(first)(*inner) if hasattr(first, "_fields") else type(first)(inner)


def _same(one: Any, other: Any) -> bool:
    if _is_array(one) and _is_array(other):
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _described(value: Any) -> str:
    if _is_array(value):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (list, tuple)) else "")
