"""Grids of a job's modules."""

from __future__ import annotations

from pipegrid.topology import HyperCommGrid


def grids_of(places, dims=()):
    """By module, from the first rank and the sizes by dim of each; ``dims`` are there with a size of 1 otherwise."""
    grids = {}
    for name, (offset, own) in places.items():
        sizes = {**dict.fromkeys(dims, 1), **own} or {"dp": 1}
        grids[name] = HyperCommGrid(list(sizes.values()), list(sizes), rank_offset=offset)
    return grids
