"""The base class of communicators whose messages travel on lanes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from pipegrid.core.edge import Crossing, Direction, Edge
from pipegrid.transport.base import Communicator, Port, Verbs
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.control.handshake import Handshake
from pipegrid.transport.control.lanes import Lanes
from pipegrid.transport.control.replica_lanes import ReplicaTraffic
from pipegrid.transport.errors import P2PUsageError


class LaneCommunicator(Communicator):
    """A communicator whose messages travel on lanes that were opened together.

    Attributes:
        config: settings of the lanes.
        rank: this rank.
        device: where sent payloads must live, and received ones do.
        lanes: this rank's ends.
        across: those to other replicas; None where the communicator does not know their ranks.
    """

    config: P2PConfig
    rank: int
    device: torch.device
    lanes: Lanes
    across: ReplicaTraffic | None = None

    @property
    def attempt(self) -> int:
        """The number of times that this rank and its peers had opened lanes before."""
        return self.lanes.turn

    def batch(self) -> AbstractContextManager[None]:
        """Start the sends and receives of the block, by this thread, as one simultaneous batch."""
        return self.lanes.batch()

    @property
    def batches(self) -> bool:
        """Whether a batch is more than its messages one by one."""
        return self.lanes.batches

    def in_order(self) -> AbstractContextManager[None]:
        """Start transfers of device groups in the order of calls inside the block."""
        return self.lanes.in_order()

    def patient(self, seconds: float) -> AbstractContextManager[None]:
        """Give transfers for which no wait says how many at least ``seconds`` inside the block."""
        return self.lanes.patient(seconds)

    # ---- To other replicas

    @property
    def _to_others(self) -> ReplicaTraffic:
        if self.across is None:
            raise P2PUsageError(
                f"a unit moves to another replica, whose ranks this {type(self).__name__} does not know; give "
                "P2PCommunicator(..., replicas=[[ranks of the pipeline of replica 0], ...]), or "
                "MultiModulePipelineCommunicator(..., replicas=True)"
            )
        return self.across

    def open_across(self, *, sends: Iterable[Crossing], receives: Iterable[Crossing]) -> None:
        """Open the lanes to other replicas along which a plan sends and receives, unless they are open.

        The rank at the other end of each calls it as well, for the same plan; all ranks for one plan after the other.

        Raises:
            P2PUsageError: the communicator was made without ``replicas``, or there is no such edge or replica.
            P2PMismatchError: the other end opens other lanes.
            P2PTimeoutError: the other end did not come.
        """
        self._to_others.open(sends=sends, receives=receives)

    def port_across(self, edge: Edge, direction: Direction, replica: int) -> Port:
        """The lanes of an edge to and from ``replica`` that are open."""
        return Verbs(*self._to_others.verbs(edge, direction, replica))

    def neighbours_across(self, edges: Iterable[Edge], across: Iterable[tuple[Edge, int]]) -> Sequence[Handshake]:
        """`neighbours`, and the ranks at the other ends of the edges of ``across`` in other replicas."""
        own = self.neighbours(edges)
        ranks = set() if own is None else {one.peer for one in own}
        return self.lanes.neighbours(ranks | self._to_others.peers(across))

    # ---- The end

    def describe(self) -> Mapping[str, Any]:
        """`Lane.describe` of each lane."""
        return {str(spec): lane.describe() for spec, lane in self.lanes.items()}

    def abort(self, reason: str) -> None:
        """End all lanes at once and tell the neighbours why."""
        self.lanes.abort(reason)

    def close(self) -> None:
        """End the lanes and free their groups. A second call does nothing."""
        self.lanes.close()
