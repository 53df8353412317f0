"""What arguments are: each check gives the value in its one form, or says what was given, the rule and the remedy.

No torch.
"""

from __future__ import annotations

import operator
from collections.abc import KeysView, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from pipegrid.bridges.errors import BridgeError

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


def as_integer(value: object, what: str, *, least: int, most: int | None = None, error: ErrorType = BridgeError) -> int:
    """``value`` as an int of at least ``least`` and, where given, at most ``most``."""
    number = index_of(value)
    if number is None or number < least or (most is not None and number > most):
        bound = f"at least {least}" if most is None else f"{least} to {most}"
        raise error(f"{what} is {shown(value)}; it must be an integer of {bound}")
    return number


def as_integers(value: Any, what: str, *, error: ErrorType = BridgeError) -> tuple[int, ...]:
    """``value``, which lists integers; whether they may be negative is for the caller to say."""
    listed = as_tuple(value, what, "integers", error=error)
    numbers = tuple(map(index_of, listed))
    if None in numbers:
        raise error(f"{what} is {shown(value)}, with {shown(listed[numbers.index(None)])} in it; give integers only")
    return numbers  # type: ignore[return-value]  # none of them is None


def as_flag(value: object, what: str, *, error: ErrorType = BridgeError) -> bool:
    """``value``, which is True or False."""
    if not isinstance(value, bool):
        raise error(f"{what} is {shown(value)}; it must be True or False")
    return value


def as_text(value: object, what: str, *, error: ErrorType = BridgeError) -> str:
    """``value``, which is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise error(f"{what} is {shown(value)}; it must be a text that is not empty")
    return value


def as_tuple(value: Any, what: str, of: str, *, error: ErrorType = BridgeError) -> tuple[Any, ...]:
    """``value``, which lists things; a text lists none, and a set has no order that all ranks agree on."""
    disordered = isinstance(value, AbstractSet) and not isinstance(value, KeysView)
    if not isinstance(value, (str, bytes, Mapping)) and not disordered:
        try:
            return tuple(value)
        except TypeError:
            pass
    raise error(f"{what} is {shown(value)}; it must be a list of {of}")


def as_mapping(value: object, what: str, of: str, *, error: ErrorType = BridgeError) -> dict[Any, Any]:
    """``value``, which maps texts to something, as a dict of one's own."""
    if not isinstance(value, Mapping):
        raise error(f"{what} is {shown(value)}; it must be a dict of {of}")
    for name in value:
        as_text(name, f"a name in {what}", error=error)
    return dict(value)


def as_kind(
    value: object, what: str, kind: type[Kind] | tuple[type[Kind], ...], remedy: str, *, error: ErrorType = BridgeError
) -> Kind:
    """``value``, which is a ``kind``, or one of several."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(one.__name__ for one in kinds)
        raise error(f"{what} is {shown(value)}; it must be {names}: {remedy}")
    return value


def check_grid(grid: Any, what: str, *, error: ErrorType = BridgeError) -> None:
    """Refuse what has not the arithmetic of a grid: as many sizes as names of dims, and a first rank."""
    if not all(hasattr(grid, name) for name in ("shape", "dim_names", "rank_offset")) or isinstance(grid, type):
        raise error(f"{what} is {shown(grid)}; it must be a grid: a HyperCommGrid, or what has its attributes")
    sizes = as_integers(grid.shape, f"the shape of {what}", error=error)
    names = as_tuple(grid.dim_names, f"the dim_names of {what}", "names", error=error)
    for name in names:
        as_text(name, f"a dim of {what}", error=error)
    if len(sizes) != len(names) or min(sizes, default=1) < 1 or len(set(names)) != len(names):
        raise error(f"{what} has dims {list(names)} of sizes {list(sizes)}; give each dim its own name, and at least 1")
    as_integer(grid.rank_offset, f"the rank_offset of {what}", least=0, error=error)
