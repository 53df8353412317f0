"""Channels from one replica of a pipeline of modules to the others: lanes inside modules, bridges between them.

A unit that moves goes from the rank that computes it to the rank of the other replica that needs it. Inside a module
that is a lane to the same place of its grid in the other replica. Between modules it is a bridge from one replica of
the source to one of the destination, with the reshard plan of these two: so the modules may have other tensor- or
context-parallel sizes, and edges payloads, dtypes on the wire or sizes that vary, as in one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import define, field

from pipegrid.bridges.bridge.communicator import BridgeCommunicator
from pipegrid.bridges.multimodule.edges import Ends
from pipegrid.bridges.multimodule.rank_modules import ModuleChain
from pipegrid.core.edge import Crossing, Direction, Edge
from pipegrid.core.lanes import LaneSpec
from pipegrid.transport.control.replica_lanes import ReplicaTraffic
from pipegrid.transport.errors import P2PUsageError

_FORWARD = Direction.FORWARD


@define(eq=False)
class ModuleReplicas(ReplicaTraffic):
    """The lanes inside this rank's modules, and the bridges between modules, that lead to other replicas.

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
                    if chain.holds(edge, _FORWARD, sends=sends):
                        found.update(chain.spec_across(edge, _FORWARD, replica, sends=sends).pair)
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
        from_here = sends is (direction is _FORWARD)
        return (edge, self.replica, replica) if from_here else (edge, replica, self.replica)
