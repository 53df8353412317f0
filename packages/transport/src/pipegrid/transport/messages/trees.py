"""Trees: dicts, lists and tuples, nested, with tensors, numbers and None in them. No torch.

What crosses an edge is a tree, and so is its declaration; this is the one place that walks them. Inside of a model,
values also have classes that libraries register with torch's pytree: `pipegrid.stages.torch_compat` uses that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from pipegrid.transport.errors import P2PUsageError

Tree: TypeAlias = Any
"""The structure of a tree: None, the number of a leaf, or ``(kind, children)`` with kind ``"list"``, ``"tuple"`` or
``"dict"``; the children of a dict are ``(key, tree)``."""

_KINDS: dict[type, str] = {list: "list", tuple: "tuple", dict: "dict"}
_DEEPEST = 100  # levels; a tree that contains itself has no end


def mapped(function: Callable[..., Any], *values: Any) -> Any:
    """A tree like these, which have equal containers, with ``function`` of the parts at one place in all of them."""
    first = values[0]
    if isinstance(first, dict):
        return {key: mapped(function, *[value[key] for value in values]) for key in first}
    if isinstance(first, (list, tuple)):
        parts = [mapped(function, *items) for items in zip(*values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)  # a named tuple takes fields
    return function(*values)


def parts_of(value: Any) -> list[Any]:
    """The parts that are no containers; those of a dict by its keys as text, whose order may differ between ranks."""
    if isinstance(value, dict):
        return [part for key in sorted(value, key=str) for part in parts_of(value[key])]
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in parts_of(item)]
    return [value]


def flatten(value: Any, *, exact: bool = True) -> tuple[list[Any], Tree]:
    """The leaves of ``value`` in order, and the structure. None is no leaf.

    ``exact``: containers are only what `unflatten` makes, and what JSON keeps (no subclasses, and strings or integers
    as the keys of a dict); others are leaves. Else any mapping, list and tuple is a container. Raises P2PUsageError for
    more than 100 levels.
    """
    leaves: list[Any] = []
    return leaves, _flatten(value, exact, leaves, _DEEPEST)


def _flatten(value: Any, exact: bool, leaves: list[Any], levels: int) -> Tree:
    if value is None:
        return None
    kind = _KINDS.get(type(value)) if exact else _kind_of(value)
    if kind is None or (exact and kind == "dict" and not {str, int}.issuperset(map(type, value))):
        leaves.append(value)
        return len(leaves) - 1
    if levels == 0:
        raise P2PUsageError(f"a payload has more than {_DEEPEST} levels, or contains itself")
    if kind == "dict":
        return kind, tuple([(key, _flatten(part, exact, leaves, levels - 1)) for key, part in value.items()])
    return kind, tuple([_flatten(part, exact, leaves, levels - 1) for part in value])


def _kind_of(value: Any) -> str | None:
    if isinstance(value, Mapping):
        return "dict"
    return "list" if isinstance(value, list) else "tuple" if isinstance(value, tuple) else None


def unflatten(tree: Tree, leaves: Sequence[Any]) -> Any:
    """The value of this structure with these leaves."""
    if isinstance(tree, int):
        return leaves[tree]
    if tree is None:
        return None
    kind, children = tree
    if kind == "dict":
        return {key: unflatten(child, leaves) for key, child in children}
    parts = [unflatten(child, leaves) for child in children]
    return parts if kind == "list" else tuple(parts)


def places(tree: Tree, path: str = "") -> Iterator[tuple[str, int | None]]:
    """The leaves of a structure and each None in it, in order, with its place as Python writes it: ``['a'][0]``."""
    if tree is None or isinstance(tree, int):
        yield path, tree
    else:
        for key, child in _children(tree).items():
            yield from places(child, f"{path}[{key!r}]")


def select(tree: Tree, value: Any, mismatch: Callable[[str, Tree, Any], Exception], path: str = "") -> list[Any]:
    """The parts of ``value`` at the leaves of a structure, in order; a list and a tuple are alike.

    Raises ``mismatch`` of the place, the structure there, and what ``value`` has in its stead.
    """
    if isinstance(tree, int):
        return [value]
    if tree is None and value is None:
        return []
    kind = _kind_of(value)
    if tree is None or kind is None or (kind == "dict") is not (tree[0] == "dict"):
        raise mismatch(path, tree, value)
    given, children = value if kind == "dict" else dict(enumerate(value)), _children(tree)
    if given.keys() != children.keys():
        raise mismatch(path, tree, value)
    parts = [select(child, given[key], mismatch, f"{path}[{key!r}]") for key, child in children.items()]
    return [leaf for part in parts for leaf in part]


def _children(tree: Tree) -> dict[Any, Tree]:
    kind, children = tree
    return dict(children if kind == "dict" else enumerate(children))


def describe(tree: Tree, leaves: Sequence[object]) -> str:
    """A structure in words, with these at its leaves."""
    if tree is None:
        return "None"
    if isinstance(tree, int):
        return str(leaves[tree])
    kind, children = tree
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {describe(child, leaves)}" for key, child in children) + "}"
    inside = ", ".join(describe(child, leaves) for child in children)
    return f"[{inside}]" if kind == "list" else f"({inside})"
