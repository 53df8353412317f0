"""The sizes of the tensor that a boundary transfers: from parts of [0, 1) to rows. No torch.

A side holds parts of each axis (`Side.intervals`). Of ``n`` rows, the part [p, q) is the rows ``floor(n p)`` to
``floor(n q)``. Rounding down is monotone, so parts that tile [0, 1) become ranges that tile the axis, divisible or not.

The batch is rounded inside each source replica, as replicas may differ: with replica ``k`` on [p_k, p_k+1) and of
``u_k`` samples, a point ``p`` in it is sample ``u_0 + ... + u_k-1 + floor(u_k (p - p_k) / (p_k+1 - p_k))`` (see
`batch_map`). Where each source replica is cut by itself, the bounds of the destination replicas are those of
`replica_bounds` (`cuts_of_lane`).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

from attrs import field, frozen

from pipegrid.core.fields import Index, Name, checked, checked_fields, integer, shown
from pipegrid.reshard.box import Span, merge
from pipegrid.reshard.errors import BridgeError, ShapeError
from pipegrid.reshard.side import BATCH, Interval, Side
from pipegrid.topology import replica_bounds, replica_sizes

AxisNames = tuple[tuple[str, ...], ...]
"""The names of each axis of the tensor, major first: ``(("b", "s"), ("h",))`` is ``[b*s, h]``."""


Parts = tuple[tuple[Interval, ...], ...]
"""The parts of [0, 1) that each shard of an axis holds."""

_Axes = Annotated[int, integer(1, 64)]  # as torch has it


SPLIT_SIZES = "_mimo_bridge_split_sizes"
"""The attribute by which Megatron's models mark a tensor with the rows of its samples."""


def marked_samples(tensor: Any) -> tuple[int, ...] | None:
    """The rows of each sample by the attribute `SPLIT_SIZES` of a tensor; None of one without it.

    Raises:
        ShapeError: the attribute has something else than numbers of rows.

    Examples:
        >>> from types import SimpleNamespace
        >>> tensor = SimpleNamespace(shape=(5, 4), **{SPLIT_SIZES: [2, 3]})
        >>> marked_samples(tensor)
        (2, 3)
    """
    marked = getattr(tensor, SPLIT_SIZES, None)
    if marked is None:
        return None
    samples: tuple[int, ...] = checked(marked, tuple[Index, ...], f"the attribute {SPLIT_SIZES}", ShapeError)
    return samples


def as_axis_of(dim_mapping: Mapping[str, int]) -> dict[str, int]:
    """The axis of each name, that of the batch among them.

    Examples:
        >>> as_axis_of({"s": 1, "b": 0, "h": 2})
        {'s': 1, 'b': 0, 'h': 2}
    """
    if not isinstance(dim_mapping, Mapping):
        raise BridgeError(f"dim_mapping is {shown(dim_mapping)}; it must be a dict from names to axes")
    mapping = {
        name: checked(axis, Index, f"the axis of {name!r} in dim_mapping", BridgeError)
        for name, axis in dim_mapping.items()
    }
    if BATCH not in mapping:
        raise BridgeError(f"dim_mapping {mapping} names no batch axis; add 'b': the axis that replicas split")
    return mapping


def as_axes(value: AxisNames) -> AxisNames:
    """The names of each axis of a tensor, of which the batch alone may have a second name: what is folded into it.

    Examples:
        >>> as_axes([("b",), ("s",), ("h",)])
        (('b',), ('s',), ('h',))
    """
    axes: AxisNames = checked(value, tuple[tuple[Name, ...], ...], "axes", BridgeError)
    for names in axes:
        if len(names) > 2 or (len(names) == 2 and names[0] != BATCH):
            raise BridgeError(f"axes {axes} fold {names} into one; one more axis can be folded into the batch")
    if len(set(itertools.chain(*axes))) != sum(map(len, axes)):
        raise BridgeError(f"axes {axes} have a name twice")
    return axes


def batch_axis(axes: AxisNames) -> int:
    """The axis that replicas split."""
    return next(axis for axis, names in enumerate(axes) if BATCH in names)


