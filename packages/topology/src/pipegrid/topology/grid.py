"""`Grid`, ranks with named dims, as arithmetic; its views, and the relation of two grids. No torch."""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol, TypeAlias, cast

from attrs import field, frozen

from pipegrid.core.fields import Count, Index, Name, checked, checked_fields, index_of, shown
from pipegrid.topology.errors import GridError

Dims: TypeAlias = str | Iterable[str]
"""The name of a dim, or names of dims in any order."""


_MOST_RUNS = 8  # of ranks that a text lists


def dims_of(dims: Dims) -> tuple[str, ...]:
    """The names as a tuple; a single name is a tuple of one."""
    return (dims,) if isinstance(dims, str) else checked(dims, tuple[Name, ...], "dims", GridError)


def _as_sizes(shape: Iterable[int]) -> tuple[int, ...]:
    return cast("tuple[int, ...]", checked(shape, tuple[Count, ...], "shape", GridError))


def _as_names(dim_names: Iterable[str]) -> tuple[str, ...]:
    return cast("tuple[str, ...]", checked(dim_names, tuple[Name, ...], "dim_names", GridError))


def _as_members(ranks: Iterable[int] | None) -> tuple[int, ...] | None:
    """The ranks of a grid, checked to ascend; None for consecutive ones."""
    if ranks is None:
        return None
    members: tuple[int, ...] = checked(ranks, tuple[Index, ...], "ranks", GridError)
    if any(a >= b for a, b in itertools.pairwise(members)):
        raise GridError(f"ranks are {shown(ranks)}; they must ascend, each once")
    return members


@frozen(slots=False, field_transformer=checked_fields(GridError))
class Grid:
    """The rank at number ``sum_i coordinate_i * stride_i`` of `ranks`, where ``stride_i = prod_{j<i} shape_j``.

    The first dim varies fastest. Ranks are consecutive from ``rank_offset`` on, or those of ``members``, which ascend;
    ``rank_offset`` is then the first of them.
    """

    shape: tuple[int, ...] = field(converter=_as_sizes)
    dim_names: tuple[str, ...] = field(converter=_as_names)
    rank_offset: Index = 0
    members: tuple[int, ...] | None = field(default=None, converter=_as_members, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not len(self.shape) == len(self.dim_names) == len(set(self.dim_names)) > 0:
            raise GridError(
                f"shape {list(self.shape)} and dim_names {list(self.dim_names)} must be sizes and names, one each, "
                "at least one, each name once"
            )
        if self.members is None:
            return
        if len(self.members) != self.size or self.rank_offset not in (0, self.members[0]):
            raise GridError(
                f"a grid of shape {list(self.shape)} has {self.size} ranks, and ranks are {shown(list(self.members))}; "
                "give as many, and no rank_offset beside them"
            )
        object.__setattr__(self, "rank_offset", self.members[0])
        if self.members[-1] - self.members[0] == self.size - 1:  # so that equal grids compare equal
            object.__setattr__(self, "members", None)

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
    def ranks(self) -> Sequence[int]:
        """The ranks, ascending; a range where they are consecutive."""
        return range(self.rank_offset, self.rank_offset + self.size) if self.members is None else self.members

    @cached_property
    def _number_of(self) -> Mapping[int, int]:
        return {rank: number for number, rank in enumerate(self.ranks)}

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
        return self.ranks[sum(stride * (at[name] or 0) for name, (_, stride) in self.axes.items())]

    def along(self, rank: int, dim: str, index: int) -> int:
        """The rank at the coordinates of ``rank``, but ``index`` in ``dim``; ``rank`` where the grid lacks the dim."""
        return self.ranks[self._local(rank) + (index - self.place(rank, dim)) * self.stride(dim)]

    def group_of(self, rank: int, dims: Dims) -> Sequence[int]:
        """The ranks that differ from ``rank`` in ``dims`` only, ascending; a range where they form one."""
        local = start = self._local(rank)
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
        if self.members is not None:
            return tuple([self.members[number] for number in group])
        first = self.rank_offset
        if isinstance(group, range):
            return range(group.start + first, group.stop + first, group.step)
        return [number + first for number in group]

    def groups(self, dims: Dims) -> list[list[int]]:
        """All groups that vary in ``dims``; groups and the ranks inside ascend."""
        selected = self.select(dims)
        fixed = [name for name in self.dim_names if name not in selected]
        starts = self.group_of(self.rank_offset, fixed) if fixed else [self.rank_offset]
        return [list(self.group_of(start, selected)) for start in starts]

    def _local(self, rank: int) -> int:
        number = index_of(rank)
        if number is not None and self.members is not None and number in self._number_of:
            return self._number_of[number]
        if number is None or number not in self.ranks:
            raise GridError(f"rank {shown(rank)} is not in the ranks of {self}")
        return number - self.rank_offset

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in zip(self.dim_names, self.shape, strict=True))
        return f"({sizes} at ranks {span_of(self.ranks)})"


