"""One communicator for a pipeline of many modules: bridges between them, lanes inside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from pipegrid.bridges.bridge.communicator import BridgeCommunicator, lane_config
from pipegrid.bridges.bridge.edge_communicator import EdgeCommunicator
from pipegrid.bridges.bridge.options import EdgeOptions
from pipegrid.bridges.bridge.wiring import Traffic, directions_of
from pipegrid.bridges.multimodule.dict_api import DictExchange, Tensors, added
from pipegrid.bridges.multimodule.edges import Ends
from pipegrid.bridges.multimodule.pipeline import ModulePipeline
from pipegrid.bridges.multimodule.rank_modules import ModuleChain, ModuleReplicas, RankModuleInfo
from pipegrid.core.edge import Direction, Edge
from pipegrid.reshard import BridgeError, GridLike, Placement, as_grid, edge_between
from pipegrid.transport import Handle, JobTopology, ReceiveHandle
from pipegrid.transport.config import as_config
from pipegrid.transport.control.opening import open_lanes, resolve_device

_FORWARD = Direction.FORWARD
_Send: TypeAlias = Callable[[], list[Handle]]
_Receive: TypeAlias = Callable[[], Mapping[str, Sequence[ReceiveHandle]]]


class MultiModulePipelineCommunicator(ModulePipeline, EdgeCommunicator):
    """Traffic between the stages of many modules that together are one pipeline.

    Satisfies `pipegrid.transport.PipelineCommunicator` in two ways. `isend` and `irecv` take an edge of global
    stage numbers (``graph.stage(module, index)``): with them a runtime executes any plan over the graph. The
    six blocking verbs exchange dicts keyed by module: a first stage of a module gets one entry per incoming
    edge, named after the source module; any other stage gets one entry under its own name. A module sends under
    its own name; with several destinations the payload goes to each, and the gradients that return are
    summed. The verbs need one stage of each module per rank, and no rank on both ends of an edge.

    Modules may share ranks. `positions` has the ranks that then act alike; along `collective_edges` a plan has a
    ``COLLECTIVE`` in place of messages, which `collective` executes.

    Every rank constructs this with equal arguments. Lanes inside modules and bridges between them are opened
    in one order that is the same on all ranks, and one `batch` spans all of them.

    Args:
        module_to_grid_map: grid of each module.
        topology: the modules that each module feeds.
        config: a `P2PConfig`, or any object with some of its attributes. With ``variable_seq_lengths`` sizes may
            change from microbatch to microbatch, on every edge.
        dim_mapping: axes of the modules' outputs, as for `BridgeCommunicator`, with the same default.
        module_output_ndim: axes of each module's output; default 3.
        edges: options of single edges, by (source, destination).
        placements: per module, what the dims of its grid do with tensors at its boundaries, see `boundary_side`.
        stage_placement: per module, the place in its pipeline of each of its stages, where that is not one each:
            ``(0, 1, 0, 1)`` for two chunks on two places.
        traffic: the edges and directions that the plan uses (`Plan.traffic`), the same on every rank; other lanes are
            not opened. None opens all.
        skips: per module, its edges past stages, of stages counted inside of it (`Stage.skips`).
        replicas: units may move between replicas (``dp``) by the routes of a plan. Each module has as many, each of
            them its own bridges and ``traffic``; channels between them open when a plan first needs them.
        backend: as for `BridgeCommunicator`.
        device: as for `BridgeCommunicator`.

    Raises:
        ModuleGraphError: a cycle, an unknown module, a module without a grid.
        BridgeError: options for an edge that does not exist; a gradient that would have to pass a module without
            backward; or as `BridgeCommunicator`.
    """

    exchanges = True
    rank: int

    def __init__(
        self,
        module_to_grid_map: Mapping[str, GridLike],
        topology: Mapping[str, Sequence[str]],
        config: Any,
        dim_mapping: Mapping[str, int] | None = None,
        module_output_ndim: Mapping[str, int] | None = None,
        *,
        edges: Mapping[tuple[str, str], EdgeOptions] | None = None,
        placements: Mapping[str, Mapping[str, Placement]] | None = None,
        stage_placement: Mapping[str, Sequence[int]] | None = None,
        traffic: Iterable[tuple[Edge, Direction]] | None = None,
        skips: Mapping[str, Sequence[Edge]] | None = None,
        replicas: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.config = as_config(config)
        self.deadline, self.fixed_shapes = self.config.deadline, self.config.fixed_shapes
        super().__init__(
            dist.get_rank(),
            module_to_grid_map,
            topology,
            dim_mapping,
            module_output_ndim,
            edges=edges,
            placements=placements,
            stage_placement=stage_placement,
            traffic=traffic,
            skips=skips,
        )
        self._replica, self._replicas = self._edges.replica_of(self.rank, wanted=replicas)
        named = {getattr(grid, "backend", None) for grid in self.module_to_grid_map.values()} - {None}
        backend = backend or (named.pop() if len(named) == 1 else None)
        self._backend, self.device = resolve_device(backend, device, staged=self.config.staged)
        self.bridge_comms = list[BridgeCommunicator]()
        self._build_bridge_comms()
        self._chains = {name: self._chain(name) for name in self.places}
        self.rank_module_map = {name: self._rank_module(name) for name in self.places}
        self._open()

    def _build_bridge_comms(self) -> None:
        """A bridge per edge, in the order of the graph, on the ranks of its two grids."""
        own = None if self._replica is None else (self._replica, self._replica)
        for ends in self._edges.in_order():
            if any(self.is_current_rank_in_grid(self.module_to_grid_map[name]) for name in ends):
                self.bridge_comms.append(self._bridge(ends, own, self._edges.traffic))

    def _bridge(self, ends: Ends, replicas: tuple[int, int] | None, traffic: Traffic | None) -> BridgeCommunicator:
        """The bridge of an edge between all replicas, or from one to one, without its lanes."""
        (src, dst), options, grids = ends, self._options(ends), self.module_to_grid_map
        last, first = self._edges.stages(ends)
        return BridgeCommunicator(
            grids[src],
            grids[dst],
            src_module_name=src,
            dest_module_name=dst,
            options=options,
            directions=directions_of(edge_between(self.graph, src, dst), backward=options.backward, traffic=traffic),
            config=self.config,
            backend=self._backend,
            device=self.device,
            src_stage=last,
            dest_stage=first,
            replicas=replicas,
            open=False,
        )

    def _chain(self, name: str) -> ModuleChain:
        grid, placement, first = self.module_to_grid_map[name], self.stage_placement[name], self.graph.stage(name, 0)
        inside, backward = self.graph.edges_inside(name), self._has_backward[name]
        traffic = self._edges.traffic
        ways = {edge: directions_of(edge, backward=backward, traffic=traffic) for edge in inside}
        return ModuleChain(name, grid, placement, self.rank, first=first, directions=ways)

    def _rank_module(self, name: str) -> RankModuleInfo:
        first, last = self._holds_end(name, 0), self._holds_end(name, -1)
        return RankModuleInfo(
            pp_rank=self.places[name],
            pp_size=as_grid(self.module_to_grid_map[name]).length("pp"),
            p2p_communicator=self._chains[name],
            bridge_comms_as_src_module=[b for b in self.bridge_comms if b.src_module_name == name and last],
            bridge_comms_as_dest_module=[b for b in self.bridge_comms if b.dest_module_name == name and first],
            is_source_stage=first and self._is_source_module(name),
            is_terminal_stage=last and self._is_sink_module(name),
        )

    def _open(self) -> None:
        users: list[ModuleChain | BridgeCommunicator] = [*self._chains.values(), *self.bridge_comms]
        config = lane_config(self.config, variable=not self.fixed_shapes)
        open_some = partial(open_lanes, config=config, backend=self._backend, device=self.device)
        self.lanes = open_some(
            [spec for user in users for spec in user.lane_specs],
            declared={spec: text for bridge in self.bridge_comms for spec, text in bridge.declared.items()},
        )
        for bridge in self.bridge_comms:
            bridge.attach(self.lanes)
        for chain in self._chains.values():
            chain.attach(self.lanes, self.config)
        self._bridge_of = {
            edge_between(self.graph, b.src_module_name, b.dest_module_name): b for b in self.bridge_comms
        }
        self.edge_exchanges = [bridge.exchange for bridge in self.bridge_comms]
        self._inner = {edge: chain for chain in self._chains.values() for edge in chain.directions}
        self._sends, self._receives, self._neighbours = {}, {}, {}
        if self._replica is not None:
            place, edges = (self.rank, self._replica, self._replicas), self._edges.by_stages()
            self.across = ModuleReplicas(*place, self.lanes, self._inner, edges, self._bridge_across, open_some)
        for edge, bridge in self._bridge_of.items():
            self._neighbours[edge] = {rank for spec in bridge.lane_specs for rank in spec.pair}
            for direction in Direction:
                if (send := bridge.verb(direction, sends=True)) is not None:
                    self._sends[edge, direction] = send
                if (receive := bridge.verb(direction, sends=False)) is not None:
                    self._receives[edge, direction] = receive
        self._inside = {
            (edge, direction): self.lanes[spec]
            for edge, chain in self._inner.items()
            for direction in Direction
            if (spec := chain.spec(edge, direction)) in self.lanes
        }
        for (edge, direction), lane in self._inside.items():
            self._sends[edge, direction], self._receives[edge, direction] = lane.isend, lane.irecv
        for edge, chain in self._inner.items():
            self._neighbours[edge] = chain.spec(edge, _FORWARD).pair

    def _bridge_across(self, ends: Ends, replicas: tuple[int, int]) -> BridgeCommunicator:
        self.bridge_comms.append(bridge := self._bridge(ends, replicas, None))
        self.edge_exchanges.append(bridge.exchange)
        return bridge

    @cached_property
    def job(self) -> JobTopology:
        """The graph of modules with its positions, and this rank's stages."""
        grids = self.module_to_grid_map.items()
        dims = {name: dict(zip(grid.dim_names, grid.shape, strict=True)) for name, grid in grids}
        return JobTopology(
            total_stages=self.total_stages,
            current_stage=self.current_stage,
            graph=self.graph,
            stages=self.stages,
            placement=self.positions.placement,
            collective_edges=self.collective_edges,
            forward_edges=self.forward_edges,
            payload_edges=self.payload_edges,
            frozen_modules=self.frozen_modules,
            dims=dims,
            lanes=self.config.communicators,
            replica=self._replica,
        )

    def _no_way(self, edge: Edge, direction: Direction, *, sends: bool) -> BridgeError:
        self._require_alive()
        if edge in self._inner:
            return self._inner[edge].lacks(edge, direction)
        if edge in self._bridge_of:
            self._bridge_of[edge].takes_part(direction, sends=sends)  # raises, on a rank of neither grid
        return self._not_on(edge)

    def collective(
        self, payload: Any, *, edge: Edge, direction: Direction
    ) -> tuple[Handle | None, ReceiveHandle | None]:
        """Start the exchange along ``edge`` among all ranks of its two stages, some of which hold both.

        Every rank of either stage calls it, in the same order: with its own tensor where it holds the stage that
        makes it, with None elsewhere.

        Returns:
            The send of a rank that holds the stage that makes it, and the receive of one that holds the other.
        """
        self._require_alive()
        send, receive = self._sends.get((edge, direction)), self._receives.get((edge, direction))
        if edge not in self._bridge_of or (send is None and receive is None):
            raise self._no_way(edge, direction, sends=True)
        with self.lanes.batch(by_lane=True):  # ranks that hold both stages would all send first
            sending = None if send is None else send(payload)
            return sending, None if receive is None else receive(None)

    def close(self) -> None:
        """Close all lanes and destroy all groups. A second call does nothing."""
        super().close()
        for bridge in self.bridge_comms:
            bridge.destroy()

    def recv_forward(self, tensor_shape: Any = None, is_first_stage: bool = False) -> Tensors:
        """The next activations of this rank's modules, by name; no entry for a module that nothing feeds here.

        Args:
            tensor_shape: the shape that is expected inside of modules, or a dict by name for any entry.
            is_first_stage: True on a rank that holds no first stage of the pipeline is an error.
        """
        return self._exchange(receive=partial(self._dicts.receive_forward, tensor_shape), first=is_first_stage)

    def send_forward(self, output_dict: Tensors, is_last_stage: bool = False) -> None:
        """Send the outputs of this rank's modules, by name, to the next stages of each module.

        Args:
            output_dict: module name to tensor. Entries of sinks are legal; nothing is sent for them.
            is_last_stage: True on a rank that holds no last stage of the pipeline is an error.

        Raises:
            MissingTensorError: no entry for a module that sends here, or one for a module that is not here.
        """
        self._exchange(send=partial(self._dicts.send_forward, output_dict), last=is_last_stage)

    def recv_backward(self, tensor_shape: Any = None, is_last_stage: bool = False) -> Tensors:
        """The next gradients of this rank's outputs, by module; the sum where a module feeds several."""
        return self._exchange(receive=partial(self._dicts.receive_backward, tensor_shape), last=is_last_stage)

    def send_backward(self, grad_dict: Tensors, is_first_stage: bool = False) -> None:
        """Send back the gradients of the activations of `recv_forward`, under the same names."""
        self._exchange(send=partial(self._dicts.send_backward, grad_dict), first=is_first_stage)

    def send_forward_recv_backward(
        self, output_dict: Tensors, tensor_shape: Any = None, is_last_stage: bool = False
    ) -> Tensors:
        """`send_forward` and `recv_backward`, all posted before any is waited for."""
        send, receive = self._dicts.send_forward, self._dicts.receive_backward
        return self._exchange(partial(send, output_dict), partial(receive, tensor_shape), last=is_last_stage)

    def send_backward_recv_forward(
        self, grad_dict: Tensors, tensor_shape: Any = None, is_first_stage: bool = False
    ) -> Tensors:
        """`send_backward` and `recv_forward`, all posted before any is waited for."""
        send, receive = self._dicts.send_backward, self._dicts.receive_forward
        return self._exchange(partial(send, grad_dict), partial(receive, tensor_shape), first=is_first_stage)

    def _exchange(
        self, send: _Send | None = None, receive: _Receive | None = None, *, first: bool = False, last: bool = False
    ) -> Tensors:
        """The payloads that come, by name, with all posted before any is waited for; several gradients are summed.

        `BridgeError` if ``first`` or ``last`` is claimed without such a stage.
        """
        self._require_alive()
        for claimed, held, what in ((first, self.is_pp_first_stage, "first"), (last, self.is_pp_last_stage, "last")):
            if claimed and not held:
                raise BridgeError(f"is_{what}_stage=True on rank {self.rank}, which holds no {what} stage")
        # In the order of calls both sides of an exchange would send first; sends alone keep the order of modules.
        with self.lanes.batch(by_lane=send is not None and receive is not None):
            sending = [] if send is None else send()
            receiving = {} if receive is None else receive()
        received: Tensors = {}
        for name, handles in receiving.items():
            parts = [handle.result() for handle in handles]
            received[name] = added(parts) if len(parts) > 1 else parts[0]
        for handle in sending:
            handle.wait()
        return received

    @cached_property
    def _dicts(self) -> DictExchange:
        """The exchange by module; `BridgeError` on all ranks where some rank cannot take part in one."""
        self._edges.require_dicts()
        frozen = {edge for name in self.frozen_modules for edge in self.graph.edges_inside(name)}
        with_backward = {*self.graph.stage_edges} - {*self.forward_edges} - frozen
        return DictExchange(self.rank, self._ends_here(), with_backward, self.isend, self.irecv)