def axis_names(ndim: int, dim_mapping: Mapping[str, int] | None = None) -> AxisNames:
    """Names of the axes of a tensor of ``ndim`` axes from ``{"s": 1, "b": 0, "h": 2}`` (the default).

    For a 2-d tensor, a mapping that names axes past the second means ``[b*s, h]``: the sequence is folded
    into the batch axis, which is the first.

    Raises:
        BridgeError: no batch axis, an axis outside of the tensor, or two names for one axis of which
            neither is the batch.

    Examples:
        >>> axis_names(3), axis_names(2, {"s": 1, "b": 0, "h": 2})
        ((('b',), ('s',), ('h',)), (('b', 's'), ('h',)))
    """
    ndim = checked(ndim, _Axes, "tensor_ndim", BridgeError)
    mapping = {"s": 1, "b": 0, "h": 2} if dim_mapping is None else as_axis_of(dim_mapping)
    if ndim == 2 and any(axis > 1 for axis in mapping.values()):
        mapping = {"b": 0, "s": 0, "h": 1}
    if max(mapping.values()) >= ndim:
        raise BridgeError(f"dim_mapping {mapping} has an axis that the tensor lacks; it has {ndim}, from 0")
    batch_first = sorted(mapping, key=lambda name: name != BATCH)
    return as_axes(tuple(tuple(name for name in batch_first if mapping[name] == axis) for axis in range(ndim)))


@frozen(slots=False, field_transformer=checked_fields(ShapeError))
class Sizes:
    """The shape of the whole tensor, and the shares of its batch.

    Attributes:
        shape: extent of each axis of the whole tensor.
        axes: names of the axes, see `axis_names`.
        src_lanes: samples each source replica holds. Default: those of `pipegrid.topology.replica_sizes`.
        dst_lanes: samples each destination replica gets. Default: those of `pipegrid.topology.replica_sizes` where the
            source replicas have theirs; else each source replica is cut by itself, see ``cut``.
        samples: rows of each sample, in order over the whole batch, for packed tensors ``[tokens, h]``.
            Default: a sample is one row.
        cut: ``"lane"``: each source replica is cut as if all were like it, so that a source rank knows its cuts from
            its own tensor; a block that would cross from one source replica into the next stays within them.

    Raises:
        ShapeError: a shape of another number of axes, or with a negative extent.
        BridgeError: axes without names, or without a batch; replicas or samples that do not add up to the extent of the
            batch axis.

    Examples:
        >>> Sizes((6, 16, 8), axes=axis_names(3)).axes
        (('b',), ('s',), ('h',))
    """

    shape: tuple[Index, ...]
    axes: AxisNames = field(kw_only=True, converter=as_axes)
    src_lanes: tuple[Index, ...] | None = field(default=None, kw_only=True)
    dst_lanes: tuple[Index, ...] | None = field(default=None, kw_only=True)
    samples: tuple[Index, ...] | None = field(default=None, kw_only=True)
    cut: Literal["batch", "lane"] = field(default="batch", kw_only=True)

    def __attrs_post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ShapeError(f"shape {self.shape} has {len(self.shape)} axes, the edge names {self.axes}")
        if not any(BATCH in names for names in self.axes):
            raise BridgeError(f"axes {self.axes} name no batch axis; add 'b': the axis that replicas split")
        for name, total in (("samples", self.rows), ("src_lanes", self.units), ("dst_lanes", self.units)):
            counts = getattr(self, name)
            if counts is not None and sum(counts) != total:
                raise BridgeError(f"{name}={counts} add up to {sum(counts)}, the batch has {total}")

    @cached_property
    def batch_axis(self) -> int:
        """The axis that replicas split."""
        return batch_axis(self.axes)

    @property
    def rows(self) -> int:
        """Extent of the batch axis."""
        return self.shape[self.batch_axis]

    @property
    def units(self) -> int:
        """Samples in the batch; rows where a sample is one row."""
        return self.rows if self.samples is None else len(self.samples)


def destination_units(src: Side, dst: Side, sizes: Sizes, units: Sequence[int]) -> tuple[int, ...] | None:
    """Samples per destination replica, given those of the source replicas; None where each is cut by itself."""
    if sizes.dst_lanes is not None:
        return _one_per_lane("dst_lanes", sizes.dst_lanes, dst)
    if sizes.cut == "lane" or src.lane_weights is not None or dst.lane_weights is not None:
        return None
    even = replica_sizes(sizes.units, src.num_lanes)
    return replica_sizes(sizes.units, dst.num_lanes) if tuple(units) == even else None


