"""Traffic of a rank with other replicas of its pipeline, opened when a plan first needs it: lanes, for one module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NoReturn

from attrs import define

from pipegrid.core.edge import Crossing, Direction, Edge
from pipegrid.core.lanes import LaneSpec, pair_lanes, require_edge
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.control.lanes import Lanes
from pipegrid.transport.errors import P2PLaneDeadError, P2PUsageError


@define(eq=False)
class ReplicaTraffic(ABC):
    """One rank's traffic with other replicas of its pipeline."""

    rank: int
    replica: int  # of this rank
    count: int  # replicas of the job
    lanes: Lanes  # all of this rank

    @abstractmethod
    def open(self, *, sends: Iterable[Crossing], receives: Iterable[Crossing]) -> None:
        """Open what is not open for these ends of edges. The ranks at the other end of each open it as well."""

    @abstractmethod
    def peers(self, across: Iterable[tuple[Edge, int]]) -> set[int]:
        """The ranks at the other ends of these edges in these replicas."""

    def verbs(self, edge: Edge, direction: Direction, replica: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """``isend`` and ``irecv`` of an edge to or from a replica: both open where both ranks hold both stages."""
        way = f"of edge {edge} {direction.name.lower()}, replica {replica}"
        send, receive = (self._verb(edge, direction, replica, sends=sends) for sends in (True, False))
        return send or partial(_missing, f"isend {way}"), receive or partial(_missing, f"irecv {way}")

    @abstractmethod
    def _verb(self, edge: Edge, direction: Direction, replica: int, *, sends: bool) -> Callable[..., Any] | None:
        """The function that starts a send, or a receive, of this rank; None where it has no such end or open lane."""

    def _require_other(self, edge: Edge, replica: int) -> None:
        if replica not in range(self.count) or replica == self.replica:
            others = f"the others than this rank's, {self.replica}, are in 0..{self.count - 1}"
            raise P2PUsageError(f"edge {edge} goes to replica {replica}; {others}")

    def _require_open(self) -> None:
        if self.lanes.closed:
            raise P2PLaneDeadError("the communicator was closed on this rank")


@define(eq=False)
class ReplicaLanes(ReplicaTraffic):
    """The lanes to other replicas of a pipeline of one module."""

    replicas: tuple[tuple[int, ...], ...]  # the ranks of the pipeline of each replica, in order
    placement: tuple[int, ...] | None  # the place in them of each stage; None is cyclic
    edges: Collection[Edge] | None  # between the stages; None is a chain
    config: P2PConfig  # of all lanes
    open_beside: Callable[..., Lanes]  # `open_lanes` with the settings of the communicator

    def open(self, *, sends: Iterable[Crossing], receives: Iterable[Crossing]) -> None:
        """Open the lanes that are not open."""
        wanted = {self._spec(*way, sends=True) for way in sends} | {self._spec(*way, sends=False) for way in receives}
        if self.config.communicators == "shared":  # which all lanes of two ranks open together
            wanted = pair_lanes(wanted)
        if missing := sorted(wanted - self.lanes.keys()):
            self._require_open()
            self.open_beside(missing, beside=self.lanes)

    def peers(self, across: Iterable[tuple[Edge, int]]) -> set[int]:
        """The ranks at the other ends of the edges that this rank holds an end of."""
        return {
            self._rank_of(edge.end(Direction.FORWARD, sends=not sends), replica)
            for edge, replica in across
            for sends in (True, False)
            if self._holds(edge, Direction.FORWARD, sends=sends)
        }

    def _verb(self, edge: Edge, direction: Direction, replica: int, *, sends: bool) -> Callable[..., Any] | None:
        if not self._holds(edge, direction, sends=sends):
            return None
        lane = self.lanes.get(self._spec(edge, direction, replica, sends=sends))
        return None if lane is None else lane.isend if sends else lane.irecv

    def _spec(self, edge: Edge, direction: Direction, replica: int, *, sends: bool) -> LaneSpec:
        require_edge(edge, self.placement, self.edges)
        self._require_other(edge, replica)
        if not self._holds(edge, direction, sends=sends):
            raise P2PUsageError(f"rank {self.rank} is no end of edge {edge} {direction.name.lower()}")
        other = self._rank_of(edge.end(direction, sends=not sends), replica)
        ends = (self.rank, other) if sends else (other, self.rank)
        return LaneSpec(*ends, direction.name.lower())

    def _holds(self, edge: Edge, direction: Direction, *, sends: bool) -> bool:
        return self._rank_of(edge.end(direction, sends=sends), self.replica) == self.rank

    def _rank_of(self, stage: int, replica: int) -> int:
        ranks = self.replicas[replica]
        return ranks[stage % len(ranks) if self.placement is None else self.placement[stage]]


def _missing(what: str, *_: Any) -> NoReturn:
    raise P2PUsageError(f"no way is open for {what}; open_across() opens those of a plan")
