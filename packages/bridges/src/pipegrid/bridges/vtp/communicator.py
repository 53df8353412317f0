"""Variable tensor parallelism: one pipeline whose stages have different tensor-parallel sizes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve

from pipegrid.bridges.bridge.communicator import lane_config
from pipegrid.bridges.bridge.exchange import Exchange
from pipegrid.bridges.bridge.leaves import leaves_of
from pipegrid.bridges.bridge.options import EdgeOptions
from pipegrid.bridges.bridge.traffic import EdgeTraffic
from pipegrid.bridges.bridge.wiring import checked_traffic, directions_of
from pipegrid.bridges.collectives import own_groups
from pipegrid.bridges.vtp.functions import ARRIVES, VTPFunctions
from pipegrid.bridges.vtp.topology import VTPBoundary, VTPTopology
from pipegrid.core import Direction, Edge, ModuleGraph
from pipegrid.core.fields import shown
from pipegrid.reshard.errors import BridgeError
from pipegrid.transport import JobTopology, P2PUsageError, ReceiveHandle
from pipegrid.transport.config import as_config
from pipegrid.transport.control.opening import open_lanes, resolve_device
from pipegrid.transport.streams import new_stream


class VTPCommunicator(VTPFunctions):
    """Traffic between the stages of a pipeline in which each stage has its own tensor-parallel size.

    A boundary's tensor is held whole by every rank of a side (tensor parallelism) or cut along the sequence (sequence
    parallelism, see `VTPTopology`). Copies share the sending and the receiving: each byte is sent once, and the
    receiving copies complete each other in a group of the boundary's own. That completion starts when the slices have
    arrived, with or without a waiting rank, so that it overlaps the next receive. Sequence parts go straight to the
    ranks that hold them on the other side.

    Two faces, over the same lanes:

    - of `pipegrid.transport.PipelineCommunicator`: `isend` and `irecv` along edges, which is what a runtime uses. In a
      ring of P stages there is an edge ``P-1 > P`` that closes it, and stage 0 holds the plan's stages 0 and P.
    - the functions that variable-TP training scripts know (``vtp_send_forward``, ``recv_forward_with_reqs``, ...), as
      methods; shapes are those of this rank's own tensor.

    Every rank of the topology constructs it with equal arguments: lanes and groups are made then, in one order.

    Args:
        topology: the ranks of each stage.
        config: a `P2PConfig`, or any object with some of its attributes; read once, here. With
            ``variable_seq_lengths``, shapes may change from message to message.
        backend: of lanes and groups; None is the default group's for ``device``.
        device: of the tensors; None is the current GPU where the backend is NCCL, else the CPU.
        label: tells apart communicators over the same ranks.
        traffic: the edges and directions that the plan uses (`Plan.traffic`); other lanes are not opened. None: all.

    Raises:
        BridgeError: the world does not fit the topology, or this rank has no place in it.
        P2PUsageError: settings that contradict each other, the topology or the device.
        P2PTimeoutError: a rank did not arrive before the deadline.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with VTPCommunicator(VTPTopology([1])) as communicator:
        ...     communicator.is_pp_first_stage
        True
    """

    def __init__(
        self,
        topology: VTPTopology,
        config: Any = None,
        *,
        backend: str | None = None,
        device: torch.device | str | None = None,
        label: str = "vtp",
        traffic: Iterable[tuple[Edge, Direction]] | None = None,
    ) -> None:
        if not isinstance(topology, VTPTopology):
            raise BridgeError(f"topology is {shown(topology)}; it must be a VTPTopology")
        self.topology, self.label = topology, label
        self.rank = dist.get_rank()
        topology.check_world(dist.get_world_size())
        self.stage, self.replica = topology.place_of(self.rank)
        self.config = as_config(config)
        self.deadline, self.fixed_shapes = self.config.deadline, self.config.fixed_shapes
        ring = getattr(config, "layerwise_disaggregated_training", None)
        if ring is not None and bool(ring) is not topology.ring:
            raise P2PUsageError(f"layerwise_disaggregated_training is {ring!r}, the topology has ring={topology.ring}")
        backend, self.device = resolve_device(backend, device, staged=self.config.staged)
        boundaries = topology.boundaries(self.replica)
        used = checked_traffic(traffic, [boundary.edge for boundary in boundaries])
        self._boundaries = tuple(boundary for boundary in boundaries if self.rank in boundary.ranks)
        self._neighbours = {boundary.edge: boundary.ranks for boundary in self._boundaries}
        self._sends, self._receives, self._arriving = {}, {}, {}
        stream = new_stream(self.device)
        self.edge_exchanges = [
            self._crossing(boundary, direction, backend, stream)
            for boundary in self._boundaries
            for direction in directions_of(boundary.edge, backward=True, traffic=used)
        ]
        self._open(backend)

    def _crossing(
        self, boundary: VTPBoundary, direction: Direction, backend: str, stream: torch.Stream | None
    ) -> Exchange:
        """Make the exchange of ``boundary`` in ``direction``, and register this rank's send or receive on it."""
        name, variable = f"boundary {self.label}/{boundary.edge}", not self.fixed_shapes
        wiring, tensor = boundary.wiring(self.label, self.rank, direction), boundary.tensor(direction)
        traffic = EdgeTraffic(name, wiring, backend=backend, device=self.device, config=self.config, stream=stream)
        leaves = leaves_of(name, EdgeOptions(), wiring, device=self.device, variable=variable, tensor=tensor)
        exchange = Exchange(traffic, leaves, variable=variable, tied=False)
        if self.rank in wiring.src.coords_of:
            self._sends[boundary.edge, direction] = exchange.isend_forward
        else:
            self._arriving[boundary.edge, direction] = exchange
            self._receives[boundary.edge, direction] = partial(self._receive, exchange, direction)
        return exchange

    def _open(self, backend: str) -> None:
        """Open the lanes of all boundaries, then the groups."""
        edges, variable = [exchange.traffic for exchange in self.edge_exchanges], not self.fixed_shapes
        declared = {
            spec: f"{edge.wiring.declaration}; sequence on axis {self.topology.sequence_axis}"
            for edge in edges
            for spec in edge.wiring.lane_specs
        }
        config = evolve(lane_config(self.config, variable=variable), pipeline_dtype=self.config.pipeline_dtype)
        self.lanes = open_lanes(declared, declared=declared, config=config, backend=backend, device=self.device)
        with ExitStack() as undo:  # after an error of the groups there are no lanes either
            undo.callback(self.lanes.close)
            specs = [spec for edge in edges for spec in edge.wiring.group_specs]
            deadline, ctas = self.config.deadline, self.config.max_ctas
            groups = own_groups(specs, backend=backend, deadline=deadline, max_ctas=ctas)
            undo.pop_all()
        for edge in edges:
            edge.attach(self.lanes)
            edge.groups = {spec: groups[spec] for spec in edge.wiring.group_specs}

    @cached_property
    def job(self) -> JobTopology:
        """The plan's stages and this rank's."""
        return JobTopology(
            total_stages=self.total_stages,
            current_stage=self.current_stage,
            graph=self.graph,
            stages=self.stages,
            lanes=self.config.communicators,
            slices=False,
        )

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

    def _receive(self, exchange: Exchange, direction: Direction, shapes: Any = None) -> ReceiveHandle:
        return exchange.irecv_forward(self._shape(shapes, ARRIVES[direction]))

    def _no_way(self, edge: Edge, direction: Direction, *, sends: bool) -> BridgeError:
        self._require_alive()
        return BridgeError(
            f"rank {self.rank}, of stages {self.stages}, does not {'send' if sends else 'receive'} "
            f"{direction.name.lower()} along edge {edge}: it has {[*map(str, self._neighbours)]}, less what traffic= "
            "leaves out"
        )

    def is_vtp_stage_rank0(self) -> bool:
        """Whether this rank is the first of its stage (and replica)."""
        return self.rank == self.get_vtp_stage_ranks()[self.stage][0]

    def get_vtp_size_list(self) -> list[int]:
        """Tensor-parallel size of each stage."""
        return list(self.topology.tp_sizes)

    def get_vtp_stage_ranks(self) -> list[list[int]]:
        """The ranks of each stage, in this rank's replica."""
        return [list(stage.ranks) for stage in self.topology.replica(self.replica)]

    def get_vtp_my_stage_idx(self) -> int:
        """The stage of this rank."""
        return self.stage
