"""A grid as bridges take one: sizes, dims and the first rank."""

from __future__ import annotations

from types import SimpleNamespace


def grid(offset=0, **dims):
    """Of ``dims`` by size, the fastest first; ``offset`` is its first rank."""
    return SimpleNamespace(shape=tuple(dims.values()), dim_names=tuple(dims), rank_offset=offset)


def sizes_of(one):
    """The sizes of a grid by dim."""
    return dict(zip(one.dim_names, one.shape, strict=True))


def coords_of(one, rank):
    """Where a rank lies in a grid, by dim: from the grid's arithmetic alone."""
    found, left = {}, rank - one.rank_offset
    for name, size in sizes_of(one).items():
        found[name], left = left % size, left // size
    return found


def share(whole, one, rank, *, batch=0, sequence=None):
    """What a rank of a grid holds of a whole tensor: the rows of its replica, its cp part of the sequence.

    ``batch`` and ``sequence`` are axes of the tensor, None where it has none.
    """
    sizes, coords = sizes_of(one), coords_of(one, rank)
    for dim, axis in (("dp", batch), ("cp", sequence)):
        if axis is not None and dim in sizes:
            whole = whole.tensor_split(sizes[dim], axis)[coords[dim]]
    return whole
