"""One rank's part in one module: its place, the lanes inside the module, and the bridges that end there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define

from pipegrid.bridges.bridge import BridgeCommunicator
from pipegrid.bridges.errors import BridgeError
from pipegrid.bridges.reshard import REPLICAS, GridLike, as_grid
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.spec import LaneSpec


class ModuleChain:
    """The lanes between the stages of one module, the first of which is stage ``first`` of the graph, on one rank.

    ``directions`` says for each edge inside the module which ways have lanes.
    """

    def __init__(
        self,
        name: str,
        grid: GridLike,
        placement: Sequence[int],
        rank: int,
        *,
        first: int,
        directions: Mapping[Edge, Sequence[Direction]],
    ) -> None:
        self.name, self.placement, self.directions = name, tuple(placement), directions
        box = as_grid(grid)
        self._first, self._rank = first, rank
        self._here, self._stride = box.place(rank, "pp"), box.stride("pp")
        self._replica, self._replica_stride = box.place(rank, REPLICAS), box.stride(REPLICAS)

    def _rank_of(self, stage: int) -> int:
        return self._rank + (self.placement[stage - self._first] - self._here) * self._stride

    def _label(self, edge: Edge, direction: Direction) -> str:
        own = Edge(edge.source - self._first, edge.destination - self._first)
        return f"{self.name}/{own}/{direction.value}"

    def spec(self, edge: Edge, direction: Direction) -> LaneSpec:
        """The lane of an edge inside the module, between this rank's copy of both stages."""
        source, destination = (self._rank_of(edge.end(direction, sends=sends)) for sends in (True, False))
        return LaneSpec(source, destination, self._label(edge, direction))

    def holds(self, edge: Edge, direction: Direction, *, sends: bool) -> bool:
        """Whether this rank sends, or receives, along an edge inside the module."""
        return self._rank_of(edge.end(direction, sends=sends)) == self._rank

    def spec_across(self, edge: Edge, direction: Direction, replica: int, *, sends: bool) -> LaneSpec:
        """The lane of an edge inside the module to, or from, ``replica``.

        Raises:
            BridgeError: this rank is not at that end of the edge.
        """
        if not self.holds(edge, direction, sends=sends):
            raise self.lacks(edge, direction)
        there = self._rank_of(edge.end(direction, sends=not sends))
        other = there + (replica - self._replica) * self._replica_stride
        ends = (self._rank, other) if sends else (other, self._rank)
        return LaneSpec(*ends, self._label(edge, direction))

    @property
    def lane_specs(self) -> tuple[LaneSpec, ...]:
        """The lanes that touch this rank."""
        specs = [self.spec(edge, direction) for edge, used in self.directions.items() for direction in used]
        return tuple(spec for spec in specs if self._rank in spec.pair)

    def lacks(self, edge: Edge, direction: Direction) -> BridgeError:
        """The error of a call for a lane that this rank does not have."""
        return BridgeError(
            f"edge {edge} of module {self.name!r} has no {direction.name.lower()} lane at rank {self._rank}, place "
            f"{self._here} of {self.placement}: not its edge, without backward, or traffic= leaves it out"
        )


@define
class RankModuleInfo:
    """This rank's part in one module.

    Attributes:
        pp_rank: its place in the module's pipeline.
        pp_size: places in the module's pipeline.
        p2p_communicator: lanes to the module's other places.
        bridge_comms_as_src_module: bridges to the modules that this one feeds.
        bridge_comms_as_dest_module: bridges from the modules that feed this one.
        is_source_stage: this is a first stage of the whole pipeline.
        is_terminal_stage: this is a last stage of the whole pipeline.
    """

    pp_rank: int
    pp_size: int
    p2p_communicator: ModuleChain | None = None
    bridge_comms_as_src_module: list[BridgeCommunicator] | None = None
    bridge_comms_as_dest_module: list[BridgeCommunicator] | None = None
    is_source_stage: bool | None = True
    is_terminal_stage: bool | None = True
