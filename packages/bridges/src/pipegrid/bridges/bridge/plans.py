"""Plans of a bridge's messages: the source announces what it sends, and the reshard plans follow on both ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import TypeAlias

import torch
from attrs import define, evolve, field, frozen

from pipegrid.bridges.bridge.wiring import BridgeWiring
from pipegrid.bridges.steps import require_summed
from pipegrid.core.fields import Index, checked_fields, shown
from pipegrid.reshard import BATCH, AxisNames, RankPart, ReshardPlan, Side, Sizes, StrategyChoice, plan_reshard
from pipegrid.reshard.errors import BridgeError, ShapeError
from pipegrid.reshard.sizes import batch_axis, cuts_of_lane
from pipegrid.topology import replica_bounds, replica_sizes

_MOST_KNOWN = 256  # plans kept for sizes that recur


@frozen(field_transformer=checked_fields(ShapeError))
class Announcement:
    """A source rank's announcement of its tensor: shape, dtype by name, and the rows of each sample if packed."""

    shape: tuple[Index, ...]
    dtype: str
    samples: tuple[Index, ...] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, samples: Sequence[int] | None) -> Announcement:
        """The announcement of ``tensor``: `ShapeError` where its elements are not dense on this rank."""
        if tensor.layout is not torch.strided or tensor.is_nested or hasattr(tensor, "to_local"):
            raise ShapeError(
                f"a bridge cuts dense tensors, got a {type(tensor).__name__} of layout {tensor.layout}; send its "
                "to_local(), to_dense() or values()"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(tensor.shape, dtype, None if samples is None else tuple(samples))

    def __str__(self) -> str:
        packed = "" if self.samples is None else f", packed in samples of {shown(self.samples)}"
        return f"shape {self.shape} of {self.dtype}{packed}"


@frozen
class Number:
    """A value of a `Whole` leaf that travels with the shapes: an int, a float or a bool."""

    value: float


LeafNote: TypeAlias = Announcement | Number
"""A source rank's announcement of one leaf, in the note of a message."""


def encode(notes: Iterable[LeafNote]) -> str:
    """Encode the announcements of all leaves as text; equal announcements have equal texts."""
    forms = [(one.shape, one.dtype, one.samples) if isinstance(one, Announcement) else one.value for one in notes]
    return json.dumps(forms, separators=(",", ":"))


def decode(text: str) -> list[LeafNote]:
    """Decode a text of `encode`."""
    return [Announcement(*form) if isinstance(form, list) else Number(form) for form in json.loads(text)]


@frozen
class LaneSize:
    """One source replica as a rank of it knows it: samples, their rows where packed, and the other axes' extents."""

    units: int
    samples: tuple[int, ...] | None
    extents: tuple[int, ...]
    """Extents of the whole tensor; 0 for the batch."""

    def __str__(self) -> str:
        shape = ", ".join(str(extent or "batch") for extent in self.extents)
        return f"shape ({shape}), " + ("not packed" if self.samples is None else "packed")


def lane_size(side: Side, axes: AxisNames, announced: Announcement) -> LaneSize:
    """The size of a lane by the tensor of one of its ranks; all ranks have equal parts of the other axes."""
    if len(announced.shape) != len(axes):
        raise ShapeError(f"the edge from {side.name!r} has tensor_ndim={len(axes)} axes, got shape {announced.shape}")
    extents = list(announced.shape)
    units = 0
    for axis, names in enumerate(axes):
        if BATCH in names:
            units = extents[axis] if announced.samples is None else len(announced.samples)
            extents[axis] = 0
        elif names:
            extents[axis] *= side.num_shards(names[0])
    return LaneSize(units, announced.samples, tuple(extents))


def cuts_by_lane(rows: Sequence[int], parts: int) -> tuple[int, ...]:
    """Bounds of the blocks of ``parts`` destination replicas, where each source replica, of its ``rows``, is cut alone.

    Those of `pipegrid.topology.replica_bounds`, unless one of these begins in one source replica and ends in the next.
    """
    bounds, lanes = [], len(rows)
    for part in range(parts):
        lane, rest = divmod(part * lanes, parts)
        inside = cuts_of_lane(rows[lane], lane, lanes, parts)[Fraction(part, parts)] if rest else 0
        bounds.append(sum(rows[:lane]) + inside)
    return (*bounds, sum(rows))


def sizes_of(src: Side, axes: AxisNames, lanes: Mapping[int, LaneSize]) -> Sizes:
    """The sizes that a rank plans with, from the lanes that it knows; other lanes do not change its own part.

    `ShapeError`: the replicas differ in an axis other than the batch, or some are packed and some are not, or a
    replica's samples are not a multiple of its ``lane_weights``.
    """
    first, some = next(iter(lanes.items()))
    weights = src.lane_weights or (1,) * src.num_lanes
    for lane, size in lanes.items():
        if (size.extents, size.samples is None) != (some.extents, some.samples is None):
            raise ShapeError(
                f"replica {first} of {src.name!r} sends tensors of {some}, and replica {lane} of {size}; replicas "
                "differ in the batch alone"
            )
        if size.units % weights[lane] if weights[lane] else size.units:
            raise ShapeError(
                f"replica {lane} of {src.name!r} sends {size.units} samples, no multiple of src_lanes' {weights[lane]}"
            )
    known = [lanes.get(lane, evolve(some, units=some.units if weights[lane] else 0)) for lane in range(src.num_lanes)]
    samples = None
    if some.samples is not None:
        known = [size if size.units else evolve(size, samples=()) for size in known]
        samples = tuple(rows for size in known for rows in size.samples or ())
    shape = list(some.extents)
    units = tuple(size.units for size in known)
    batch = batch_axis(axes)
    shape[batch] = sum(units) if samples is None else sum(samples)
    return Sizes(tuple(shape), axes=axes, src_lanes=units, samples=samples, cut="lane")


@frozen(slots=False, eq=False)
class PlanPair:
    """The reshard plans of one microbatch of this dtype, as ``rank`` knows them; ``plan`` makes that of a direction."""

    plan: Callable[..., ReshardPlan]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    rank: int

    @cached_property
    def forward_part(self) -> RankPart:
        """The part of this rank in the forward plan."""
        return RankPart(self.plan(backward=False), self.rank)

    @cached_property
    def backward_part(self) -> RankPart:
        """The part of this rank in the backward plan."""
        return RankPart(self.plan(backward=True), self.rank)


_Key = tuple[tuple[int, Announcement], ...]


@define(eq=False)
class ShapePlans:
    """The plans of the edge ``name`` for the rank of ``wiring``, by announced shapes.

    Attributes:
        comm_dtype: dtype on the wire; None is the tensor's own.
        variable: whether shapes may change from message to message.
        shape: the whole tensor's extents that the edge declares; None is any.
    """

    name: str
    wiring: BridgeWiring
    choice: StrategyChoice
    comm_dtype: torch.dtype | None
    variable: bool
    shape: Sequence[int | None] | None = None
    _cached: Callable[[_Key], PlanPair] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._cached = lru_cache(maxsize=_MOST_KNOWN)(self._planned)
        if self.shape is not None and len(self.shape) != len(self.wiring.axes):
            raise ShapeError(f"{self.name} declares shape {self.shape}, but tensor_ndim={len(self.wiring.axes)}")

    def own_plans(self, announced: Announcement) -> PlanPair:
        """The plans for what this source rank announces.

        Raises:
            ShapeError: the shape is not the declared one, or no part of it; samples that do not fit the shape; or
                partial sums are of a dtype that is not added up.
            BridgeError: fixed shapes, and replicas of this size give a destination replica other samples than its own.
        """
        src, axes, rank = self.wiring.src, self.wiring.axes, self.wiring.rank
        if self.wiring.reductions:
            require_summed(getattr(torch, announced.dtype), self.name)
        batch, size, lane = batch_axis(axes), lane_size(src, axes, announced), src.lane_of(rank)
        weights = src.lane_weights or (1,) * src.num_lanes
        whole: list[int | None] = list(size.extents)
        whole[batch] = None
        if announced.samples is None and weights[lane]:
            rows = announced.shape[batch]
            whole[batch] = rows * sum(weights) // weights[lane]
            self._require_contract((rows,) * src.num_lanes)
        for axis, (extent, declared) in enumerate(zip(whole, self.shape or (), strict=False)):
            if declared is not None and extent is not None and extent != declared:
                raise ShapeError(
                    f"{self.name}: rank {rank} sends shape {announced.shape}, which is {extent} on axis {axis} "
                    f"over all ranks; the edge declares {self.shape}"
                )
        plans = self.plans({rank: announced})
        if plans.forward_part.source_shape != announced.shape:
            raise ShapeError(
                f"{self.name}: {announced} of rank {rank} is no part, which is {plans.forward_part.source_shape}"
            )
        return plans

    def _require_contract(self, rows: tuple[int, ...]) -> None:
        """`BridgeError` where undeclared source replicas of ``rows`` give the destination samples that are not its."""
        src, dst = self.wiring.src, self.wiring.dst
        if self.variable or src.lane_weights or dst.lane_weights:
            return
        if cuts_by_lane(rows, dst.num_lanes) != replica_bounds(sum(rows), dst.num_lanes):
            taken = replica_sizes(sum(rows), dst.num_lanes)
            raise BridgeError(
                f"{self.name}: a batch of {sum(rows)} gives replicas of {taken}, some from two source replicas; "
                f"declare src_lanes={rows} and dest_lanes={taken}"
            )

    def plans(self, announced: Mapping[int, Announcement]) -> PlanPair:
        """Plans for what some source ranks have announced; `ShapeError` where they differ in more than the batch."""
        return self._cached(tuple(sorted(announced.items())))

    def _planned(self, announced: _Key) -> PlanPair:
        src, dst, axes = self.wiring.src, self.wiring.dst, self.wiring.axes
        lanes: dict[int, LaneSize] = {}
        for rank, one in announced:
            lane, size = src.lane_of(rank), lane_size(src, axes, one)
            if lanes.setdefault(lane, size) != size:
                raise ShapeError(
                    f"{self.name}: ranks of lane {lane} of {src.name!r} send different parts: rank {rank} {size}, "
                    f"another {lanes[lane]}"
                )
        if len(lanes) == src.num_lanes and all(size.samples is None for size in lanes.values()):
            self._require_contract(tuple(lanes[lane].units for lane in range(src.num_lanes)))
        dtypes = {one.dtype for _, one in announced}
        if len(dtypes) != 1:
            raise ShapeError(f"{self.name}: source ranks send different dtypes: {sorted(dtypes)}")
        dtype: torch.dtype = getattr(torch, dtypes.pop())
        rounds = self.comm_dtype is not None and dtype.is_floating_point
        wire: torch.dtype = self.comm_dtype if rounds else dtype  # type: ignore[assignment]
        sizes = sizes_of(src, axes, lanes)
        plan = partial(
            plan_reshard,
            src,
            dst,
            sizes,
            strategy=self.choice.strategy,
            itemsize=wire.itemsize,
            leader_below=self.choice.leader_below,
            links=self.choice.links,
            rank=self.wiring.rank,
        )
        return PlanPair(plan, dtype, wire, self.wiring.rank)