def source_units(src: Side, sizes: Sizes) -> tuple[int, ...]:
    """Samples per source replica."""
    if sizes.src_lanes is not None:
        return _one_per_lane("src_lanes", sizes.src_lanes, src)
    if src.lane_weights is None:
        return replica_sizes(sizes.units, src.num_lanes)
    ends = [sizes.units * end // sum(src.lane_weights) for end in itertools.accumulate(src.lane_weights)]
    return tuple(b - a for a, b in itertools.pairwise([0, *ends]))


def _one_per_lane(what: str, lanes: tuple[int, ...], side: Side) -> tuple[int, ...]:
    if len(lanes) != side.num_lanes:
        raise BridgeError(f"{what}={lanes}, but side {side.name!r} has {side.num_lanes} replicas")
    return lanes


_bounds = lru_cache(maxsize=64)(replica_bounds)


def cuts_of_lane(units: int, lane: int, lanes: int, parts: int) -> dict[Fraction, int]:
    """The cuts of replica ``lane`` of ``lanes``, all of ``units`` samples, for ``parts`` replicas on the other side.

    Maps ``j / parts``, for each boundary of parts inside the replica, to the samples of it before the boundary: those
    of `replica_bounds` for the whole batch, kept within the replica.
    """
    inside = range(lane * parts // lanes + 1, -(-(lane + 1) * parts // lanes))
    if not inside:
        return {}
    bounds = _bounds(units * lanes, parts)
    return {Fraction(j, parts): min(max(bounds[j] - lane * units, 0), units) for j in inside}


def batch_map(src: Side, dst: Side, sizes: Sizes) -> tuple[Parts, Parts, Callable[[Fraction], int]]:
    """The parts of the batch, within [0, 1), of each replica of either side; and the first sample from a point on.

    Source replica ``k`` has its own samples. Both directions of a boundary use one map, anchored at the side that made
    the activation. Rounding down is monotone, so parts that tile [0, 1) become ranges of samples that tile the batch.
    """
    units = source_units(src, sizes)
    taken = destination_units(src, dst, sizes, units)
    lanes = src.intervals(BATCH, None if taken is None else units)
    breaks = (lanes[0][0][0], *(held[0][1] for held in lanes))
    for index, count in enumerate(units):
        if count and breaks[index] == breaks[index + 1]:
            raise BridgeError(f"replica {index} of side {src.name!r} has weight 0 but holds {count} samples")
    starts = tuple(itertools.accumulate(units, initial=0))
    cuts: dict[Fraction, int] = {}  # the points at which rounding down is not the rule
    if src.lane_weights is None and dst.lane_weights is None and taken is None:
        for lane, count in enumerate(units):
            within = cuts_of_lane(count, lane, src.num_lanes, dst.num_lanes)
            cuts.update((point, starts[lane] + before) for point, before in within.items())

    def first_sample(point: Fraction) -> int:
        if point >= 1:
            return starts[-1]
        if point in cuts:
            return cuts[point]
        lane = bisect.bisect_right(breaks, point) - 1
        low, high = breaks[lane], breaks[lane + 1]
        return starts[lane] + int((starts[lane + 1] - starts[lane]) * (point - low) / (high - low))

    return lanes, dst.intervals(BATCH, taken), first_sample


def axis_spans(
    sizes: Sizes, axis: int, parts: Sequence[Sequence[Interval]], to_sample: Callable[[Fraction], int]
) -> tuple[Span, ...]:
    """The rows of one axis that a rank holds, given its parts of each name folded into the axis."""
    names, extent, samples = sizes.axes[axis], sizes.shape[axis], sizes.samples
    whole = ((Fraction(0), Fraction(1)),)
    own = parts[0] if names else whole  # of the batch, if it is in the axis: what is folded into it comes second
    inner = parts[1] if len(names) == 2 else whole
    if BATCH not in names:
        return merge([(int(extent * a), int(extent * b)) for a, b in own])
    units = [(to_sample(a), to_sample(b)) for a, b in own]
    if samples is None:
        if tuple(inner) != whole:
            raise BridgeError(f"{names[1]!r} is folded into {names} and cut inside of each sample; give `samples`")
        return merge(units)
    starts = list(itertools.accumulate(samples, initial=0))
    return merge(
        [
            (starts[unit] + int(samples[unit] * a), starts[unit] + int(samples[unit] * b))
            for first, last in units
            for unit in range(first, last)
            for a, b in inner
        ]
    )
