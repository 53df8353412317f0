"""Who takes part in an epoch: the actors of a grid all of whose ranks live. No torch."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from attrs import field, frozen

from pipegrid.schedules.monitor import JobFailedError
from pipegrid.schedules.plan import Actor
from pipegrid.topology import HyperCommGrid
from pipegrid.topology.grid import Dims

_POSITION, _REPLICA = "pp", "dp"


def _ascending(ranks: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))


@frozen(slots=False)
class Living:
    """The part of ``grid`` that computes while only ``members`` live.

    An actor is the ranks of one place along ``pp`` and ``dp``; of one with a dead rank all retire, since they hold the
    stage only together.
    """

    grid: HyperCommGrid = field(eq=False)
    members: tuple[int, ...] = field(converter=_ascending)

    def actor(self, rank: int) -> Actor:
        """The actor that ``rank`` is of."""
        at = self.grid.coords(rank)
        return Actor(at.get(_POSITION, 0), at.get(_REPLICA, 0))

    @property
    def positions(self) -> int:
        """Positions of a pipeline."""
        return self._size(_POSITION)

    @property
    def replicas(self) -> int:
        """Replicas, dead actors included."""
        return self._size(_REPLICA)

    def _size(self, dim: str) -> int:
        return self.grid.dim_size(dim) if dim in self.grid.dim_names else 1

    @cached_property
    def dead(self) -> tuple[Actor, ...]:
        """The actors with a dead rank, ascending."""
        return tuple(sorted({self.actor(rank) for rank in self.grid.ranks if rank not in set(self.members)}))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        dead = set(self.dead)
        return tuple([rank for rank in self.members if rank in self.grid.ranks and self.actor(rank) not in dead])

    def group(self, dims: Dims, rank: int) -> tuple[int, ...]:
        """Those of the grid's group of ``rank`` over ``dims`` that take part, ascending."""
        taking_part = set(self.ranks)
        return tuple([other for other in self.grid.group_ranks(dims, rank) if other in taking_part])

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
