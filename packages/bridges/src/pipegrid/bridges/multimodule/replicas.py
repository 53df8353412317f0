"""What leads from one replica of a pipeline of modules to the others: lanes inside modules, bridges between them.

A unit that moves goes from the rank that computes it to the rank of the other replica that needs it. Inside a module
that is a lane to the same place of its grid in the other replica. Between modules it is a bridge from one replica of
the source to one of the destination, with the reshard plan of these two: so the modules may have other tensor- or
context-parallel sizes, and edges payloads, dtypes on the wire or sizes that vary, as in one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

from attrs import define, field

from pipegrid.bridges.bridge import BridgeCommunicator
from pipegrid.bridges.multimodule.edges import Ends
from pipegrid.bridges.multimodule.rank_modules import ModuleChain
from pipegrid.transport.control.lanes import Lanes
from pipegrid.transport.edge import Crossing, Direction, Edge
from pipegrid.transport.errors import P2PLaneDeadError, P2PUsageError
from pipegrid.transport.spec import LaneSpec

_FORWARD = Direction.FORWARD


@define(eq=False)
class ModuleReplicas:
    """This rank's ways to other replicas, opened when a plan first needs them.

    Attributes:
        rank: this one.
        replica: of this rank.
        count: replicas of the job.
        lanes: all of this rank.
        inner: the edges inside this rank's modules, each with its chain and that one's own edge.
        ends: the modules of each edge between modules.
        make_bridge: a bridge, without lanes, between a replica of its source and one of its destination.
        open_lanes: of the transport, with the settings of the communicator.
        bridges: those that are open, by edge, replica of the source, and that of the destination.
    """

    rank: int
    replica: int
    count: int
    lanes: Lanes
    inner: Mapping[Edge, tuple[ModuleChain, Edge]]
    ends: Mapping[Edge, Ends]
    make_bridge: Callable[[Ends, tuple[int, int]], BridgeCommunicator]
    open_lanes: Callable[..., object]
    bridges: dict[tuple[Edge, int, int], BridgeCommunicator] = field(factory=dict, init=False)

    def open(self, *, sends: Iterable[Crossing], receives: Iterable[Crossing]) -> None:
        """Open what these ways need and is not open. The ranks at the other end of each open it as well."""
        lanes, bridges = set[LaneSpec](), set[tuple[Edge, int, int]]()
        for ways, gives in ((sends, True), (receives, False)):
            for edge, direction, replica in ways:
                self._require(edge, replica)
                if edge in self.inner:
                    lanes.add(self._spec(edge, direction, replica, sends=gives))
                else:
                    bridges.add(self._key(edge, direction, replica, sends=gives))
        if self.lanes.closed and (lanes or bridges):
            raise P2PLaneDeadError("the communicator was closed on this rank")
        made = {key: self.make_bridge(self.ends[key[0]], key[1:]) for key in sorted(bridges - self.bridges.keys())}
        declared = {spec: text for bridge in made.values() for spec, text in bridge.declared.items()}
        if missing := sorted((lanes | declared.keys()) - self.lanes.keys()):
            self.open_lanes(missing, declared=declared, beside=self.lanes)
        for key, bridge in made.items():
            bridge.attach(self.lanes)
            self.bridges[key] = bridge

    def verbs(self, edge: Edge, direction: Direction, replica: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """``isend`` and ``irecv`` of an edge to or from a replica."""
        found: list[Callable[..., Any]] = []
        for sends, verb in ((True, "isend"), (False, "irecv")):
            end: Callable[..., Any] | None
            if edge in self.inner:
                chain, own = self.inner[edge]
                spec = (
                    self._spec(edge, direction, replica, sends=sends)
                    if chain.holds(own, direction, sends=sends)
                    else None
                )
                end = None if spec is None or spec not in self.lanes else getattr(self.lanes[spec], verb)
            else:
                end = self._bridge_verb(edge, direction, replica, sends=sends)
            found.append(end or partial(_missing, f"{verb} of edge {edge} {direction.name.lower()}, replica {replica}"))
        return found[0], found[1]

    def _bridge_verb(self, edge: Edge, direction: Direction, replica: int, *, sends: bool) -> Callable[..., Any] | None:
        bridge = self.bridges.get(self._key(edge, direction, replica, sends=sends))
        at_end = bridge and (bridge.is_source if (direction is _FORWARD) is sends else bridge.is_destination)
        if bridge is None or not at_end:
            return None
        exchange = bridge.exchange
        if direction is _FORWARD:
            return exchange.isend_forward if sends else exchange.irecv_forward
        if not bridge.carries_gradients:
            return None
        return exchange.isend_backward if sends else exchange.irecv_backward

    def peers(self, across: Iterable[tuple[Edge, int]]) -> set[int]:
        """The ranks at the other ends of these edges in these replicas."""
        found: set[int] = set()
        for edge, replica in across:
            if edge in self.inner:
                chain, own = self.inner[edge]
                for sends in (True, False):
                    if chain.holds(own, _FORWARD, sends=sends):
                        found.update(self._spec(edge, _FORWARD, replica, sends=sends).pair)
            else:
                pairs = ((self.replica, replica), (replica, self.replica))
                bridges = [self.bridges[edge, *pair] for pair in pairs if (edge, *pair) in self.bridges]
                found |= {rank for bridge in bridges for spec in bridge.lane_specs for rank in spec.pair}
        return found - {self.rank}

    def _require(self, edge: Edge, replica: int) -> None:
        if edge not in self.inner and edge not in self.ends:
            raise P2PUsageError(f"edge {edge} does not end at this rank")
        if replica not in range(self.count) or replica == self.replica:
            raise P2PUsageError(
                f"edge {edge} goes to replica {replica}; the others than this rank's, {self.replica}, are in "
                f"0..{self.count - 1}"
            )

    def _spec(self, edge: Edge, direction: Direction, replica: int, *, sends: bool) -> LaneSpec:
        chain, own = self.inner[edge]
        return chain.spec_across(own, direction, replica, sends=sends)

    def _key(self, edge: Edge, direction: Direction, replica: int, *, sends: bool) -> tuple[Edge, int, int]:
        """The bridge of a way: from the replica that makes the activation to the one that needs it."""
        from_here = sends is (direction is _FORWARD)
        return (edge, self.replica, replica) if from_here else (edge, replica, self.replica)


def _missing(what: str, *_: Any) -> NoReturn:
    raise P2PUsageError(f"no way is open for {what}; open_across() opens those of a plan")
