"""One rank's part in one module: its place, its lanes inside the module, and the bridges that end there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define

from pipegrid.bridges.bridge import BridgeCommunicator
from pipegrid.bridges.errors import BridgeError
from pipegrid.bridges.reshard import REPLICAS, GridLike, as_grid
from pipegrid.transport.control.lanes import Lanes
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.lane.lane import Lane
from pipegrid.transport.protocol import Handle, ReceiveHandle
from pipegrid.transport.spec import LaneSpec


class ModuleChain:
    """The lanes between the stages of one module on one rank: `isend` and `irecv` by the module's own edges.

    ``directions`` says for each of these edges which ways have lanes.
    """

    def __init__(
        self,
        name: str,
        grid: GridLike,
        placement: Sequence[int],
        rank: int,
        *,
        directions: Mapping[Edge, Sequence[Direction]],
    ) -> None:
        self.name, self.placement, self.directions = name, tuple(placement), directions
        box = as_grid(grid)
        self._here, self._stride, self._rank = box.place(rank, "pp"), box.stride("pp"), rank
        self._replica, self._replica_stride = box.place(rank, REPLICAS), box.stride(REPLICAS)
        self._lanes: Lanes | None = None

    def _rank_of(self, stage: int) -> int:
        return self._rank + (self.placement[stage] - self._here) * self._stride

    def spec(self, edge: Edge, direction: Direction) -> LaneSpec:
        """The lane of one of the module's own edges, between this rank's copy of both stages."""
        ends = self._rank_of(edge.source), self._rank_of(edge.destination)
        first, second = ends if direction is Direction.FORWARD else ends[::-1]
        return LaneSpec(first, second, f"{self.name}/{edge}/{direction.value}")

    def holds(self, edge: Edge, direction: Direction, *, sends: bool) -> bool:
        """Whether this rank sends, or receives, along one of the module's own edges."""
        return (
            self._rank_of(edge.source if (direction is Direction.FORWARD) is sends else edge.destination) == self._rank
        )

    def spec_across(self, edge: Edge, direction: Direction, replica: int, *, sends: bool) -> LaneSpec:
        """The lane of one of the module's own edges to, or from, ``replica``.

        Raises:
            BridgeError: this rank is not at that end of the edge.
        """
        if not self.holds(edge, direction, sends=sends):
            raise self.lacks(edge, direction)
        stage = edge.destination if (direction is Direction.FORWARD) is sends else edge.source
        other = self._rank_of(stage) + (replica - self._replica) * self._replica_stride
        first, second = (self._rank, other) if sends else (other, self._rank)
        return LaneSpec(first, second, f"{self.name}/{edge}/{direction.value}")

    @property
    def lane_specs(self) -> tuple[LaneSpec, ...]:
        """The lanes that touch this rank."""
        specs = [self.spec(edge, direction) for edge, used in self.directions.items() for direction in used]
        return tuple(spec for spec in specs if self._rank in spec.pair)

    def attach(self, lanes: Lanes) -> None:
        """Use these lanes."""
        self._lanes = lanes

    def find(self, edge: Edge, direction: Direction) -> Lane | None:
        """The lane of one of the module's own edges; None where this rank has none."""
        return None if self._lanes is None else self._lanes.get(self.spec(edge, direction))

    def lacks(self, edge: Edge, direction: Direction) -> BridgeError:
        """The error of a call for a lane that this rank does not have."""
        return BridgeError(
            f"edge {edge} of module {self.name!r} has no {direction.name.lower()} lane at rank {self._rank}, place "
            f"{self._here} of {self.placement}: not its edge, without backward, or traffic= leaves it out"
        )

    def _lane(self, edge: Edge, direction: Direction) -> Lane:
        lane = self.find(edge, direction)
        if lane is None:
            raise self.lacks(edge, direction)
        return lane

    def isend(self, payload: Any, *, edge: Edge, direction: Direction) -> Handle:
        """Start sending along an edge of the module's own stage numbers."""
        return self._lane(edge, direction).isend(payload)

    def irecv(self, *, edge: Edge, direction: Direction, shapes: Any = None) -> ReceiveHandle:
        """Start receiving along an edge of the module's own stage numbers."""
        return self._lane(edge, direction).irecv(shapes)


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
