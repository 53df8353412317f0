"""A box of ranks with named dimensions, the first of which varies fastest. Arithmetic only, no torch."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from attrs import field, frozen

from pipegrid.topology._checks import as_dims, as_integer, as_text, as_tuple, index_of, shown
from pipegrid.topology.errors import CoordinateError, GridShapeError, UnknownDimensionError


def _as_sizes(value: Iterable[int]) -> tuple[int, ...]:
    return as_tuple(value, "shape", "sizes, one per dimension", error=GridShapeError)


def _as_names(value: Iterable[str]) -> tuple[str, ...]:
    return as_tuple(value, "dim_names", "names, one per dimension", error=GridShapeError)


@frozen(slots=False)
class Factorization:
    """``rank = offset + sum_i coordinate_i * stride_i``, where ``stride_i = prod_{j<i} shape_j``.

    Raises:
        GridShapeError: lengths that differ, no dimensions, a name twice or empty, a size that is not a
            positive integer, a negative offset.
    """

    shape: tuple[int, ...] = field(converter=_as_sizes)
    dim_names: tuple[str, ...] = field(converter=_as_names)
    offset: int = 0

    def __attrs_post_init__(self) -> None:
        if len(self.shape) != len(self.dim_names):
            raise GridShapeError(
                f"shape {list(self.shape)} has {len(self.shape)} sizes, "
                f"but dim_names {list(self.dim_names)} has {len(self.dim_names)} names; give one name per size"
            )
        if not self.shape:
            raise GridShapeError("a grid has at least one dimension, got none; a single rank is [1], ['dp']")
        for name in self.dim_names:
            as_text(name, "a dimension's name", error=GridShapeError)
        if len(set(self.dim_names)) != len(self.dim_names):
            raise GridShapeError(f"dim_names {list(self.dim_names)} has a name twice; names must be unique")
        sizes = [
            as_integer(size, f"the size of dimension {name!r} in shape {list(self.shape)}", least=1)
            for name, size in zip(self.dim_names, self.shape, strict=True)
        ]
        object.__setattr__(self, "shape", tuple(sizes))
        object.__setattr__(self, "offset", as_integer(self.offset, "rank_offset", least=0))

    @cached_property
    def _axes(self) -> dict[str, tuple[int, int]]:
        """Size and stride of each dimension, ascending by stride."""
        strides = itertools.accumulate((1, *self.shape[:-1]), operator.mul)
        return {name: (size, stride) for name, size, stride in zip(self.dim_names, self.shape, strides, strict=True)}

    @property
    def size(self) -> int:
        """How many ranks the box holds."""
        return math.prod(self.shape)

    @property
    def ranks(self) -> range:
        """The box's ranks."""
        return range(self.offset, self.offset + self.size)

    def select(self, dims: str | Iterable[str]) -> tuple[str, ...]:
        """``dims``, a name or several in any order, checked and in the box's own order."""
        wanted = as_dims(dims)
        for name in wanted:
            if name not in self.dim_names:
                raise UnknownDimensionError(f"unknown dimension {name!r}; the known ones are {list(self.dim_names)}")
        if not wanted or len(set(wanted)) != len(wanted):
            raise UnknownDimensionError(
                f"dimensions {list(wanted)}: name at least one, and each once; "
                f"the known ones are {list(self.dim_names)}"
            )
        return tuple(name for name in self.dim_names if name in wanted)

    def _require(self, dim: str) -> None:
        self.select(as_text(dim, "a dimension's name", error=UnknownDimensionError))

    def size_of(self, dim: str) -> int:
        """The size of one dimension."""
        self._require(dim)
        return self._axes[dim][0]

    def stride_of(self, dim: str) -> int:
        """How far apart in rank two neighbours along the dimension are."""
        self._require(dim)
        return self._axes[dim][1]

    def coords(self, rank: int) -> dict[str, int]:
        """Where the rank stands in each dimension."""
        local = self._local(rank)
        return {name: local // stride % size for name, (size, stride) in self._axes.items()}

    def rank_at(self, coords: Mapping[str, int]) -> int:
        """The rank at these coordinates; every dimension must be given."""
        if set(coords) != set(self.dim_names):
            raise CoordinateError(f"coordinates {dict(coords)} must name exactly the dimensions {list(self.dim_names)}")
        rank = self.offset
        for name, (size, stride) in self._axes.items():
            index = index_of(coords[name])
            if index is None or index not in range(size):
                raise CoordinateError(
                    f"coordinate {name}={shown(coords[name])} is not in 0..{size - 1} of {self}; give an integer in it"
                )
            rank += stride * index
        return rank

    def group_of(self, rank: int, dims: str | Iterable[str]) -> Sequence[int]:
        """The ranks that differ from ``rank`` in ``dims`` only, ascending; a range where they form one."""
        local = self._local(rank)
        start = self.offset + local
        # Neighbouring dimensions merge into one run of ranks at a common distance.
        runs: list[tuple[int, int]] = []
        for name in self.select(dims):
            size, stride = self._axes[name]
            start -= local // stride % size * stride
            if runs and runs[-1][0] * runs[-1][1] == stride:
                runs[-1] = (runs[-1][0] * size, runs[-1][1])
            elif size > 1:
                runs.append((size, stride))
        (size, stride), *outer = runs or [(1, 1)]
        group: Sequence[int] = range(start, start + size * stride, stride)
        for size, stride in outer:
            group = [near + far for far in range(0, size * stride, stride) for near in group]
        return group

    def groups(self, dims: str | Iterable[str]) -> list[list[int]]:
        """All groups that vary in ``dims``; the groups and the ranks inside ascend."""
        selected = self.select(dims)
        fixed = [name for name in self.dim_names if name not in selected]
        starts = self.group_of(self.offset, fixed) if fixed else [self.offset]
        return [list(self.group_of(start, selected)) for start in starts]

    def _local(self, rank: int) -> int:
        number = index_of(rank)
        if number is None or number not in self.ranks:
            raise CoordinateError(f"rank {shown(rank)} is not in the ranks of {self}; give one of them")
        return number - self.offset

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in zip(self.dim_names, self.shape, strict=True))
        return f"({sizes} at ranks {self.offset}..{self.offset + self.size - 1})"
