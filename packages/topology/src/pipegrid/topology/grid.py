"""`Grid`, consecutive ranks with named dims, as arithmetic; its views, and the relation of two grids. No torch."""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol, TypeAlias, cast

from attrs import field, frozen

from pipegrid.topology.errors import GridError
from pipegrid.topology.fields import Count, Index, Name, checked, checked_fields, index_of, shown

Dims: TypeAlias = str | Iterable[str]
"""The name of a dim, or names of dims in any order."""


def dims_of(dims: Dims) -> tuple[str, ...]:
    """The names as a tuple; a single name is a tuple of one."""
    return (dims,) if isinstance(dims, str) else tuple(dims)


def _as_sizes(shape: Iterable[int]) -> tuple[int, ...]:
    return cast("tuple[int, ...]", checked(shape, tuple[Count, ...], "shape", GridError))


def _as_names(dim_names: Iterable[str]) -> tuple[str, ...]:
    return cast("tuple[str, ...]", checked(dim_names, tuple[Name, ...], "dim_names", GridError))


@frozen(slots=False, field_transformer=checked_fields(GridError))
class Grid:
    """``rank = rank_offset + sum_i coordinate_i * stride_i``, where ``stride_i = prod_{j<i} shape_j``.

    The first dim varies fastest.
    """

    shape: tuple[int, ...] = field(converter=_as_sizes)
    dim_names: tuple[str, ...] = field(converter=_as_names)
    rank_offset: Index = 0

    def __attrs_post_init__(self) -> None:
        if not len(self.shape) == len(self.dim_names) == len(set(self.dim_names)) > 0:
            raise GridError(
                f"shape {list(self.shape)} and dim_names {list(self.dim_names)} must be sizes and names, one each, "
                "at least one, each name once"
            )

    @cached_property
    def axes(self) -> dict[str, tuple[int, int]]:
        """Size and stride of each dim, ascending by stride."""
        strides = itertools.accumulate((1, *self.shape[:-1]), operator.mul)
        return {name: (size, stride) for name, size, stride in zip(self.dim_names, self.shape, strides, strict=True)}

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def ranks(self) -> range:
        """The span: consecutive ranks."""
        return range(self.rank_offset, self.rank_offset + self.size)

    def select(self, dims: Dims) -> tuple[str, ...]:
        """``dims`` in the grid's own order."""
        wanted = dims_of(dims)
        selected = tuple(name for name in self.dim_names if name in wanted)
        if not selected or len(selected) != len(wanted):
            raise GridError(f"dims {list(wanted)} must be some of {list(self.dim_names)}, each once")
        return selected

    def size_of(self, dim: str) -> int:
        """The size of one dim."""
        (name,) = self.select([dim])
        return self.axes[name][0]

    def length(self, dim: str) -> int:
        """The size of a dim; 1 where the grid does not have it."""
        return self.axes.get(dim, (1, 0))[0]

    def stride(self, dim: str) -> int:
        """Ranks between neighbours along a dim; 0 where the grid does not have it."""
        return self.axes.get(dim, (1, 0))[1]

    def place(self, rank: int, dim: str) -> int:
        """The rank's coordinate in a dim; 0 where the grid does not have it."""
        return self.coords(rank).get(dim, 0)

    def coords(self, rank: int) -> dict[str, int]:
        """The rank's coordinate in each dim."""
        local = self._local(rank)
        return {name: local // stride % size for name, (size, stride) in self.axes.items()}

    def rank_at(self, coords: Mapping[str, int]) -> int:
        """The rank at these coordinates, one per dim."""
        at = {name: index_of(index) for name, index in coords.items()}
        if at.keys() != self.axes.keys() or any(at[name] not in range(size) for name, (size, _) in self.axes.items()):
            raise GridError(f"coordinates {shown(dict(coords))} must have an index in each dim of {self}")
        return self.rank_offset + sum(stride * (at[name] or 0) for name, (_, stride) in self.axes.items())

    def group_of(self, rank: int, dims: Dims) -> Sequence[int]:
        """The ranks that differ from ``rank`` in ``dims`` only, ascending; a range where they form one."""
        local = self._local(rank)
        start = self.rank_offset + local
        # Neighbouring dims merge into one run of ranks at a common distance.
        runs: list[tuple[int, int]] = []
        for name in self.select(dims):
            size, stride = self.axes[name]
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

    def groups(self, dims: Dims) -> list[list[int]]:
        """All groups that vary in ``dims``; groups and the ranks inside ascend."""
        selected = self.select(dims)
        fixed = [name for name in self.dim_names if name not in selected]
        starts = self.group_of(self.rank_offset, fixed) if fixed else [self.rank_offset]
        return [list(self.group_of(start, selected)) for start in starts]

    def _local(self, rank: int) -> int:
        number = index_of(rank)
        if number is None or number not in self.ranks:
            raise GridError(f"rank {shown(rank)} is not in the ranks of {self}")
        return number - self.rank_offset

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in zip(self.dim_names, self.shape, strict=True))
        return f"({sizes} at ranks {self.ranks.start}..{self.ranks.stop - 1})"


@frozen
class View:
    """A second factorization of a grid's ranks; groups over ``shared_dims`` alone are the grid's own groups."""

    name: str
    grid: Grid
    shared_dims: frozenset[str]


def make_view(base: Grid, name: str, shape: Sequence[int], dim_names: Sequence[str], shared_dims: Dims | None) -> View:
    """A view of ``base``, checked.

    Two dims enumerate to the same groups exactly when their sizes and strides agree (or both have size one): the
    group of a rank is then the same progression on either side. Groups over several shared dims join the groups over
    each, so they agree as well.
    """
    grid = Grid(shape, dim_names, base.rank_offset)
    if grid.size != base.size:
        raise GridError(f"view {name!r} {grid} has {grid.size} ranks, the grid {base} has {base.size}")
    shared = dims_of(shared_dims or ())
    if len(set(shared)) < len(shared):
        raise GridError(f"view {name!r} has shared_dims {list(shared)}; each must be named once")
    for dim in shared:
        own, other = base.axes.get(dim), grid.axes.get(dim)
        if own is None or other is None or (own != other and not own[0] == other[0] == 1):
            raise GridError(
                f"view {name!r} {grid} cannot share {dim!r} of the grid {base}: both must have it, with the same groups"
            )
    return View(name, grid, frozenset(shared))


@frozen
class GroupRequest:
    """The groups that vary in ``dims`` of a grid or, where ``view`` is given, of that view."""

    dims: tuple[str, ...] = field(converter=dims_of)
    view: str | None = None


class Relation(enum.Enum):
    """The four relations of two spans of ranks."""

    EQUAL = "equal"
    DISJOINT = "disjoint"
    NESTED = "nested"
    OVERLAPPING = "overlapping"


class HasRanks(Protocol):
    """A grid, as far as its span goes."""

    @property
    def ranks(self) -> range:
        """The span: consecutive ranks."""
        ...


def relation(a: HasRanks, b: HasRanks) -> Relation:
    """EQUAL spans, DISJOINT ones, one NESTED in the other (either way), or OVERLAPPING in part."""
    if a.ranks == b.ranks:
        return Relation.EQUAL
    start, stop = max(a.ranks.start, b.ranks.start), min(a.ranks.stop, b.ranks.stop)
    if start >= stop:
        return Relation.DISJOINT
    if range(start, stop) in (a.ranks, b.ranks):
        return Relation.NESTED
    return Relation.OVERLAPPING
