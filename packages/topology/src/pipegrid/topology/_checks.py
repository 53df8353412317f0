"""What arguments are: each check gives the value in its one form, or says what was given, the rule and the remedy.

The error is the caller's, since it is part of what a function promises. No torch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, KeysView, Mapping
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import Any, TypeVar

from pipegrid.topology.errors import GridShapeError, UnknownDimensionError

Kind = TypeVar("Kind")
ErrorType = type[Exception]


def shown(value: object) -> str:
    """A value as an error repeats it: its representation, cut where it is long, and its type where that helps."""
    text = " ".join(f"{value!r:.80}".split())
    return text if value is None or isinstance(value, (bool, int, float, str)) else f"{text} ({type(value).__name__})"


def index_of(value: Any) -> int | None:
    """``value`` as an int: the integers of numpy and torch are integers, booleans of any library are not."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch has errors of its own for tensors that are no index
        return None


def as_integer(
    value: object, what: str, *, least: int, most: int | None = None, error: ErrorType = GridShapeError
) -> int:
    """``value`` as an int of at least ``least`` and, where given, at most ``most``."""
    number = index_of(value)
    if number is None or number < least or (most is not None and number > most):
        bound = f"at least {least}" if most is None else f"{least} to {most}"
        raise error(f"{what} is {shown(value)}; it must be an integer of {bound}")
    return number


def as_flag(value: object, what: str, *, error: ErrorType) -> bool:
    """``value``, which is True or False."""
    if not isinstance(value, bool):
        raise error(f"{what} is {shown(value)}; it must be True or False")
    return value


def as_text(value: object, what: str, *, error: ErrorType) -> str:
    """``value``, which is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise error(f"{what} is {shown(value)}; it must be a text that is not empty")
    return value


def as_tuple(value: Any, what: str, of: str, *, error: ErrorType, ordered: bool = True) -> tuple[Any, ...]:
    """``value``, which lists things; a text lists none, and a set has no order that all ranks agree on."""
    disordered = ordered and isinstance(value, AbstractSet) and not isinstance(value, KeysView)
    if not isinstance(value, (str, bytes)) and not disordered:
        try:
            return tuple(value)
        except TypeError:
            pass
    raise error(f"{what} is {shown(value)}; it must be a list of {of}")


def as_names(value: object, what: str, *, error: ErrorType) -> tuple[str, ...]:
    """``value``, which lists texts that are not empty."""
    names = as_tuple(value, what, "names", error=error, ordered=False)
    for name in names:
        as_text(name, f"a name in {what}", error=error)
    return names


def as_dims(value: str | Iterable[str], *, error: ErrorType = UnknownDimensionError) -> tuple[str, ...]:
    """The dimensions that are named: by one name, or by a list of them in any order."""
    return (value,) if isinstance(value, str) else as_names(value, "dims", error=error)


def as_mapping(value: object, what: str, of: str, *, error: ErrorType) -> dict[Any, Any]:
    """``value``, which maps texts to something, as a dict of one's own."""
    if not isinstance(value, Mapping):
        raise error(f"{what} is {shown(value)}; it must be a dict of {of}")
    for name in value:
        as_text(name, f"a name in {what}", error=error)
    return dict(value)


def as_kind(value: object, what: str, kind: type[Kind], remedy: str, *, error: ErrorType) -> Kind:
    """``value``, which is a ``kind``."""
    if not isinstance(value, kind):
        raise error(f"{what} is {shown(value)}; it must be a {kind.__name__}: {remedy}")
    return value


def as_timeout(value: object, what: str, *, error: ErrorType) -> timedelta | None:
    """``value``, which is a time above zero, or None."""
    if value is None or (isinstance(value, timedelta) and value > timedelta(0)):
        return value
    raise error(f"{what} is {shown(value)}; it must be a datetime.timedelta above zero, or None for the default")
