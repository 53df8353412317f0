"""The ranks that take part in an epoch: those of actors without a dead rank. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import TypeAlias

from attrs import field, frozen

from pipegrid.monitor import JobFailedError
from pipegrid.plans.plan import Actor
from pipegrid.topology import HyperCommGrid
from pipegrid.topology.grid import Dims

Grids: TypeAlias = HyperCommGrid | Mapping[str, HyperCommGrid]
"""One grid of all positions, or one per module."""


def grids_of(grids: Grids) -> tuple[HyperCommGrid, ...]:
    """The grids, of one or several."""
    return tuple(grids.values()) if isinstance(grids, Mapping) else (grids,)


def _ascending(ranks: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))


@frozen(slots=False)
class Living:
    """The part of a grid that computes while only some ranks live.

    An actor is the ranks of one place along ``pp`` and ``dp``; of one with a dead rank all retire, since they hold the
    stage only together.

    Attributes:
        grid: of all ranks; by module, where modules have grids of their own.
        members: the ranks that live.
        positions_of: the position of each rank, where modules have grids of their own.

    Examples:
        >>> from pipegrid.topology import HyperCommGrid
        >>> grid = HyperCommGrid([2, 2], ["pp", "dp"], world_size=4)
        >>> Living(grid, [0, 1, 2]).members
        (0, 1, 2)
    """

    grid: Grids = field(eq=False)
    members: tuple[int, ...] = field(converter=_ascending)
    positions_of: Mapping[int, int] | None = field(default=None, eq=False)

    @cached_property
    def actors(self) -> dict[int, Actor]:
        """The actor of each rank of the job."""
        places = {rank: grid.coords(rank) for grid in grids_of(self.grid) for rank in grid.ranks}
        positions = self.positions_of
        if positions is None:
            positions = {rank: at.get("pp", 0) for rank, at in places.items()}
        return {rank: Actor(positions[rank], at.get("dp", 0)) for rank, at in places.items()}

    def actor(self, rank: int) -> Actor:
        """The actor that ``rank`` is of."""
        return self.actors[rank]

    @cached_property
    def positions(self) -> int:
        """Positions of a pipeline."""
        return 1 + max(actor.position for actor in self.actors.values())

    @cached_property
    def replicas(self) -> int:
        """Replicas, dead actors included."""
        return 1 + max(actor.replica for actor in self.actors.values())

    @cached_property
    def dead(self) -> tuple[Actor, ...]:
        """The actors with a dead rank, ascending."""
        living = set(self.members)
        return tuple(sorted({actor for rank, actor in self.actors.items() if rank not in living}))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        dead = set(self.dead)
        return tuple([rank for rank in self.members if rank in self.actors and self.actors[rank] not in dead])

    def group(self, dims: Dims, rank: int, module: str | None = None) -> tuple[int, ...]:
        """The ranks that take part, of the group of ``rank`` over ``dims``, ascending; ``module``: in whose grid."""
        grid = self.grid[module or ""] if isinstance(self.grid, Mapping) else self.grid
        return tuple([member for member in grid.group_ranks(dims, rank) if member in self.ranks])

    def require_every_position(self) -> None:
        """Raise unless each position lives in a replica.

        Raises:
            JobFailedError: one does not; its stages are on no rank.
        """
        dead = set(self.dead)
        for position in range(self.positions):
            if all(Actor(position, replica) in dead for replica in range(self.replicas)):
                raise JobFailedError(
                    f"position {position} of the pipeline is dead in all {self.replicas} replicas, so its stages are "
                    "on no rank any more: start all ranks again, from the last checkpoint"
                )
