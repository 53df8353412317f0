"""The edges of a variable-TP pipeline on one rank: where it stands, and what it sends and receives along them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve

from pipegrid.bridges.bridge.receive import BridgeSend
from pipegrid.bridges.bridge.steps import gather_flat
from pipegrid.bridges.checks import as_kind, as_text, as_tuple
from pipegrid.bridges.errors import DestroyedError, StageError, VTPTopologyError
from pipegrid.bridges.graph import ModuleGraph
from pipegrid.bridges.multimodule.rank_modules import check_edge
from pipegrid.bridges.vtp.peers import Peers
from pipegrid.bridges.vtp.receive import VTPReceive, new_stream
from pipegrid.bridges.vtp.topology import VTPTopology
from pipegrid.bridges.vtp.traffic import BoundaryTraffic
from pipegrid.topology import GroupSpec, create_groups, destroy_groups
from pipegrid.transport.config import as_config
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.errors import P2PConfigError, P2PUsageError
from pipegrid.transport.handshake import Handshake
from pipegrid.transport.opening import open_lanes, resolve_device
from pipegrid.transport.payload import is_single_shape


class VTPEdges:
    """The edges of a variable-TP pipeline on one rank: lanes and groups, made at construction; `isend` and `irecv`.

    `VTPCommunicator` is this with the blocking verbs and the functions of training scripts; arguments as there.
    """

    def __init__(
        self,
        topology: VTPTopology,
        config: Any = None,
        *,
        backend: str | None = None,
        device: torch.device | str | None = None,
        label: str = "vtp",
    ) -> None:
        as_kind(topology, "topology", VTPTopology, "VTPTopology([2, 4, 4]) is one", error=VTPTopologyError)
        self.topology, self.label = topology, as_text(label, "label", error=VTPTopologyError)
        self.rank = dist.get_rank()
        topology.check_world(dist.get_world_size())
        self.stage, self.replica = topology.place_of(self.rank)
        self.config = as_config(config)
        self._check_config(config)
        backend, self.device = resolve_device(backend, device)
        boundaries = topology.boundaries(self.replica)
        self._traffic = {
            boundary.edge: BoundaryTraffic(boundary, self.rank, label)
            for boundary in boundaries
            if self.rank in (*boundary.source.ranks, *boundary.destination.ranks)
        }
        self._peers = Peers(self.rank, tuple(traffic.boundary for traffic in self._traffic.values()))
        self._ended = False
        variable = self.config.shape_mode == "header"
        self.lanes = open_lanes(
            [spec for traffic in self._traffic.values() for spec in traffic.lane_specs],
            config=evolve(self.config, variable_seq_lengths=variable, shapes="header" if variable else "agreed"),
            backend=backend,
            device=self.device,
        )
        try:
            self._groups = self._make_groups(backend)
        except BaseException:
            self.lanes.close()
            raise
        stream = new_stream(self.device)
        for traffic in self._traffic.values():
            traffic.attach(self.lanes, self._groups, self.device, stream)

    def _make_groups(self, backend: str) -> dict[GroupSpec, dist.ProcessGroup]:
        groups = create_groups(
            [spec for traffic in self._traffic.values() for spec in traffic.group_specs],
            backend=backend,
            timeout=timedelta(seconds=self.config.deadline),
        )
        for group in groups.values():  # connects now what would else connect in the first step
            ranks = torch.empty(group.size(), dtype=torch.int64, device=self.device)
            gather_flat(ranks, torch.tensor([self.rank], device=self.device), group)
        return groups

    def _check_config(self, given: Any) -> None:
        if self.config.shape_mode == "manifest":
            raise P2PConfigError(
                "shapes='manifest' announces messages before a step, and nobody announces those of a VTPCommunicator; "
                "use variable_seq_lengths=True (a header with each message)"
            )
        wants_ring = getattr(given, "layerwise_disaggregated_training", None)
        if wants_ring is not None and bool(wants_ring) is not self.topology.ring:
            raise P2PConfigError(
                f"layerwise_disaggregated_training is {wants_ring!r}, which is a pipeline whose first stage also holds "
                f"the last layers, but the topology has ring={self.topology.ring}; give both the same"
            )

    # -- where this rank stands -----------------------------------------------------------------------------

    @property
    def graph(self) -> ModuleGraph:
        """The stages of a plan for this pipeline: one more than those with ranks of their own in a ring."""
        return ModuleGraph({"model": self.topology.num_plan_stages})

    @property
    def stages(self) -> tuple[int, ...]:
        """The plan's stages on this rank."""
        return tuple(stage for stage, here in enumerate(self.topology.placement) if here == self.stage)

    @property
    def total_stages(self) -> int:
        """Stages with ranks of their own."""
        return self.topology.num_stages

    @property
    def current_stage(self) -> int:
        """The stage of this rank, from 0."""
        return self.stage

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.stage == 0

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this rank holds the last stage: in a ring, stage 0 does."""
        return self.topology.placement[-1] == self.stage

    # -- along edges ----------------------------------------------------------------------------------------

    def isend(self, payload: Any, *, edge: Edge, direction: Direction) -> BridgeSend:
        """Start sending this rank's tensor along ``edge`` (forward) or against it (backward).

        Raises:
            StageError: there is no such edge, or this rank does not send on it.
            ShapeError: not a tensor, or one whose sequence a side cannot cut.
        """
        return BridgeSend(self._of_edge(edge, direction, sends=True).isend(payload, direction))

    def irecv(self, *, edge: Edge, direction: Direction, shapes: Any = None) -> VTPReceive:
        """Start receiving the next tensor of ``edge`` in that direction.

        ``shapes`` is the one shape that this rank expects to get.

        Raises:
            StageError: there is no such edge, or this rank does not receive on it.
            P2PUsageError: no shape, where ``shapes="given"``; or not one shape.
        """
        traffic = self._of_edge(edge, direction, sends=False)
        return traffic.irecv(
            direction, self._checked_shape(shapes, "recv_prev" if direction is Direction.FORWARD else "recv_next")
        )

    def _of_edge(self, edge: Edge, direction: Direction, *, sends: bool) -> BoundaryTraffic:
        self._require_alive()
        check_edge(edge, direction)
        traffic = self._traffic.get(edge)
        if traffic is None or traffic.boundary.sends(self.rank, direction) is not sends:
            edges = ", ".join(str(boundary.edge) for boundary in self.topology.boundaries(self.replica))
            raise StageError(
                f"rank {self.rank} holds stage {' and '.join(map(str, self.stages))} and does not "
                f"{'send' if sends else 'receive'} {direction.name.lower()} along edge {edge}; the stages are joined "
                f"by {edges}"
            )
        return traffic

    def batch(self) -> AbstractContextManager[None]:
        """Issue the sends and receives that this thread starts inside as one simultaneous batch."""
        return self.lanes.batch()

    def neighbours(self, edges: Iterable[Edge]) -> Handshake:
        """The ranks at the other ends of ``edges``, to tell them before a step what this rank runs in it."""
        edges = as_tuple(edges, "edges", "Edges", error=StageError)
        specs = [spec for edge in edges if edge in self._traffic for spec in self._traffic[edge].lane_specs]
        return self.lanes.neighbours({rank for spec in specs for rank in spec.pair})

    def renew_shapes(self) -> None:
        """Let the next message of every lane agree on shapes anew; all ranks call it between two steps."""
        for lane in self.lanes.values():
            lane.renew()

    def abort(self, reason: str) -> None:
        """End all lanes at once and tell the other stages why; completions that are waited for end as well."""
        self._tell_receives(reason)
        self.lanes.abort(reason)

    def close(self) -> None:
        """End the lanes and free the groups. Twice is harmless."""
        if not self._ended:
            self._ended = True
            self._tell_receives("closed")
            self.lanes.close()
            destroy_groups(self._groups)

    def _tell_receives(self, reason: str) -> None:
        for traffic in self._traffic.values():
            for queue in traffic.queues.values():
                queue.ended = queue.ended or reason

    def _require_alive(self) -> None:
        if self._ended:
            raise DestroyedError("this communicator was closed; make a new one")

    def _checked_shape(self, shape: Any, name: str, *, required: bool = False) -> tuple[int, ...] | None:
        if shape is None:
            if required or self.config.shape_mode == "given":
                raise P2PUsageError(
                    f"tensor_shape must be specified if {name} is True. "
                    f"Common tensor_shape is (seq_length, micro_batch_size, hidden_size)"
                )
            return None
        if not is_single_shape(shape):
            raise P2PUsageError(f"the shape of a receive is {shape!r}; give the sizes of one tensor, at least 0 each")
        return tuple(int(size) for size in shape)
