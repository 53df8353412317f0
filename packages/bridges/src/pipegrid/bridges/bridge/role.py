"""How a rank stands to an edge between modules: on one of its two sides, elsewhere in a grid, or nowhere. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attrs import frozen

from pipegrid.bridges.errors import WrongSideError
from pipegrid.bridges.multimodule.modules import is_in
from pipegrid.bridges.reshard.side import GridLike, Side


@frozen
class Standing:
    """Where ``rank`` stands to the edge ``name``, which leads from the side ``src`` of ``src_grid`` to ``dst``."""

    name: str
    src: Side
    dst: Side
    src_grid: GridLike
    dest_grid: GridLike
    rank: int

    @property
    def is_source(self) -> bool:
        """Whether the rank gives activations."""
        return self.rank in self.src.coords_of

    @property
    def is_destination(self) -> bool:
        """Whether the rank gets activations."""
        return self.rank in self.dst.coords_of

    def takes_part(self, end: Literal["source", "destination"], verb: str) -> bool:
        """Whether the rank is on that side's boundary; False on the other stages of that side's grid.

        Raises:
            WrongSideError: it is not in that grid.
        """
        side, other, grid = (
            (self.src, self.dst, self.src_grid) if end == "source" else (self.dst, self.src, self.dest_grid)
        )
        if self.rank in side.coords_of:
            return True
        if is_in(grid, self.rank):
            return False
        elsewhere = is_in(self.src_grid, self.rank) or is_in(self.dest_grid, self.rank)
        raise WrongSideError(
            f"{self.name}: {verb} is for the {end} side ({side.name!r}, boundary ranks {_some(side.ranks)}), but "
            f"rank {self.rank} is on {f'the side of {other.name!r}' if elsewhere else 'neither'}"
        )


def _some(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 16 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] ({len(ranks)})"
