"""Checks of numbers, shared by everything that takes any."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Rational, Real
from typing import Any, TypeGuard, TypeVar

from pipegrid.layout.errors import LayoutError
from pipegrid.layout.parser import MAX_LAYERS

_LARGEST = 10**100  # so that no sum leaves the range of a float


def whole_number(name: str, value: object, *, least: int) -> int:
    """The value as an int, if it is a whole number: those of numpy and torch are, booleans are not.

    Raises:
        LayoutError: it is none, or it is below ``least``.
    """
    number = _index(value)
    if number is not None and number >= least:
        return number
    raise LayoutError(f"{name} must be a whole number >= {least}, got {shown(value)}")


def number_below(name: str, value: object, size: int) -> int:
    """The value as an int, if it counts one of ``size`` things.

    Raises:
        LayoutError: it is no whole number from 0 to ``size - 1``.
    """
    number = _index(value)
    if number is not None and 0 <= number < size:
        return number
    raise LayoutError(f"{name} must be a whole number from 0 to {size - 1}, got {shown(value)}")


def _index(value: Any) -> int | None:
    if type(value) is int:
        return value
    # A boolean of any library has a dtype that says so, and some have an index all the same.
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch has errors of its own for tensors that are no index
        return None


def flag(name: str, value: object) -> bool:
    """The value, if it is True or False.

    Raises:
        LayoutError: it is neither.
    """
    if isinstance(value, bool):
        return value
    raise LayoutError(f"{name} must be True or False, got {shown(value)}")


Kind = TypeVar("Kind")


def of_type(name: str, value: object, kind: type[Kind], remedy: str) -> Kind:
    """The value, if it is a ``kind``.

    Raises:
        LayoutError: it is not; ``remedy`` says how to get one.
    """
    if isinstance(value, kind):
        return value
    raise LayoutError(f"{name} must be a {kind.__name__}, got {shown(value)}; {remedy}")


def shown(value: object) -> str:
    """A value as an error text repeats it: its representation, cut where it is long, and its type where that helps."""
    text = f"{value!r:.60}".replace("\n", " ")
    return text if value is None or isinstance(value, (bool, int, float, str)) else f"{text} ({type(value).__name__})"


def sizes_of_pipeline(pp: object, vpp: object) -> tuple[int, int]:
    """Both sizes as ints.

    Raises:
        LayoutError: one is not a whole number >= 1, or there are more stages than a layout may have.
    """
    ranks, chunks = whole_number("pp", pp, least=1), whole_number("vpp", vpp, least=1)
    if ranks * chunks > MAX_LAYERS:
        raise LayoutError(
            f"pp {ranks} and vpp {chunks} make {ranks * chunks} stages; a layout may have at most {MAX_LAYERS:,}"
        )
    return ranks, chunks


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
    raise LayoutError(f"{what} must be a finite number >= 0 (and below {float(_LARGEST):g}), got {shown(value)}")


def figure(what: str, value: object) -> None:
    """Refuse what is no result of adding amounts: no finite number >= 0.

    Raises:
        LayoutError: it is not.
    """
    ratio = _ratio(value)
    if ratio is None or ratio[0] < 0:
        raise LayoutError(f"{what} must be a finite number >= 0, got {shown(value)}")


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
    return tuple(
        tuple(tuple(whole_number(f"in_flight of pp rank {rank}", count, least=0) for count in peak) for peak in peaks)
        for rank, peaks in enumerate(in_flight)
    )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)
