"""Variable tensor parallelism: one pipeline whose stages have different tensor-parallel sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Unpack

import torch
import torch.distributed as dist
from attrs import evolve

from pipegrid.bridges.bridge import (
    BridgeReceive,
    BridgeSend,
    EdgeTraffic,
    checked_traffic,
    lane_config,
    renew_lanes,
)
from pipegrid.bridges.collectives import abort_groups, close_groups, own_groups
from pipegrid.bridges.errors import BridgeError, DestroyedError, StageError
from pipegrid.bridges.graph import ModuleGraph
from pipegrid.bridges.vtp.peers import Named, Peers
from pipegrid.bridges.vtp.topology import VTPTopology
from pipegrid.bridges.vtp.traffic import BoundaryTraffic
from pipegrid.topology.fields import shown
from pipegrid.transport.config import P2PConfig, as_config
from pipegrid.transport.control.handshake import Handshake
from pipegrid.transport.control.opening import open_lanes, resolve_device
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.errors import P2PConfigError, P2PUsageError
from pipegrid.transport.job import JobTopology
from pipegrid.transport.lane_communicator import LaneCommunicator
from pipegrid.transport.messages.payload import is_single_shape
from pipegrid.transport.protocol import Handle
from pipegrid.transport.streams import new_stream

_F, _B = Direction.FORWARD, Direction.BACKWARD
_ARRIVES = {_F: "recv_prev", _B: "recv_next"}
Requests = dict[str, BridgeReceive]


class VTPCommunicator(LaneCommunicator):
    """Traffic between the stages of a pipeline in which each stage has its own tensor-parallel size.

    What crosses a boundary is held whole by every rank of a side (tensor parallelism) or cut along the sequence
    (sequence parallelism, see `VTPTopology`). Copies share the sending and the receiving: each byte crosses once, and
    the receiving copies complete each other in a group of the boundary's own. That completion starts when the slices
    have landed, with or without a waiting rank, so that it overlaps the next receive. Sequence parts go straight to the
    ranks that hold them on the other side.

    Two faces, over the same lanes:

    - of `pipegrid.transport.PipelineCommunicator`: `isend` and `irecv` along edges, which is what a runtime uses. In a
      ring of P stages there is an edge ``P-1 > P`` for the way round, and stage 0 holds the plan's stages 0 and P.
    - the functions that variable-TP training scripts know (``vtp_send_forward``, ``recv_forward_with_reqs``, ...), as
      methods; shapes are those of this rank's own tensor.

    Every rank of the topology constructs it with equal arguments: lanes and groups are made then, in one order.

    Args:
        topology: which ranks hold which stage.
        config: a `P2PConfig`, or any object with some of its attributes; read once, here. With
            ``variable_seq_lengths``, shapes may change from message to message.
        backend: of lanes and groups; None is the default group's for ``device``.
        device: where tensors live; None is the current GPU where the backend is NCCL, else the CPU.
        label: tells apart communicators over the same ranks.
        traffic: the edges and directions that the plan uses (`Plan.traffic`); other lanes are not opened. None: all.

    Raises:
        BridgeError: the world does not fit the topology, or this rank has no place in it.
        P2PConfigError: settings that contradict each other, the topology or the device.
        P2PTimeoutError: a rank did not come.
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
        self.deadline, self.fixed_shapes = self.config.deadline, self.config.shape_mode != "header"
        self._check_config(config)
        backend, self.device = resolve_device(backend, device)
        self._ended = False
        variable = self.config.shape_mode == "header"
        used = checked_traffic(traffic, [boundary.edge for boundary in topology.boundaries(self.replica)])
        stream = new_stream(self.device)
        self._traffic = {
            boundary.edge: BoundaryTraffic(
                boundary,
                EdgeTraffic(
                    f"boundary {label}/{boundary.edge}",
                    boundary.wiring(label, self.rank, used),
                    backend=backend,
                    device=self.device,
                    config=self.config,
                    stream=stream,
                ),
                variable=variable,
            )
            for boundary in topology.boundaries(self.replica)
            if self.rank in (*boundary.source.ranks, *boundary.destination.ranks)
        }
        self._peers = Peers(self.rank, tuple(one.boundary for one in self._traffic.values()))
        edges = [one.traffic for one in self._traffic.values()]
        self.lanes = open_lanes(
            [spec for edge in edges for spec in edge.wiring.lane_specs],
            declared={
                spec: f"{edge.wiring.declaration}; sequence on axis {topology.sequence_axis}"
                for edge in edges
                for spec in edge.wiring.lane_specs
            },
            config=evolve(lane_config(self.config, variable=variable), pipeline_dtype=self.config.pipeline_dtype),
            backend=backend,
            device=self.device,
        )
        with ExitStack() as undo:  # after an error of the groups there are no lanes either
            undo.callback(self.lanes.close)
            specs = [spec for edge in edges for spec in edge.wiring.group_specs]
            deadline, ctas = self.config.deadline, self.config.max_ctas
            self._groups = own_groups(specs, backend=backend, deadline=deadline, max_ctas=ctas)
            undo.pop_all()
        for edge in edges:
            edge.attach(self.lanes)
            edge.groups = self._groups

    def _check_config(self, given: Any) -> None:
        if self.config.shape_mode == "manifest":
            raise P2PConfigError("a VTPCommunicator has no shapes='manifest'; use variable_seq_lengths=True")
        wants_ring = getattr(given, "layerwise_disaggregated_training", None)
        if wants_ring is not None and bool(wants_ring) is not self.topology.ring:
            raise P2PConfigError(
                f"layerwise_disaggregated_training is {wants_ring!r}, but the topology has ring={self.topology.ring}"
            )

    # -- where this rank stands -----------------------------------------------------------------------------

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

    # -- along edges ----------------------------------------------------------------------------------------

    def isend(self, payload: Any, *, edge: Edge, direction: Direction) -> BridgeSend:
        """Start sending this rank's tensor along ``edge`` (forward) or against it (backward)."""
        return BridgeSend(self._of_edge(edge, direction, sends=True).isend(payload, direction))

    def irecv(self, *, edge: Edge, direction: Direction, shapes: Any = None) -> BridgeReceive:
        """Start receiving the next tensor of ``edge`` in that direction, with ``shapes`` if given of that one shape."""
        traffic = self._of_edge(edge, direction, sends=False)
        return traffic.irecv(direction, self._checked_shape(shapes, _ARRIVES[direction]))

    def _of_edge(self, edge: Edge, direction: Direction, *, sends: bool) -> BoundaryTraffic:
        self._require_alive()
        traffic = self._traffic.get(edge)
        used = () if traffic is None else traffic.traffic.wiring.directions
        if traffic is None or direction not in used or traffic.boundary.sends(self.rank, direction) is not sends:
            raise StageError(
                f"rank {self.rank}, of stages {self.stages}, does not {'send' if sends else 'receive'} "
                f"{direction.name.lower()} along edge {edge}: it has {[*map(str, self._traffic)]}, less what traffic= "
                "leaves out"
            )
        return traffic

    def neighbours(self, edges: Iterable[Edge]) -> Handshake:
        """The handshake with the ranks at the other ends of ``edges``: each compares its next step with them."""
        found = [self._traffic[edge].traffic.wiring for edge in edges if edge in self._traffic]
        specs = [spec for wiring in found for spec in wiring.lane_specs]
        return self.lanes.neighbours({rank for spec in specs for rank in spec.pair})

    @property
    def communicators(self) -> int:
        """Communicators of this rank, lanes and groups of boundaries; on NCCL, each has a stream of its own."""
        return len({id(lane.group) for lane in self.lanes.values()}) + len(self._groups)

    def renew_shapes(self) -> None:
        """Let the next message of every lane agree on shapes anew; all ranks call it between two steps."""
        renew_lanes(self.lanes.values())
        for traffic in self._traffic.values():
            traffic.forget_shapes()

    def check(self) -> None:
        """See `BridgeCommunicator.check`: of all boundaries of this rank."""
        for one in self._traffic.values():
            one.traffic.waits.check()

    def abort(self, reason: str) -> None:
        """End all lanes and completions at once and tell the other stages why."""
        self._end_completions(reason)
        abort_groups(self._groups.values(), reason, beside=lambda: self.lanes.abort(reason))

    def close(self) -> None:
        """End the lanes and free the groups. Twice is harmless."""
        if not self._ended:
            self._ended = True
            self._end_completions("closed")
            failed = self.lanes.failed or any(one.traffic.waits.stuck for one in self._traffic.values())
            close_groups(self._groups, failed=failed, seconds=self.config.deadline, beside=self.lanes.close)

    def _end_completions(self, reason: str) -> None:
        for one in self._traffic.values():
            one.traffic.waits.end(reason)

    def _require_alive(self) -> None:
        if self._ended:
            raise DestroyedError("this communicator was closed; make a new one")

    def _checked_shape(self, shape: Any, name: str, *, required: bool = False) -> tuple[int, ...] | None:
        if shape is None:
            if required or self.config.shape_mode == "given":
                raise P2PUsageError(
                    f"tensor_shape must be specified if {name} is True. "
                    "Common tensor_shape is (seq_length, micro_batch_size, hidden_size)"
                )
            return None
        if not is_single_shape(shape):
            raise P2PUsageError(f"the shape of a receive is {shape!r}; it must be the sizes of one tensor")
        return tuple(int(size) for size in shape)

    # -- where this rank stands -----------------------------------------------------------------------------

    def is_vtp_stage_rank0(self) -> bool:
        """Whether this rank is the first of its stage (and replica)."""
        return self.rank == self.get_vtp_stage_ranks()[self.stage][0]

    def get_vtp_size_list(self) -> list[int]:
        """Tensor-parallel size of each stage."""
        return list(self.topology.tp_sizes)

    def get_vtp_stage_ranks(self) -> list[list[int]]:
        """Per stage its ranks, those of this rank's replica."""
        return [list(stage.ranks) for stage in self.topology.replica(self.replica)]

    def get_vtp_my_stage_idx(self) -> int:
        """The stage of this rank."""
        return self.stage

    # -- the functions of variable-TP scripts: no guards, asynchronous --------------------------------------

    def vtp_send_forward(self, tensor: torch.Tensor, **named: Unpack[Named]) -> list[Handle] | None:
        """Start sending this rank's share of an activation to the next stage; in a ring also from the last to stage 0.

        ``group``, ``next_rank`` and ``prev_rank`` say who the neighbours are, as `Peers`: one value or a list.

        Returns:
            A handle per receiving rank; None on a rank with nothing to send (the last stage without a ring).
        """
        return self._start_send(tensor, _F, self._peers.next(**named))

    def vtp_send_backward(self, tensor: torch.Tensor, **named: Unpack[Named]) -> list[Handle] | None:
        """Start sending this rank's share of a gradient to the previous stage. As `vtp_send_forward`."""
        return self._start_send(tensor, _B, self._peers.previous(**named))

    def vtp_recv_forward(
        self, tensor_shape: Sequence[int], config: Any = None, async_op: bool = False, **named: Unpack[Named]
    ) -> Any:
        """Receive an activation of ``tensor_shape`` (this rank's part) in ``pipeline_dtype`` from the previous stage.

        Returns:
            The tensor; with ``async_op`` ``(tensor, {"recv_prev": work})``, where there is data in the tensor once
            ``work.wait()`` has returned.

        Raises:
            P2PConfigError, P2PUsageError: no ``pipeline_dtype``, no ``tensor_shape``.
            StageError: nothing comes here: stage 0 without a ring.
        """
        receive = self._start_receive(tensor_shape, self._settings(config), _F, self._peers.previous(**named))
        return (receive.value, {_ARRIVES[_F]: receive}) if async_op else receive.result()

    def vtp_recv_backward(
        self, tensor_shape: Sequence[int], config: Any = None, async_op: bool = False, **named: Unpack[Named]
    ) -> Any:
        """Receive a gradient from the next stage. As `vtp_recv_forward`; the work is under ``"recv_next"``."""
        receive = self._start_receive(tensor_shape, self._settings(config), _B, self._peers.next(**named))
        return (receive.value, {_ARRIVES[_B]: receive}) if async_op else receive.result()

    def _start_send(self, tensor: torch.Tensor, direction: Direction, edge: Edge | None) -> list[Handle] | None:
        self._require_alive()
        return None if edge is None else list(self._of_edge(edge, direction, sends=True).isend(tensor, direction))

    def _start_receive(self, shape: Any, settings: P2PConfig, direction: Direction, edge: Edge | None) -> BridgeReceive:
        name = _ARRIVES[direction]
        if settings.pipeline_dtype is None:
            subject = "pipeline_dtype" if direction is _F else "dtype"
            raise P2PConfigError(f"{subject} must be provided if {name} is True: set pipeline_dtype in the config")
        wanted = self._checked_shape(shape, name, required=True)
        traffic = self._of_edge(self._there(edge, name), direction, sends=False)
        return traffic.irecv(direction, wanted, settings.pipeline_dtype)

    def _there(self, edge: Edge | None, what: str) -> Edge:
        if edge is None:
            raise StageError(f"{what} on stage {self.stage}: there is no stage on that side without ring=True")
        return edge

    def _settings(self, config: Any) -> P2PConfig:
        """The settings of one call: its own config's, where it gives one."""
        if config is None or config is self.config:
            return self.config
        settings, own = as_config(config), self.config.pipeline_dtype
        if None not in (own, settings.pipeline_dtype) and settings.pipeline_dtype != own:
            raise P2PConfigError(f"this call's pipeline_dtype is {settings.pipeline_dtype}, but the lanes have {own}")
        return settings

    # -- the same with the guards of a schedule, waiting ----------------------------------------------------

    def recv_forward_with_reqs(
        self,
        tensor_shape: Sequence[int] | None,
        config: Any = None,
        is_end_stage: bool = False,
        *,
        wait_on_reqs: bool = True,
        **named: Unpack[Named],
    ) -> tuple[torch.Tensor | None, Requests | None]:
        """Receive an activation; nothing on stage 0, unless it acts as the end of a ring.

        Returns:
            ``(tensor, None)``, both None where there is nothing to receive. With ``wait_on_reqs=False``
            ``(tensor, {"recv_prev": work})``, which batched communication does not allow.
        """
        if not self.topology.receives_forward(self.stage, is_end_stage=is_end_stage):
            return None, None
        return self._receive_with_reqs(tensor_shape, config, _F, self._peers.previous(**named), wait_on_reqs)

    def recv_backward_with_reqs(
        self,
        tensor_shape: Sequence[int] | None,
        config: Any = None,
        is_end_stage: bool = False,
        *,
        wait_on_reqs: bool = True,
        **named: Unpack[Named],
    ) -> tuple[torch.Tensor | None, Requests | None]:
        """Receive a gradient; nothing on the last stage, which in a ring is stage 0 as its end.

        Returns:
            As `recv_forward_with_reqs`, with ``"recv_next"``.
        """
        if not self.topology.sends_forward(self.stage, is_end_stage=is_end_stage):
            return None, None
        return self._receive_with_reqs(tensor_shape, config, _B, self._peers.next(**named), wait_on_reqs)

    def _receive_with_reqs(
        self, shape: Any, config: Any, direction: Direction, edge: Edge | None, wait_on_reqs: bool
    ) -> tuple[torch.Tensor | None, Requests | None]:
        settings = self._settings(config)
        if settings.batch_p2p_comm and not wait_on_reqs:
            raise P2PUsageError("wait_on_reqs=False needs batch_p2p_comm=False: a batch is waited for as a whole")
        with _timed(settings, f"{direction.name.lower()}-recv"):
            receive = self._start_receive(shape, settings, direction, edge)
            if wait_on_reqs:
                return receive.result(), None
        return receive.value, {_ARRIVES[direction]: receive}

    def send_forward(
        self,
        output_tensor: torch.Tensor,
        config: Any = None,
        is_end_stage: bool = False,
        *,
        is_last_stage: bool = False,
        **named: Unpack[Named],
    ) -> None:
        """Send an activation on; nothing on the last stage, which in a ring is stage 0 as its end.

        ``send_forward(tensor, is_last_stage)``, as `PipelineCommunicator` has it, works too: a bool in the place of
        ``config`` is that.
        """
        if isinstance(config, bool):
            config, is_last_stage = None, config
        if is_last_stage or not self.topology.sends_forward(self.stage, is_end_stage=is_end_stage):
            return
        edge = self._peers.next(**named)
        with _timed(self._settings(config), "forward-send"):
            _wait(self._start_send(output_tensor, _F, edge))

    def send_backward(
        self,
        input_tensor_grad: torch.Tensor,
        config: Any = None,
        is_end_stage: bool = False,
        *,
        is_first_stage: bool = False,
        **named: Unpack[Named],
    ) -> None:
        """Send a gradient back; nothing on stage 0, unless it acts as the end of a ring. As `send_forward`."""
        if isinstance(config, bool):
            config, is_first_stage = None, config
        if is_first_stage or not self.topology.receives_forward(self.stage, is_end_stage=is_end_stage):
            return
        edge = self._there(self._peers.previous(**named), "send_backward")
        with _timed(self._settings(config), "backward-send"):
            _wait(self._start_send(input_tensor_grad, _B, edge))

    # -- the verbs of `PipelineCommunicator` ----------------------------------------------------------------

    def recv_forward(self, tensor_shapes: Any = None, is_first_stage: bool = False) -> torch.Tensor | None:
        """The next activation; None on the first stage. Without a shape, whatever comes."""
        return None if is_first_stage else self._exchange(_F, tensor_shapes)

    def recv_backward(self, tensor_shapes: Any = None, is_last_stage: bool = False) -> torch.Tensor | None:
        """The next gradient; None on the last stage."""
        return None if is_last_stage else self._exchange(_B, tensor_shapes)

    def send_forward_recv_backward(
        self, output_tensors: torch.Tensor, tensor_shapes: Any = None, is_last_stage: bool = False
    ) -> torch.Tensor | None:
        """Send an activation on and receive a gradient from the same stage, as one batch; None on the last stage."""
        return None if is_last_stage else self._exchange(_B, tensor_shapes, output_tensors)

    def send_backward_recv_forward(
        self, input_tensor_grads: torch.Tensor, tensor_shapes: Any = None, is_first_stage: bool = False
    ) -> torch.Tensor | None:
        """Send a gradient back and receive an activation from the same stage; None on the first stage."""
        return None if is_first_stage else self._exchange(_F, tensor_shapes, input_tensor_grads)

    def _exchange(self, arriving: Direction, shapes: Any, *sending: torch.Tensor) -> torch.Tensor:
        """Receive a tensor, and meanwhile send that of ``sending``, if any, to the stage that it comes from."""
        leaving = _B if arriving is _F else _F
        edge = self._there(self._peers.previous() if arriving is _F else self._peers.next(), _ARRIVES[arriving])
        timer = f"{arriving.name.lower()}-recv"
        with _timed(self.config, f"{leaving.name.lower()}-send-{timer}" if sending else timer):
            # A batch of both, by lane: in the order of calls both sides would receive first.
            with self.lanes.batch(by_lane=True) if sending else nullcontext():
                receiving = self.irecv(edge=edge, direction=arriving, shapes=shapes)
                sent = [self._start_send(tensor, leaving, edge) for tensor in sending]
            received: torch.Tensor = receiving.result()
            for handles in sent:
                _wait(handles)
        return received


def _wait(handles: Iterable[Handle] | None) -> None:
    for handle in handles or ():
        handle.wait()


@contextmanager
def _timed(settings: P2PConfig, name: str) -> Iterator[None]:
    timers = settings.timers
    if timers is not None:
        timers(name, log_level=2).start()
    try:
        yield
    finally:
        if timers is not None:
            timers(name).stop()
