"""A side of a boundary: the part of the transferred tensor that each rank of a grid holds. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from attrs import field, frozen

from pipegrid.core.fields import Index, Name, checked, checked_arguments, checked_fields, instance
from pipegrid.reshard.box import merge
from pipegrid.reshard.errors import BridgeError
from pipegrid.topology.grid import Grid

BATCH = "b"
"""The name of the batch axis. The shards of a side along it are its replicas."""

REPLICAS = "dp"
"""The dim of replicas that routes name."""

Order = Literal["contiguous", "zigzag"]
End = Literal["source", "destination"]
"""The end of an edge that a side belongs to."""
Interval = tuple[Fraction, Fraction]


class Placement:
    """The placement of a tensor on the ranks along a dim of a grid: `Replicate`, `Shard` or `Partial`.

    Examples:
        >>> placements: dict[str, Placement] = {"tp": Shard("s"), "ep": Replicate()}
        >>> [str(one) for one in placements.values()]
        ['cuts s', 'copies']
    """


@frozen
class Replicate(Placement):
    """Ranks along the dim hold the same values, and their gradients are replicas of each other.

    Examples:
        >>> str(Replicate())
        'copies'
    """

    def __str__(self) -> str:
        return "copies"


@frozen(field_transformer=checked_fields(BridgeError))
class Shard(Placement):
    """Ranks along the dim hold different parts of an axis.

    Attributes:
        axis: its name.
        order: ``"zigzag"`` is the order of causal load balancing over ``n`` ranks: the axis is cut in ``2n`` chunks and
            rank ``i`` holds chunks ``i`` and ``2n - 1 - i``. The batch is cut in contiguous blocks only.

    Examples:
        >>> str(Shard("s")), str(Shard("s", order="zigzag"))
        ('cuts s', 'cuts s in zigzag')
    """

    axis: Name
    order: Order = "contiguous"

    def __attrs_post_init__(self) -> None:
        if self.axis == BATCH and self.order != "contiguous":
            raise BridgeError(f"Shard({BATCH!r}).order is {self.order!r}; replicas are contiguous blocks")

    def __str__(self) -> str:
        return f"cuts {self.axis}" + (" in zigzag" if self.order == "zigzag" else "")


@frozen
class Partial(Placement):
    """Ranks along the dim contribute partial sums.

    On a source the activations are partial sums and every rank gets the whole gradient; on a destination
    every rank gets the whole activation and the gradients are partial sums (for instance of ranks that each
    work on their own piece of the sequence from one replicated input). The bridge sums them once.

    Examples:
        >>> str(Partial())
        'sums'
    """

    def __str__(self) -> str:
        return "sums"


Sharded, Replicated = Shard, Replicate  # both pairs of names are used for placements

DEFAULT_PLACEMENTS: Mapping[str, Placement] = {"dp": Shard(BATCH), "cp": Shard("s"), "tp": Replicate()}


@runtime_checkable
class GridLike(Protocol):
    """The part of `pipegrid.topology.grid.Grid` that a side reads: the first dim varies fastest.

    Its ranks are consecutive, or those of an attribute ``ranks``, ascending.

    Examples:
        >>> from pipegrid.topology import HyperCommGrid
        >>> grid: GridLike = HyperCommGrid([2, 2], ["tp", "dp"], world_size=4)
        >>> boundary_side(grid, "source").ranks
        (0, 1, 2, 3)
    """

    @property
    def shape(self) -> Sequence[int]:
        """Size of each dim."""

    @property
    def dim_names(self) -> Sequence[str]:
        """Name of each dim."""

    @property
    def rank_offset(self) -> int:
        """The first rank of the grid."""


_GRID = Annotated[Any, instance(GridLike, "a grid, such as HyperCommGrid")]
_PLACEMENT = Annotated[Placement, instance(Placement, "Replicate(), Partial() or Shard(axis)")]


@frozen
class SideDim:
    """One dim of the boundary: its size, the distance in ranks between neighbours, and what it does."""

    name: str
    size: int
    stride: int
    placement: Placement


@frozen(slots=False, field_transformer=checked_fields(BridgeError))
class Side:
    """The ranks of one side of a boundary and what each holds. Make one with `boundary_side`.

    The rank at coordinates ``c`` is ``base + sum(c[k] * dims[k].stride)``, or, with ``members``, the one at that index
    of them.

    Attributes:
        name: of the module.
        base: the first rank.
        dims: major first: where two dims shard one axis, the later one cuts what the earlier one left.
        lane_weights: in which proportion the replicas share the batch, for instance samples per replica; by default
            equally.
        members: the ranks, where they are not those of a formula.

    Examples:
        >>> from pipegrid.topology import HyperCommGrid
        >>> side = boundary_side(HyperCommGrid([2, 2], ["tp", "dp"], world_size=4), "source")
        >>> side.ranks, [dim.name for dim in side.dims]
        ((0, 1, 2, 3), ['dp', 'tp'])
    """

    name: str
    base: int
    dims: tuple[SideDim, ...]
    lane_weights: tuple[Index, ...] | None = field(default=None, kw_only=True)
    members: tuple[int, ...] | None = field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        weights = self.lane_weights
        if weights is not None and (len(weights) != self.num_lanes or not any(weights)):
            raise BridgeError(
                f"side {self.name!r} has {self.num_lanes} replicas and sizes {weights}; give one each, not all 0"
            )

    def __str__(self) -> str:
        dims = [f"{dim.name} {dim.size} (stride {dim.stride}) {dim.placement}" for dim in self.dims] or ["one rank"]
        return ", ".join([*dims, f"lanes {self.lane_weights}"] if self.lane_weights else dims)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the boundary, ascending."""
        return tuple(sorted(self._rank_at(coords) for coords in self._coords()))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that some dim shards, major dim first."""
        return tuple(dict.fromkeys(dim.placement.axis for dim in self.dims if isinstance(dim.placement, Shard)))

    def num_shards(self, axis: str) -> int:
        """Number of parts in which the side holds ``axis``."""
        return math.prod(size for size, _ in self.sharding(axis))

    @property
    def num_lanes(self) -> int:
        """Replicas: parts of the batch."""
        return self.num_shards(BATCH)

    def shard_of(self, rank: int, axis: str) -> int:
        """Index of the part of ``axis`` that the rank holds (major first).

        Raises:
            BridgeError: the rank is not on the side.
        """
        coords = self._coords_at(rank)
        index = 0
        for dim, coord in zip(self.dims, coords, strict=True):
            if isinstance(dim.placement, Shard) and dim.placement.axis == axis:
                index = index * dim.size + coord
        return index

    def lane_of(self, rank: int) -> int:
        """The replica of the rank; `BridgeError` where it is not on the side."""
        return self.shard_of(rank, BATCH)

    @property
    def replica_dim(self) -> SideDim | None:
        """The dim of replicas, ``dp``, where it alone shares out the batch, in equal parts; None where none does.

        Raises:
            BridgeError: the batch is shared out otherwise: by another dim, or unequally.
        """
        own = [dim for dim in self.dims if dim.name == REPLICAS or dim.placement == Shard(BATCH)]
        uneven = len({*(self.lane_weights or ())}) > 1
        if uneven or any(dim.name != REPLICAS or dim.placement != Shard(BATCH) for dim in own):
            raise BridgeError(
                f"side {self.name!r} ({self}) has no replicas that make the same: only {REPLICAS!r} may share out the "
                "batch, in equal parts"
            )
        return own[0] if own else None

    def _coords_at(self, rank: int) -> tuple[int, ...]:
        if rank not in self.coords_of:
            raise BridgeError(f"rank {rank} is not on side {self.name!r}, whose ranks are {list(self.ranks)}")
        return self.coords_of[rank]

    @cached_property
    def classes(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Ranks that hold the same part, ascending, by their shard index along each of `axes`."""
        classes: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            classes.setdefault(self.class_of(rank), []).append(rank)
        return {key: tuple(ranks) for key, ranks in classes.items()}

    def class_of(self, rank: int) -> tuple[int, ...]:
        """The shard index of the rank along each of `axes`.

        Raises:
            BridgeError: the rank is not on the side.
        """
        self._coords_at(rank)
        return tuple(self.shard_of(rank, axis) for axis in self.axes)

    @cached_property
    def partial_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks whose values are partial sums of each other; empty where no dim is `Partial`."""
        if not any(isinstance(dim.placement, Partial) for dim in self.dims):
            return ()
        groups: dict[tuple[int, ...], list[int]] = {}
        for coords in self._coords():
            placed = zip(self.dims, coords, strict=True)
            key = tuple(coord for dim, coord in placed if not isinstance(dim.placement, Partial))
            groups.setdefault(key, []).append(self._rank_at(coords))
        return tuple(sorted(tuple(sorted(ranks)) for ranks in groups.values()))

    def intervals(self, axis: str, lane_units: Sequence[int] | None = None) -> tuple[tuple[Interval, ...], ...]:
        """The parts of [0, 1) that each shard of ``axis`` holds, in the order in which it stores them.

        ``lane_units`` replaces `lane_weights` for the batch axis.
        """
        weights = (lane_units if lane_units is not None else self.lane_weights) if axis == BATCH else None
        if weights is not None and any(weights):
            ends = [Fraction(0), *(Fraction(end, sum(weights)) for end in itertools.accumulate(weights))]
            return tuple(((a, b),) for a, b in itertools.pairwise(ends))
        return _shards(tuple(self.sharding(axis)))

    def sharding(self, axis: str) -> list[tuple[int, Order]]:
        """Size and order of each dim that shards ``axis``, major first."""
        return [
            (dim.size, dim.placement.order)
            for dim in self.dims
            if isinstance(dim.placement, Shard) and dim.placement.axis == axis
        ]

    @cached_property
    def coords_of(self) -> dict[int, tuple[int, ...]]:
        """The coordinates of each rank of the boundary in `dims`."""
        return {self._rank_at(coords): coords for coords in self._coords()}

    def _coords(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(dim.size) for dim in self.dims))

    def _rank_at(self, coords: Sequence[int]) -> int:
        place = self.base + sum(c * dim.stride for c, dim in zip(coords, self.dims, strict=True))
        return place if self.members is None else self.members[place]


@lru_cache(maxsize=256)
def _shards(sharding: tuple[tuple[int, Order], ...]) -> tuple[tuple[Interval, ...], ...]:
    """The parts of [0, 1) that each shard holds, where the dims of these sizes and orders cut it, major first."""
    shards: list[tuple[Interval, ...]] = [((Fraction(0), Fraction(1)),)]
    for size, order in sharding:
        shards = [part for held in shards for part in _cut(held, size, order)]
    return tuple(shards)


def _cut(held: Sequence[Interval], parts: int, order: Order) -> list[tuple[Interval, ...]]:
    """Cut what is stored one after another into ``parts`` parts of the same length."""
    if order == "zigzag":
        chunks = _cut(held, 2 * parts, "contiguous")
        return [merge((*chunks[i], *chunks[2 * parts - 1 - i])) for i in range(parts)]
    length = sum((b - a for a, b in held), Fraction(0)) / parts
    pieces: list[tuple[Interval, ...]] = []
    for part in range(parts):
        low, high = part * length, (part + 1) * length
        piece: list[Interval] = []
        offset = Fraction(0)
        for a, b in held:
            start, stop = max(low, offset), min(high, offset + b - a)
            if start < stop:
                piece.append((a + start - offset, a + stop - offset))
            offset += b - a
        pieces.append(tuple(piece))
    return pieces


@checked_arguments(BridgeError, kinds=True)
def replica_side(side: Side, replica: Index) -> Side:
    """The ranks of one replica of ``side``, as a side of their own.

    Raises:
        BridgeError: as `Side.replica_dim`; or there is no such replica.

    Examples:
        >>> from pipegrid.topology import HyperCommGrid
        >>> side = boundary_side(HyperCommGrid([2, 2], ["tp", "dp"], world_size=4), "source")
        >>> replica_side(side, 1).ranks
        (2, 3)
    """
    own = side.replica_dim
    if replica not in range(own.size if own else 1):
        raise BridgeError(f"side {side.name!r} has replicas 0..{(own.size if own else 1) - 1}, not {replica}")
    base = side.base + replica * (own.stride if own else 0)
    return Side(side.name, base, tuple([dim for dim in side.dims if dim is not own]), members=side.members)


def as_grid(grid: Any, what: str = "the grid") -> Grid:
    """The arithmetic of ``grid``, a `GridLike`; without dims it is one rank.

    Examples:
        >>> from pipegrid.topology import HyperCommGrid
        >>> as_grid(HyperCommGrid([2], ["dp"], world_size=2)).ranks
        range(0, 2)
    """
    found: GridLike = checked(grid, _GRID, what, BridgeError)
    shape, names, ranks = found.shape or (1,), found.dim_names or ("rank",), getattr(found, "ranks", None)
    if ranks is None or isinstance(ranks, range):
        return Grid(shape, names, found.rank_offset)
    return Grid(shape, names, members=ranks)


@checked_arguments(BridgeError, kinds=True)
def boundary_side(
    grid: GridLike,
    end: End,
    *,
    placements: Mapping[str, Placement] | None = None,
    name: str | None = None,
    stage_dim: str = "pp",
    stage: Index | None = None,
    lane_weights: Sequence[int] | None = None,
) -> Side:
    """The side of a boundary that ``grid`` forms: its last stage as a source, its first as a destination.

    ``placements`` has the placement of the tensor along each dim of the grid; it adds to, and overrides,
    ``dp: Shard("b")``, ``cp: Shard("s")``, ``tp: Replicate()``. Where several dims shard one axis, the
    one that varies slowest over the ranks is the major one, and ``tp`` always cuts what the others left
    (sequence parallelism inside a context-parallel rank). ``stage`` is the coordinate of the boundary along
    ``stage_dim`` where it is not the last or the first (stages placed as a V).

    Raises:
        BridgeError: a dim of more than one rank that neither ``placements`` nor the defaults name; not one weight for
            each replica.

    Examples:
        >>> from pipegrid.topology import HyperCommGrid
        >>> grid = HyperCommGrid([2, 2], ["tp", "dp"], world_size=4)
        >>> [str(dim.placement) for dim in boundary_side(grid, "source", placements={"tp": Shard("s")}).dims]
        ['cuts b', 'cuts s']
    """
    end = checked(end, End, "end", BridgeError)
    name = name or end
    box = as_grid(grid, f"the grid of side {name!r}")
    placements = placements or {}
    if unknown := sorted(set(placements) - set(box.dim_names)):
        raise BridgeError(f"side {name!r} has placements of dims {unknown}; its dims are {list(box.dim_names)}")
    depth = box.length(stage_dim)
    if stage is None:
        stage = depth - 1 if end == "source" else 0
    if not 0 <= stage < depth:
        raise BridgeError(f"side {name!r} has no stage {stage}: {stage_dim!r} has size {depth}")
    known = {**DEFAULT_PLACEMENTS, **placements}
    dims: list[SideDim] = []
    for dim, (size, stride) in box.axes.items():
        if dim != stage_dim and size > 1:
            if dim not in known:
                raise BridgeError(
                    f"side {name!r}: what its ranks along dim {dim!r} (size {size}) hold is not declared; give "
                    f"placements={{{dim!r}: Shard('b')}} for shares of the batch, Replicate() for copies, Partial() "
                    "for sums"
                )
            placement = checked(known[dim], _PLACEMENT, f"side {name!r}: the placement of {dim!r}", BridgeError)
            dims.append(SideDim(dim, size, stride, placement))
    slowest_first = sorted(dims, key=lambda d: (d.name == "tp", -d.stride))
    weights = None if lane_weights is None else tuple(lane_weights)
    first = stage * box.stride(stage_dim)
    base = first + box.rank_offset if box.members is None else first
    return Side(name, base, tuple(slowest_first), lane_weights=weights, members=box.members)
