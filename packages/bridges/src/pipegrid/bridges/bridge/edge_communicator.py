"""The base class of communicators over several edges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from pipegrid.bridges.bridge.communicator import renew_lanes
from pipegrid.bridges.bridge.exchange import Exchange
from pipegrid.bridges.collectives import abort_groups
from pipegrid.core.edge import Direction, Edge
from pipegrid.reshard.errors import BridgeError
from pipegrid.transport import Handle, Lane, P2PLaneDeadError, Port, ReceiveHandle, Verbs
from pipegrid.transport.communicator import LaneCommunicator
from pipegrid.transport.control.handshake import Handshake

Way: TypeAlias = tuple[Edge, Direction]


class EdgeCommunicator(LaneCommunicator, ABC):
    """A communicator over several edges: each is one lane, or an `Exchange` over many lanes.

    The lanes of all edges are opened together. Each exchange has groups of its own, which end with them.

    Attributes:
        edge_exchanges: the exchanges of this rank.
        _sends: the functions that start a send, by edge and direction.
        _receives: the functions that start a receive, likewise.
        _inside: the lanes of edges between ranks of one module.
        _neighbours: the ranks at the other ends of each edge.
    """

    edge_exchanges: list[Exchange]
    _sends: dict[Way, Callable[[Any], Handle]]
    _receives: dict[Way, Callable[..., ReceiveHandle]]
    _inside: Mapping[Way, Lane] = MappingProxyType({})
    _neighbours: dict[Edge, Collection[int]]
    _closed = False

    def isend(self, payload: Any, *, edge: Edge, direction: Direction) -> Handle:
        """Start sending what this rank has along ``edge`` (forward) or against it (backward).

        Raises:
            BridgeError: this rank sends nothing there.
            ShapeError: the edge does not carry this payload.
        """
        send = self._sends.get((edge, direction))
        if send is None:
            raise self._no_way(edge, direction, sends=True)
        return send(payload)

    def irecv(self, *, edge: Edge, direction: Direction, shapes: Any = None) -> ReceiveHandle:
        """Start receiving the next message along ``edge`` in that direction, of that one shape if ``shapes`` is given.

        Raises:
            BridgeError: this rank receives nothing there.
        """
        receive = self._receives.get((edge, direction))
        if receive is None:
            raise self._no_way(edge, direction, sends=False)
        return receive(shapes)

    def port(self, edge: Edge, direction: Direction) -> Port:
        """`isend` and `irecv` of one edge and direction, without a look-up in each message: a lane, if it is one."""
        way = edge, direction
        if (lane := self._inside.get(way)) is not None:
            return lane
        send = self._sends.get(way) or partial(self.isend, edge=edge, direction=direction)
        return Verbs(send, self._receives.get(way) or partial(self.irecv, edge=edge, direction=direction))

    @abstractmethod
    def _no_way(self, edge: Edge, direction: Direction, *, sends: bool) -> BridgeError:
        """The error of a send, or a receive, that this rank does not have."""

    def _not_on(self, edge: Edge) -> BridgeError:
        job = self.job
        known = ", ".join(map(str, () if job.graph is None else job.graph.stage_edges))
        return BridgeError(f"no edge {edge} ends at rank {self.rank}, of stages {job.stages}; the edges are {known}")

    def neighbours(self, edges: Iterable[Edge]) -> Sequence[Handshake]:
        """The handshakes with the ranks at the other ends of ``edges``: each compares its next step with them."""
        ranks: set[int] = set()
        for edge in edges:
            if edge not in self._neighbours:
                raise self._not_on(edge)
            ranks.update(self._neighbours[edge])
        return self.lanes.neighbours(ranks)

    @property
    def communicators(self) -> int:
        """Communicators of this rank, lanes and groups of edges; on NCCL, each has a stream of its own."""
        lanes = {id(lane.group) for lane in self.lanes.values() if lane.group is not None}
        return len(lanes) + sum(len(exchange.traffic.groups) for exchange in self.edge_exchanges)

    def renew_shapes(self) -> None:
        """Let the next message of every edge agree on shapes anew; all ranks call it between two steps.

        Raises:
            P2PUsageError: shapes vary anyway, or receives are under way; nothing was renewed then.
        """
        renew_lanes(self.lanes.values())
        for exchange in self.edge_exchanges:
            exchange.forget()

    def check(self) -> None:
        """Raise `CollectiveFailedError` if a completion of any edge, waited for on a device, has failed since."""
        for exchange in self.edge_exchanges:
            exchange.traffic.waits.check()

    def abort(self, reason: str) -> None:
        """End all lanes and completions at once and tell the other sides why."""
        groups = [group for exchange in self.edge_exchanges for group in exchange.traffic.end(reason)]
        abort_groups(groups, reason, beside=lambda: self.lanes.abort(reason))

    def close(self) -> None:
        """Close all lanes and destroy all groups. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._sends, self._receives, self._inside = {}, {}, {}
            failed = [group for exchange in self.edge_exchanges for group in exchange.traffic.failed_groups]
            for exchange in self.edge_exchanges:
                exchange.traffic.end("closed")
            abort_groups(failed, "it was closed", beside=self.lanes.close)
            for exchange in self.edge_exchanges:
                exchange.traffic.close_groups()

    def _require_alive(self) -> None:
        if self._closed:
            raise P2PLaneDeadError("this communicator was closed; make a new one")
