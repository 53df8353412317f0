"""Checks of arguments at the entrances where a mistake would surface far away. Pure, one check for each kind.

Every check takes the argument's name, the remedy and ``error``, the exception type that its caller raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from pipegrid.topology.fields import ErrorType, shown

Kind: TypeAlias = type | tuple[type, ...]
"""The second argument of `isinstance`."""


def _is_a(value: object, kind: Kind) -> bool:
    """Whether a value is an instance of ``kind``; True and False are no numbers."""
    if isinstance(value, bool) and kind is not object:
        return kind is bool
    return isinstance(value, kind)


def require(name: str, value: object, kind: Kind, remedy: str, *, error: ErrorType) -> None:
    """Raise ``error`` unless ``value`` is an instance of ``kind``."""
    if not _is_a(value, kind):
        raise error(f"{name} is {shown(value)}; {remedy}")


def require_items(name: str, value: Any, kind: Kind, remedy: str, *, error: ErrorType) -> tuple[Any, ...]:
    """The items of a collection, all instances of ``kind``; of a mapping the keys. A string is no collection."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise error(f"{name} is {shown(value)}; {remedy}")
    try:
        items = tuple(value)
    except TypeError:  # a tensor without axes calls itself iterable
        raise error(f"{name} is {shown(value)}; {remedy}") from None
    for index, item in enumerate(items):
        if not _is_a(item, kind):
            raise error(f"item {index} of {name} is {shown(item)}; {remedy}")
    return items
