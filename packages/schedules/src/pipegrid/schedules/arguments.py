"""Whether an argument is of the kind that a function takes, or what to do about it. Pure, one check for each kind.

Every check is told the argument's name, the remedy, and ``error``, the one error that its caller raises for whatever
is wrong with its arguments. Types are looked at where a value comes in, so that what lies behind can rely on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Refusal: TypeAlias = Callable[[str], Exception]
"""Makes the error to raise, from its text."""

_PLAIN = (type(None), bool, int, float, str, bytes)
_TEXT = 60


def shown(value: object) -> str:
    """A value as an error names it: in one line, shortened, with its type where it does not show that itself."""
    text = " ".join(repr(value).split())
    short = text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..."
    if type(value) in _PLAIN:
        return short
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}, {short}"


Kind: TypeAlias = type | tuple[type, ...]
"""What `isinstance` takes."""


def _is_a(value: object, kind: Kind) -> bool:
    """Whether a value is of a kind; True and False are no numbers."""
    if isinstance(value, bool) and kind is not object:
        return kind is bool
    return isinstance(value, kind)


def require(name: str, value: object, kind: Kind, remedy: str, *, error: Refusal) -> None:
    """Refuse what is not of a kind."""
    if not _is_a(value, kind):
        raise error(f"{name} is {shown(value)}; {remedy}")


def require_function(name: str, value: object, remedy: str, *, error: Refusal) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise error(f"{name} is {shown(value)}; {remedy}")


def require_choice(name: str, value: object, choices: tuple[str, ...], *, error: Refusal) -> None:
    """Refuse what is none of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise error(f"{name} is {shown(value)}; choose {' or '.join(map(repr, choices))}")


def is_integer(value: object, least: int = 0) -> bool:
    """Whether a value is a Python integer of at least ``least``; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require_integer(name: str, value: Any, remedy: str = "", *, error: Refusal, least: int = 1) -> int:
    """``value``, where `is_integer` says so. One of another library is to be converted where it is counted."""
    if not is_integer(value, least):
        if not isinstance(value, (int, float)) and hasattr(type(value), "__index__"):
            remedy = "pass int(...) of it"
        raise error(f"{name} is {shown(value)}; it must be an integer of at least {least}{remedy and f': {remedy}'}")
    return int(value)


def as_number(
    name: str, value: Any, remedy: str, *, error: Refusal, above: float = -math.inf, finite: bool = True
) -> float:
    """``value`` as a float above ``above``: a number, also of another library, as of a tensor with one element."""
    number = math.nan
    if not isinstance(value, (bool, str, bytes)) and hasattr(type(value), "__float__"):
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several, say
            number = math.nan
    if not number > above or (finite and math.isinf(number)):  # the comparison is False for nan, too
        raise error(f"{name} is {shown(value)}; {remedy}")
    return number


def require_items(
    name: str,
    value: Any,
    kind: Kind,
    remedy: str,
    *,
    error: Refusal,
) -> tuple[Any, ...]:
    """The items of a collection that holds nothing but ``kind``; of a mapping the keys. A text is none."""
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