def runs_of(ranks: Sequence[int]) -> list[range]:
    """The runs of consecutive ranks in ``ranks``, which ascend."""
    if isinstance(ranks, range):
        return [ranks]
    starts = [place for place, rank in enumerate(ranks) if not place or rank != ranks[place - 1] + 1]
    return [range(ranks[start], ranks[stop - 1] + 1) for start, stop in itertools.pairwise((*starts, len(ranks)))]


def span_of(ranks: Sequence[int]) -> str:
    """Ranks as text: ``0..3`` where they are consecutive, else the runs of them, ``0, 2, 4..7``."""
    runs = runs_of(ranks)
    texts = [f"{run[0]}..{run[-1]}" if len(run) > 1 or len(runs) == 1 else str(run[0]) for run in runs]
    return ", ".join(texts if len(texts) <= _MOST_RUNS else (*texts[: _MOST_RUNS - 2], "...", texts[-1]))


@frozen
class View:
    """A second factorization of a grid's ranks; groups over ``shared_dims`` alone are the grid's own groups."""

    grid: Grid
    shared_dims: frozenset[str]


def make_view(base: Grid, name: str, shape: Sequence[int], dim_names: Sequence[str], shared_dims: Dims | None) -> View:
    """A view of ``base``, checked.

    Two dims enumerate to the same groups exactly when their sizes and strides agree (or both have size one): the
    group of a rank is then the same progression on either side. Groups over several shared dims join the groups over
    each, so they agree as well.
    """
    grid = Grid(shape, dim_names, base.rank_offset, members=base.members)
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
    return View(grid, frozenset(shared))


@frozen
class GroupRequest:
    """The groups of a grid that vary in some of its dims.

    Attributes:
        dims: in which the ranks of a group differ.
        view: the view that has these dims; None: the grid itself.
    """

    dims: tuple[str, ...] = field(converter=dims_of)
    view: str | None = None


class Relation(enum.Enum):
    """The four relations of two sets of ranks."""

    EQUAL = "equal"
    DISJOINT = "disjoint"
    NESTED = "nested"
    OVERLAPPING = "overlapping"


class HasRanks(Protocol):
    """A grid, as far as its ranks go."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks, ascending; a range where they are consecutive."""


def relation(a: HasRanks, b: HasRanks) -> Relation:
    """EQUAL ranks, DISJOINT ones, those of one NESTED in the other's (either way), or OVERLAPPING in part."""
    if isinstance(a.ranks, range) and isinstance(b.ranks, range):  # of any length at once
        shared = range(max(a.ranks.start, b.ranks.start), min(a.ranks.stop, b.ranks.stop))
        common = len(shared)
    else:
        common = len({*a.ranks} & {*b.ranks})
    if not common:
        return Relation.DISJOINT
    if common == len(a.ranks) == len(b.ranks):
        return Relation.EQUAL
    return Relation.NESTED if common in (len(a.ranks), len(b.ranks)) else Relation.OVERLAPPING
