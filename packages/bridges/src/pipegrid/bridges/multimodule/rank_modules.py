"""One rank's part in one module: its place, the lanes inside the module, the bridges that end there; other replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field

from pipegrid.bridges.bridge.communicator import BridgeCommunicator
from pipegrid.bridges.multimodule.edges import Ends
from pipegrid.core.edge import Crossing, Direction, Edge
from pipegrid.core.lanes import LaneSpec
from pipegrid.reshard import REPLICAS, BridgeError, GridLike, as_grid
from pipegrid.transport import Lanes, P2PConfig, P2PUsageError
from pipegrid.transport.control.blocking import NeighbourTransfers, NeighbourVerbs
from pipegrid.transport.control.replica_lanes import ReplicaTraffic


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
        pp_rank: its place in the module's pipeline.
        pp_size: places in the module's pipeline.
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


@define(eq=False)
class ModuleReplicas(ReplicaTraffic):
    """The lanes inside this rank's modules, and the bridges between modules, that lead to other replicas.

    A unit that moves goes from the rank that computes it to the rank of the other replica that needs it. Inside a
    module that is a lane to the same place of its grid in the other replica. Between modules it is a bridge from one
    replica of the source to one of the destination, with the reshard plan of these two: so the modules may have other
    tensor- or context-parallel sizes, and edges payloads, dtypes on the wire or sizes that vary, as in one replica.

    Attributes:
        make_bridge: makes a bridge without lanes from a replica of its source to one of its destination.
        open_lanes: of the transport, with the settings of the communicator.
        bridges: those that are open, by edge, replica of the source, and that of the destination.
    """

    inner: Mapping[Edge, ModuleChain]
    ends: Mapping[Edge, Ends]
    make_bridge: Callable[[Ends, tuple[int, int]], BridgeCommunicator]
    open_lanes: Callable[..., object]
    bridges: dict[tuple[Edge, int, int], BridgeCommunicator] = field(factory=dict, init=False)

    def open(self, *, sends: Iterable[Crossing], receives: Iterable[Crossing]) -> None:
        """Open the lanes and bridges to other replicas that these transfers need and that are not open.

        `P2PUsageError`: an edge does not end at this rank, or a replica is this one or none of the job's.
        """
        lanes, bridges = set[LaneSpec](), set[tuple[Edge, int, int]]()
        for ways, gives in ((sends, True), (receives, False)):
            for edge, direction, replica in ways:
                if edge not in self.inner and edge not in self.ends:
                    raise P2PUsageError(f"edge {edge} does not end at this rank")
                self._require_other(edge, replica)
                if edge in self.inner:
                    lanes.add(self.inner[edge].spec_across(edge, direction, replica, sends=gives))
                else:
                    bridges.add(self._key(edge, direction, replica, sends=gives))
        if lanes or bridges:
            self._require_open()
        made = {key: self.make_bridge(self.ends[key[0]], key[1:]) for key in sorted(bridges - self.bridges.keys())}
        declared = {spec: text for bridge in made.values() for spec, text in bridge.declared.items()}
        if missing := sorted((lanes | declared.keys()) - self.lanes.keys()):
            self.open_lanes(missing, declared=declared, beside=self.lanes)
        for key, bridge in made.items():
            bridge.attach(self.lanes)
            self.bridges[key] = bridge

    def peers(self, across: Iterable[tuple[Edge, int]]) -> set[int]:
        """The ranks at the other ends of these edges in these replicas."""
        found: set[int] = set()
        for edge, replica in across:
            if edge in self.inner:
                chain = self.inner[edge]
                for sends in (True, False):
                    if chain.holds(edge, Direction.FORWARD, sends=sends):
                        found.update(chain.spec_across(edge, Direction.FORWARD, replica, sends=sends).pair)
            else:
                pairs = ((self.replica, replica), (replica, self.replica))
                bridges = [self.bridges[edge, *pair] for pair in pairs if (edge, *pair) in self.bridges]
                found |= {rank for bridge in bridges for spec in bridge.lane_specs for rank in spec.pair}
        return found - {self.rank}

    def _verb(self, edge: Edge, direction: Direction, replica: int, *, sends: bool) -> Callable[..., Any] | None:
        if edge not in self.inner:
            bridge = self.bridges.get(self._key(edge, direction, replica, sends=sends))
            return None if bridge is None else bridge.verb(direction, sends=sends)
        chain = self.inner[edge]
        if not chain.holds(edge, direction, sends=sends):
            return None
        lane = self.lanes.get(chain.spec_across(edge, direction, replica, sends=sends))
        return None if lane is None else lane.isend if sends else lane.irecv

    def _key(self, edge: Edge, direction: Direction, replica: int, *, sends: bool) -> tuple[Edge, int, int]:
        """The key of a bridge: the edge, the replica that makes the activation, and the one that needs it."""
        from_here = sends is (direction is Direction.FORWARD)
        return (edge, self.replica, replica) if from_here else (edge, replica, self.replica)
