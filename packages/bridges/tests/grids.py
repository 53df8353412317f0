"""A grid as bridges take one: sizes, dims and the first rank."""

from __future__ import annotations

from types import SimpleNamespace


def grid(offset=0, **dims):
    """Of ``dims`` by size, the fastest first; ``offset`` is its first rank."""
    return SimpleNamespace(shape=tuple(dims.values()), dim_names=tuple(dims), rank_offset=offset)
