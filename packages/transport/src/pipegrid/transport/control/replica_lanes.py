"""Lanes from one rank of a pipeline to the pipelines of other replicas, opened when a plan first needs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NoReturn, Protocol

from attrs import define

from pipegrid.transport.config import P2PConfig
from pipegrid.transport.control.lanes import Lanes
from pipegrid.transport.edge import Crossing, Direction, Edge
from pipegrid.transport.errors import P2PLaneDeadError, P2PUsageError
from pipegrid.transport.pipeline_lanes import pair_lanes, require_edge
from pipegrid.transport.spec import LaneSpec


class WaysAcross(Protocol):
    """One rank's ways to other replicas: see `ReplicaLanes`, whose methods these are."""

    @property
    def replica(self) -> int:
        """Of this rank."""
        ...

    def open(self, *, sends: Iterable[Crossing], receives: Iterable[Crossing]) -> None:
        """Open these ways."""
        ...

    def verbs(self, edge: Edge, direction: Direction, replica: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """``isend`` and ``irecv`` of a way."""
        ...

    def peers(self, across: Iterable[tuple[Edge, int]]) -> set[int]:
        """The ranks at the other ends."""
        ...


@define(eq=False)
class ReplicaLanes:
    """The lanes of ``rank`` to other replicas, among all ``lanes`` of its communicator.

    Attributes:
        replicas: the ranks of the pipeline of each replica, in order.
        replica: of this rank.
        placement: the place in them of each stage; None is cyclic.
        edges: between the stages; None is a chain.
        config: of all of them.
        open_beside: `open_lanes` with the settings of the communicator.
    """

    rank: int
    replicas: tuple[tuple[int, ...], ...]
    replica: int
    placement: tuple[int, ...] | None
    edges: Collection[Edge] | None
    lanes: Lanes
    config: P2PConfig
    open_beside: Callable[..., Lanes]

    def open(self, *, sends: Iterable[Crossing], receives: Iterable[Crossing]) -> None:
        """Open the lanes of these ways that are not open yet. The rank at the other end of each opens it as well."""
        wanted = {self._spec(*way, sends=True) for way in sends} | {self._spec(*way, sends=False) for way in receives}
        if self.config.communicators == "shared":  # which all lanes of two ranks open together
            wanted = pair_lanes(wanted)
        if missing := sorted(wanted - self.lanes.keys()):
            if self.lanes.closed:
                raise P2PLaneDeadError("the communicator was closed on this rank")
            self.open_beside(missing, beside=self.lanes)

    def verbs(self, edge: Edge, direction: Direction, replica: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """``isend`` and ``irecv`` of an edge to or from a replica: both open where both ranks hold both stages."""
        found: list[Callable[..., Any]] = []
        for sends, verb in ((True, "isend"), (False, "irecv")):
            spec = (
                self._spec(edge, direction, replica, sends=sends) if self._holds(edge, direction, sends=sends) else None
            )
            end = None if spec is None or spec not in self.lanes else getattr(self.lanes[spec], verb)
            found.append(end or partial(_missing, f"{verb} of edge {edge} {direction.name.lower()}, replica {replica}"))
        return found[0], found[1]

    def peers(self, across: Iterable[tuple[Edge, int]]) -> set[int]:
        """The ranks at the other ends of these edges in these replicas."""
        return {
            self._rank_of(_end(edge, Direction.FORWARD, producer=not holds_source), replica)
            for edge, replica in across
            for holds_source in (True, False)
            if self._holds(edge, Direction.FORWARD, sends=holds_source)
        }

    def _spec(self, edge: Edge, direction: Direction, replica: int, *, sends: bool) -> LaneSpec:
        require_edge(edge, self.placement, self.edges)
        if replica not in range(len(self.replicas)) or replica == self.replica:
            raise P2PUsageError(
                f"edge {edge} goes to replica {replica}; the others than this rank's, {self.replica}, are in "
                f"0..{len(self.replicas) - 1}"
            )
        if not self._holds(edge, direction, sends=sends):
            raise P2PUsageError(f"rank {self.rank} is no end of edge {edge} {direction.name.lower()}")
        other = self._rank_of(_end(edge, direction, producer=not sends), replica)
        ends = (self.rank, other) if sends else (other, self.rank)
        return LaneSpec(*ends, direction.name.lower())

    def _holds(self, edge: Edge, direction: Direction, *, sends: bool) -> bool:
        return self._rank_of(_end(edge, direction, producer=sends), self.replica) == self.rank

    def _rank_of(self, stage: int, replica: int) -> int:
        ranks = self.replicas[replica]
        return ranks[stage % len(ranks) if self.placement is None else self.placement[stage]]


def _end(edge: Edge, direction: Direction, *, producer: bool) -> int:
    """The stage that makes the data, or the one that needs it."""
    return edge.source if producer == (direction is Direction.FORWARD) else edge.destination


def _missing(what: str, *_: Any) -> NoReturn:
    raise P2PUsageError(f"no lane is open for {what}; open_across() opens those of a plan")
