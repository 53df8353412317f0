"""Checks of arguments that annotations do not express: lists, mappings and grids. No torch."""

from __future__ import annotations

from collections.abc import KeysView, Mapping
from collections.abc import Set as AbstractSet
from typing import Annotated, Any

from pipegrid.bridges.errors import BridgeError
from pipegrid.topology.fields import Name, checked, integer, shown

ErrorType = type[Exception]


def as_integer(value: object, what: str, *, least: int, most: int | None = None, error: ErrorType = BridgeError) -> int:
    """``value`` as an int of at least ``least`` and at most ``most``."""
    number: int = checked(value, Annotated[int, integer(least, most)], what, error)
    return number


def as_integers(value: Any, what: str, *, error: ErrorType = BridgeError) -> tuple[int, ...]:
    """``value`` as a tuple of ints."""
    numbers: tuple[int, ...] = checked(value, tuple[Annotated[int, integer()], ...], what, error)
    return numbers


def as_text(value: object, what: str, *, error: ErrorType = BridgeError) -> str:
    """``value``, a string that is not empty."""
    text: str = checked(value, Name, what, error)
    return text


def as_tuple(value: Any, what: str, of: str, *, error: ErrorType = BridgeError) -> tuple[Any, ...]:
    """``value`` as a tuple; strings, mappings and sets (without an order that all ranks agree on) are errors."""
    disordered = isinstance(value, AbstractSet) and not isinstance(value, KeysView)
    if not isinstance(value, (str, bytes, Mapping)) and not disordered:
        try:
            return tuple(value)
        except TypeError:
            pass
    raise error(f"{what} is {shown(value)}; it must be a list of {of}")


def as_mapping(value: object, what: str, of: str, *, error: ErrorType = BridgeError) -> dict[Any, Any]:
    """``value``, a mapping whose keys are strings, as a new dict."""
    if not isinstance(value, Mapping):
        raise error(f"{what} is {shown(value)}; it must be a dict of {of}")
    for name in value:
        as_text(name, f"a name in {what}", error=error)
    return dict(value)


def check_grid(grid: Any, what: str, *, error: ErrorType = BridgeError) -> None:
    """Raise unless ``grid`` has the arithmetic of a grid: as many sizes as names of dims, and a first rank."""
    if not all(hasattr(grid, name) for name in ("shape", "dim_names", "rank_offset")) or isinstance(grid, type):
        raise error(f"{what} is {shown(grid)}; it must be a grid: a HyperCommGrid, or what has its attributes")
    sizes = as_integers(grid.shape, f"the shape of {what}", error=error)
    names = as_tuple(grid.dim_names, f"the dim_names of {what}", "names", error=error)
    for name in names:
        as_text(name, f"a dim of {what}", error=error)
    if len(sizes) != len(names) or min(sizes, default=1) < 1 or len(set(names)) != len(names):
        raise error(f"{what} has dims {list(names)} of sizes {list(sizes)}; give each dim its own name, and at least 1")
    as_integer(grid.rank_offset, f"the rank_offset of {what}", least=0, error=error)
