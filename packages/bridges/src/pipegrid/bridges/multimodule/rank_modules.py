"""One rank's part in one module: its place, the lanes inside the module, and the bridges that end there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define

from pipegrid.bridges.bridge.communicator import BridgeCommunicator
from pipegrid.core import Direction, Edge, LaneSpec
from pipegrid.reshard import REPLICAS, BridgeError, GridLike, as_grid
from pipegrid.transport import Lanes, P2PConfig, P2PUsageError
from pipegrid.transport.control.blocking import NeighbourTransfers, NeighbourVerbs


class ModuleChain(NeighbourVerbs):
    """The lanes between the stages of one module, the first of which is stage ``first`` of the graph, on one rank.

    ``directions`` has the directions with lanes, for each edge inside the module. The blocking verbs are those of a
    `P2PCommunicator` over the module's own pipeline, where each place of it has one stage.
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
        self._box, self._first, self._rank = as_grid(grid), first, rank
        self.current_stage, self.total_stages = self._box.place(rank, "pp"), self._box.length("pp")

    def attach(self, lanes: Lanes, config: P2PConfig) -> None:
        """Serve the blocking verbs over ``lanes``, which are open, with the communicator's ``config``."""
        one_each = self.placement == tuple(range(self.total_stages))
        here = self._first + self.current_stage
        before, after = Edge(here - 1, here), Edge(here, here + 1)
        ways = {
            "recv_prev": (before, Direction.FORWARD),
            "recv_next": (after, Direction.BACKWARD),
            "send_next": (after, Direction.FORWARD),
            "send_prev": (before, Direction.BACKWARD),
        }
        specs = {name: self.spec(*way) for name, way in ways.items() if one_each and way[0] in self.directions}
        self._transfers = NeighbourTransfers(lanes, config, specs, self._without)

    def _without(self, name: str) -> P2PUsageError:
        """The error of a blocking verb that this rank does not have."""
        return P2PUsageError(
            f"{name} has no lane in module {self.name!r} at place {self.current_stage} of stages on places "
            f"{self.placement}: it is the first or the last, a place has several stages, or the module no backward; "
            "isend and irecv of the communicator take an edge"
        )

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this rank holds the module's first stage."""
        return self.current_stage == self.placement[0]

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this rank holds the module's last stage."""
        return self.current_stage == self.placement[-1]

    def _rank_of(self, stage: int) -> int:
        return self._box.along(self._rank, "pp", self.placement[stage - self._first])

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
        """The lane of an edge inside the module to, or from, ``replica``; `BridgeError` on a rank that is not there."""
        if not self.holds(edge, direction, sends=sends):
            raise self.lacks(edge, direction)
        there = self._rank_of(edge.end(direction, sends=not sends))
        other = self._box.along(there, REPLICAS, replica)
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
            f"{self.current_stage} of {self.placement}: not its edge, without backward, or traffic= leaves it out"
        )


@define
class RankModuleInfo:
    """The part of this rank in one module.

    Attributes:
        pp_rank: its place in the module's pipeline, of ``pp_size``.
        p2p_communicator: lanes to the module's other places, with the blocking verbs of a `P2PCommunicator`.
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
