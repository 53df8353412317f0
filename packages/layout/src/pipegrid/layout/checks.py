"""Checks of numbers, shared by everything that takes any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Rational, Real
from typing import Any, TypeGuard

from pipegrid.layout.errors import LayoutError
from pipegrid.layout.parser import MAX_LAYERS

_LARGEST = 10**100  # so that no sum leaves the range of a float


def whole_number(name: str, value: object, *, least: int) -> int:
    """The value, if it is a whole number.

    Raises:
        LayoutError: it is not, or it is below ``least``.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise LayoutError(f"{name} must be a whole number >= {least}, got {value!r:.60}")


def number_of_stages(pp: object, vpp: object) -> int:
    """``pp * vpp``.

    Raises:
        LayoutError: one is not a whole number >= 1, or there are more stages than a layout may have.
    """
    stages = whole_number("pp", pp, least=1) * whole_number("vpp", vpp, least=1)
    if stages > MAX_LAYERS:
        raise LayoutError(f"pp {pp} and vpp {vpp} make {stages} stages; a layout may have at most {MAX_LAYERS:,}")
    return stages


Ratio = tuple[int, int]
"""A number exactly: numerator and denominator."""


def amount(what: str, value: object) -> Ratio:
    """A cost or an amount of memory, exactly.

    Raises:
        LayoutError: it is not a finite number >= 0 (and below 1e100).
    """
    ratio = _ratio(value)
    if ratio is not None and 0 <= ratio[0] < _LARGEST * ratio[1]:
        return ratio
    raise LayoutError(f"{what} must be a finite number >= 0 (and below {float(_LARGEST):g}), got {value!r:.60}")


def _ratio(value: object) -> Ratio | None:
    # Floats and ints first: models have thousands of layers, and asking an abstract class is slow.
    if isinstance(value, float):
        return value.as_integer_ratio() if math.isfinite(value) else None
    if isinstance(value, int):
        return None if isinstance(value, bool) else (value, 1)
    if isinstance(value, Rational):
        return int(value.numerator), int(value.denominator)
    return _ratio(float(value)) if isinstance(value, Real) else None


def rank_limits(limit: object, pp: int) -> list[Ratio]:
    """One limit per pp rank, from one for all or one for each.

    Raises:
        LayoutError: not an amount of memory, and not a list of so many.
    """
    if isinstance(limit, list | tuple):
        if len(limit) != pp:
            raise LayoutError(f"limit has {len(limit)} values, pp is {pp}; give one per rank, or a single number")
        return [amount(f"limit of pp rank {rank}", one) for rank, one in enumerate(limit)]
    return [amount("limit", limit)] * pp


def checked_peaks(in_flight: object, pp: int, vpp: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """What is in flight under some schedule, as tuples.

    Raises:
        LayoutError: it is not, for each rank, at least one list with a whole number >= 0 for each chunk.
    """
    form = f"in_flight must be, for each of {pp} pp ranks, at least one list of {vpp} whole numbers >= 0, one per chunk"
    if not _is_list(in_flight) or len(in_flight) != pp:
        raise LayoutError(f"{form}; got {in_flight!r:.60}")
    for rank, peaks in enumerate(in_flight):
        if not _is_list(peaks) or not peaks:
            raise LayoutError(f"{form}; for rank {rank} got {peaks!r:.60}")
        for peak in peaks:
            if not _is_list(peak) or len(peak) != vpp:
                raise LayoutError(f"{form}; for rank {rank} got {peak!r:.60}")
            for count in peak:
                whole_number(f"in_flight of pp rank {rank}", count, least=0)
    return tuple(tuple(tuple(peak) for peak in peaks) for peaks in in_flight)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)
