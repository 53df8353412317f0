"""What the two ends of a bridge know of a message: the source's announcement, and the sizes it implies. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from attrs import evolve, field, frozen

from pipegrid.bridges.checks import as_integers
from pipegrid.bridges.errors import ShapeError
from pipegrid.bridges.reshard.side import BATCH, Side
from pipegrid.bridges.reshard.sizes import AxisNames, Sizes


def _as_ints(values: Sequence[int]) -> tuple[int, ...]:
    return as_integers(values, "a shape, or the rows of the samples,", error=ShapeError)


def _as_samples(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else _as_ints(values)


@frozen
class Announcement:
    """What a source rank says of its tensor: shape, dtype by name, and the rows of its lane's samples if packed."""

    shape: tuple[int, ...] = field(converter=_as_ints)
    dtype: str
    samples: tuple[int, ...] | None = field(default=None, converter=_as_samples)

    def encode(self) -> str:
        """As text, the same for equal announcements."""
        return json.dumps((self.shape, self.dtype, self.samples), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> Announcement:
        """From text."""
        return cls(*json.loads(text))


@frozen
class LaneSize:
    """One source lane as a rank of it knows it: samples, their rows where packed, and the other axes' extents."""

    units: int
    samples: tuple[int, ...] | None
    extents: tuple[int, ...]


def lane_size(side: Side, axes: AxisNames, announced: Announcement) -> LaneSize:
    """What the tensor of one source rank says about its lane: its parts of every other axis are equal ones."""
    if len(announced.shape) != len(axes):
        raise ShapeError(
            f"the edge from {side.name!r} carries tensors of {len(axes)} axes, got shape {announced.shape}; "
            f"give the number of axes as tensor_ndim (module_output_ndim of the module)"
        )
    extents = list(announced.shape)
    units = 0
    for axis, names in enumerate(axes):
        if BATCH in names:
            units = extents[axis] if announced.samples is None else len(announced.samples)
            extents[axis] = 0
        elif names:
            extents[axis] *= side.num_shards(names[0])
    return LaneSize(units, announced.samples, tuple(extents))


def sizes_of(src: Side, axes: AxisNames, lanes: Mapping[int, LaneSize]) -> Sizes:
    """Sizes for planning from the lanes that a rank knows; what it does not know does not change its own part.

    Raises:
        ShapeError: the lanes differ in an axis other than the batch, or some are packed and some are not, or a
            lane's samples are not a multiple of its ``lane_weights``.
    """
    first, some = next(iter(lanes.items()))
    for lane, size in lanes.items():
        if (size.extents, size.samples is None) != (some.extents, some.samples is None):
            raise ShapeError(
                f"lanes {first} and {lane} of {src.name!r} send tensors that differ in more than the batch: "
                f"{some.extents} and {size.extents} (0 stands for the batch axis), packed: {some.samples is not None} "
                f"and {size.samples is not None}; pad the other axes, or pack [tokens, hidden] with samples"
            )
        if src.lane_weights is not None:
            weight = src.lane_weights[lane]
            if size.units % weight if weight else size.units:
                raise ShapeError(
                    f"lane {lane} of {src.name!r} was declared with {weight} samples per microbatch, but sends "
                    f"{size.units} rows, which is no multiple; give samples, or fix src_lanes"
                )
    weights = src.lane_weights or (1,) * src.num_lanes
    known = [lanes.get(lane, evolve(some, units=some.units if weights[lane] else 0)) for lane in range(src.num_lanes)]
    samples = None
    if some.samples is not None:
        known = [size if size.units else evolve(size, samples=()) for size in known]
        samples = tuple(rows for size in known for rows in size.samples or ())
    shape = list(some.extents)
    units = tuple(size.units for size in known)
    batch = next(axis for axis, names in enumerate(axes) if BATCH in names)
    shape[batch] = sum(units) if samples is None else sum(samples)
    return Sizes(tuple(shape), axes=axes, src_lanes=units, samples=samples)
