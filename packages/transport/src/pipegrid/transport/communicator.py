"""Communicators whose messages travel on lanes: their base class, and that of one pipeline.

That has blocking verbs to the next and the previous rank, and sends along edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from pipegrid.core.edge import Crossing, Direction, Edge
from pipegrid.core.fields import checked
from pipegrid.core.graph import ModuleGraph
from pipegrid.core.lanes import (
    LaneSpec,
    checked_replicas,
    direction_lane,
    pipeline_lanes,
    placed_stages,
    planned_lanes,
    require_edge,
)
from pipegrid.transport.base import Communicator, Port, Verbs
from pipegrid.transport.config import P2PConfig, as_config
from pipegrid.transport.control.blocking import NeighbourTransfers, NeighbourVerbs
from pipegrid.transport.control.handshake import Handshake
from pipegrid.transport.control.lanes import Lanes
from pipegrid.transport.control.opening import open_lanes, resolve_device
from pipegrid.transport.control.replica_lanes import ReplicaLanes, ReplicaTraffic
from pipegrid.transport.errors import P2PUsageError
from pipegrid.transport.job import JobTopology
from pipegrid.transport.lane.lane import Lane
from pipegrid.transport.messages.payload import is_single_shape

_LEFT_OUT = "the argument traffic left out, or communicators"


class LaneCommunicator(Communicator):
    """A communicator whose messages travel on lanes that were opened together."""

    config: P2PConfig  # settings of the lanes
    rank: int
    device: torch.device  # where sent payloads must live, and received ones do
    lanes: Lanes  # this rank's ends
    # Those to other replicas; None where the communicator does not know their ranks.
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

    def describe(self) -> Mapping[str, Any]:
        """`Lane.describe` of each lane."""
        return {str(spec): lane.describe() for spec, lane in self.lanes.items()}

    def abort(self, reason: str) -> None:
        """End all lanes at once and tell the neighbours why."""
        self.lanes.abort(reason)

    def close(self) -> None:
        """End the lanes and free their groups. A second call does nothing."""
        self.lanes.close()


class P2PCommunicator(NeighbourVerbs, LaneCommunicator):
    """Point-to-point traffic between the stages of one pipeline.

    Stage ``s`` is on rank ``s % P`` of the group's ``P`` ranks, so neighbours are cyclic: the next rank of the last one
    is the first, which interleaved and U-shaped pipelines use. Activations and gradients between the same two ranks
    have lanes of their own and cannot be taken for each other.

    All ranks of the group construct it together, with equal arguments; on return every lane has carried a message.

    Args:
        pp_group: the ranks of the pipeline, in order; None is the whole world.
        config: a `P2PConfig`, or any object with some of its attributes; read once, here.
        placement: rank in the group of each stage, where it is not cyclic (a V: ``(0, 1, 2, 3, 3, 2, 1, 0)``).
        tensor_shape: the one shape of all messages, in ``pipeline_dtype``: compared between neighbours now, so that no
            message ever needs a header.
        device: where tensors live; None is the device of the group's backend, or the current GPU if ``staged``.
        traffic: the edges and directions that the plan uses; other lanes are not opened. None opens all, or those that
            the ``communicators`` of the config are for.
        replicas: the global ranks of the pipeline of each replica, in order: for plans whose routes move units between
            them. Lanes to other replicas are opened when a plan first needs them.
        graph: of the modules whose stages these are; None is a chain of one module, of any number of stages.

    Raises:
        P2PUsageError: settings that contradict each other, the group or the device; or a group that this rank is not
            in; a placement with fewer than two stages, or an index that the group does not have.
        P2PMismatchError: the ranks were given different settings.
        P2PTimeoutError: a rank did not come.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> communicator = P2PCommunicator(dist.group.WORLD, P2PConfig(pipeline_dtype=torch.float32))
        >>> communicator.send_forward_recv_forward(torch.ones(2, 3), True, (2, 3)).shape
        torch.Size([2, 3])
        >>> communicator.close()
    """

    def __init__(
        self,
        pp_group: ProcessGroup | None = None,
        config: Any = None,
        *,
        placement: Sequence[int] | None = None,
        tensor_shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        traffic: Iterable[tuple[Edge, Direction]] | None = None,
        replicas: Sequence[Sequence[int]] | None = None,
        graph: ModuleGraph | None = None,
    ) -> None:
        self.pp_group = group = dist.group.WORLD if pp_group is None else pp_group
        self.rank = dist.get_rank()
        if not isinstance(group, ProcessGroup):
            raise P2PUsageError(f"pp_group is {group!r}; it must be None or a group that this rank {self.rank} is in")
        checked(traffic, Iterable[Any] | None, "traffic", P2PUsageError)
        checked(graph, ModuleGraph | None, "graph", P2PUsageError)
        self.config, self._ranks = as_config(config), dist.get_process_group_ranks(group)
        self._placement, self._graph = placed_stages(placement, len(self._ranks), graph), graph
        self._edges = edges = None if graph is None else frozenset(graph.stage_edges)
        self.deadline, self.fixed_shapes = self.config.deadline, self.config.fixed_shapes
        known = None if replicas is None else checked_replicas(replicas, self._ranks, self.config.communicators)
        backend, self.device = resolve_device(None, device, group, staged=self.config.staged)
        specs, carried = planned_lanes(self._ranks, self._placement, traffic, self.config.communicators, edges)
        example = None if tensor_shape is None else _example(tensor_shape, self.config)
        open_some = partial(_open, example, config=self.config, backend=backend, device=self.device)
        self.lanes = open_some(specs, carried=carried)
        if known is not None:
            self.across = ReplicaLanes(
                self.rank, known[1], len(known[0]), self.lanes, known[0], self._placement, edges, self.config, open_some
            )
        self._of_edge: dict[tuple[Edge, Direction], Lane] = {}
        before, here, after = self.prev_rank, self.rank, self.next_rank
        of_name = {
            "recv_prev": direction_lane(before, here, Direction.FORWARD),
            "recv_next": direction_lane(here, after, Direction.BACKWARD),
            "send_next": direction_lane(here, after, Direction.FORWARD),
            "send_prev": direction_lane(before, here, Direction.BACKWARD),
        }
        self._transfers = NeighbourTransfers(self.lanes, self.config, of_name, partial(self._lacks, of_name))

    # ---- This rank among the stages

    @cached_property
    def job(self) -> JobTopology:
        """The stages, and this rank's place among them."""
        here, graph = self.current_stage, self._graph
        return JobTopology(
            total_stages=self.total_stages,
            current_stage=here,
            graph=graph,
            stages=() if graph is None else tuple([s for s, at in enumerate(self._placement or ()) if at == here]),
            placement=None if self._placement is None else tuple((place,) for place in self._placement),
            num_chunks=self.virtual_pipeline_model_parallel_size,
            lanes=self.config.communicators,
            replica=None if self.across is None else self.across.replica,
        )

    @property
    def next_rank(self) -> int:
        """The global rank after this one; the first after the last."""
        return self._ranks[(self.current_stage + 1) % self.total_stages]

    @property
    def prev_rank(self) -> int:
        """The global rank before this one; the last before the first."""
        return self._ranks[(self.current_stage - 1) % self.total_stages]

    @property
    def total_stages(self) -> int:
        """Number of ranks of the pipeline."""
        return len(self._ranks)

    @property
    def current_stage(self) -> int:
        """This rank's place among them, from 0."""
        return self._ranks.index(self.rank)

    @property
    def placement(self) -> tuple[int, ...] | None:
        """Rank in the group of each stage; None where stages are cyclic."""
        return self._placement

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this rank holds the first stage of the pipeline."""
        return self.current_stage == (0 if self._placement is None else self._placement[0])

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this rank holds the last stage of the pipeline."""
        return self.current_stage == (self.total_stages - 1 if self._placement is None else self._placement[-1])

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Chunks per rank, as configured."""
        return self.config.virtual_pipeline_model_parallel_size

    def port(self, edge: Edge, direction: Direction) -> Lane:
        """The `lane` of an edge in a direction."""
        return self.lane(edge, direction)

    def lane(self, edge: Edge, direction: Direction) -> Lane:
        """The lane that carries the traffic of an edge in a direction.

        Raises:
            P2PUsageError: there is no such edge, it does not touch this rank, or its lane was not opened.
        """
        if (found := self._of_edge.get((edge, direction))) is not None:
            return found
        require_edge(edge, self._placement, self._edges)
        spec = direction_lane(self._rank_of(edge.source), self._rank_of(edge.destination), direction)
        if spec not in self.lanes:
            why = _LEFT_OUT if self.rank in spec.pair else f"rank {self.rank} is no end of"
            raise P2PUsageError(f"edge {edge} needs lane {spec}, which {why}")
        self._of_edge[edge, direction] = self.lanes[spec]
        return self.lanes[spec]

    def _lacks(self, of_name: Mapping[str, LaneSpec], name: str) -> P2PUsageError:
        """The error of a blocking transfer whose lane is not open."""
        known = of_name[name] in pipeline_lanes(self._ranks, placement=self._placement)
        why = _LEFT_OUT if known else f"the placement {self._placement} does not have"
        return P2PUsageError(f"{name} needs lane {of_name[name]}, which {why}; isend and irecv take an edge")

    def _rank_of(self, stage: int) -> int:
        return self._ranks[stage % self.total_stages if self._placement is None else self._placement[stage]]

    def neighbours(self, edges: Iterable[Edge]) -> Sequence[Handshake]:
        """The handshakes with the ranks at the other ends of ``edges``: each compares its next step with them."""
        ranks = set()
        for edge in edges:
            ends = self._rank_of(edge.source), self._rank_of(edge.destination)
            opened = [one for one in Direction if direction_lane(*ends, direction=one) in self.lanes]
            ranks.add(self.lane(edge, opened[0] if opened else Direction.FORWARD).peer)
        return self.lanes.neighbours(ranks)

    def renew_shapes(self) -> None:
        """Let the next message of every lane agree on new shapes; all ranks call it between two steps."""
        for lane in self.lanes.values():
            lane.require_renewable()
        for lane in self.lanes.values():
            lane.renew()


def _open(example: torch.Tensor | None, specs: Sequence[LaneSpec], **options: Any) -> Lanes:
    """`open_lanes` of lanes whose messages are all like ``example``, where there is one."""
    return open_lanes(specs, agreed=None if example is None else dict.fromkeys(specs, example), **options)


def _example(shape: Sequence[int], config: P2PConfig) -> torch.Tensor:
    """A message of the one ``tensor_shape``."""
    dtype, mode = config.pipeline_dtype, config.shape_mode
    if not is_single_shape(shape):
        raise P2PUsageError(f"tensor_shape is {shape!r}; it must be one shape, of sizes of at least 0")
    if mode not in ("agreed", "given"):
        raise P2PUsageError(f"tensor_shape is {shape!r}, but shapes are {mode!r}, which vary")
    if dtype is None:
        raise P2PUsageError(f"tensor_shape is {shape!r}, but pipeline_dtype is None; a fixed message has a dtype")
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
