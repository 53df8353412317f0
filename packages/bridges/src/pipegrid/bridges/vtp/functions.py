"""The functions that variable-TP training scripts know, and the verbs of a schedule, over the edges of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

import torch
import torch.distributed as dist

from pipegrid.bridges.bridge.edge_communicator import EdgeCommunicator
from pipegrid.bridges.bridge.exchange import Exchange
from pipegrid.bridges.bridge.receive import BridgeReceive, BridgeSend
from pipegrid.bridges.vtp.topology import VTPBoundary, VTPTopology
from pipegrid.core.edge import Direction, Edge
from pipegrid.reshard.errors import BridgeError
from pipegrid.transport import Handle, P2PUsageError, is_single_shape
from pipegrid.transport.config import P2PConfig, as_config
from pipegrid.transport.control.blocking import timed

_F, _B = Direction.FORWARD, Direction.BACKWARD
ARRIVES = {_F: "recv_prev", _B: "recv_next"}
Requests = dict[str, BridgeReceive]
_Sides: TypeAlias = Literal["next", "previous"]
Ranks: TypeAlias = int | Sequence[int] | None


class Named(TypedDict, total=False):
    """The neighbours of one call, where they are not the topology's: arguments of all `VTPFunctions`."""

    group: Any
    next_rank: Ranks
    prev_rank: Ranks


class VTPFunctions(EdgeCommunicator):
    """The functions of a `VTPCommunicator` that name the neighbours of its stage in place of edges.

    A caller that names neighbours (``next_rank``, ``prev_rank``; or by ``group``, the ones that are next to this rank
    in its order, cyclic) chooses the boundary across which lies the stage that holds them. All ranks of both stages
    exchange their slices all the same, whichever of them are named. Another rank is a `BridgeError`.

    Attributes:
        topology: the ranks of each stage.
        stage: this rank's.
        _boundaries: those with this rank on one of their sides.
        _arriving: the exchanges in which this rank receives, by edge and direction.
    """

    topology: VTPTopology
    stage: int
    _boundaries: tuple[VTPBoundary, ...]
    _arriving: dict[tuple[Edge, Direction], Exchange]

    def vtp_send_forward(self, tensor: torch.Tensor, **named: Unpack[Named]) -> list[Handle] | None:
        """Start sending this rank's share of an activation to the next stage; in a ring also from the last to stage 0.

        ``group``, ``next_rank`` and ``prev_rank`` say who the neighbours are: one value or a list.

        Returns:
            A handle per receiving rank; None on a rank with nothing to send (the last stage without a ring).
        """
        return self._start_send(tensor, _F, self._beside("next", **named))

    def vtp_send_backward(self, tensor: torch.Tensor, **named: Unpack[Named]) -> list[Handle] | None:
        """Start sending this rank's share of a gradient to the previous stage. As `vtp_send_forward`."""
        return self._start_send(tensor, _B, self._beside("previous", **named))

    def vtp_recv_forward(
        self, tensor_shape: Sequence[int], config: Any = None, async_op: bool = False, **named: Unpack[Named]
    ) -> Any:
        """Receive an activation of ``tensor_shape`` (this rank's part) in ``pipeline_dtype`` from the previous stage.

        Returns:
            The tensor; with ``async_op`` ``(tensor, {"recv_prev": work})``, where there is data in the tensor once
            ``work.wait()`` has returned.

        Raises:
            P2PUsageError: no ``pipeline_dtype``, no ``tensor_shape``.
            BridgeError: no stage sends to this one: stage 0 without a ring.
        """
        receive = self._start_receive(tensor_shape, self._settings(config), _F, self._beside("previous", **named))
        return (receive.value, {ARRIVES[_F]: receive}) if async_op else receive.result()

    def vtp_recv_backward(
        self, tensor_shape: Sequence[int], config: Any = None, async_op: bool = False, **named: Unpack[Named]
    ) -> Any:
        """Receive a gradient from the next stage. As `vtp_recv_forward`; the work is under ``"recv_next"``."""
        receive = self._start_receive(tensor_shape, self._settings(config), _B, self._beside("next", **named))
        return (receive.value, {ARRIVES[_B]: receive}) if async_op else receive.result()

    def _beside(self, side: _Sides, group: Any = None, next_rank: Ranks = None, prev_rank: Ranks = None) -> Edge | None:
        """The edge to the stage on that side; None at the end of a chain."""
        if group is None and next_rank is None and prev_rank is None:
            return self._across(side, ())
        named: dict[_Sides, list[int]] = {"next": _as_list(next_rank), "previous": _as_list(prev_rank)}
        for one, ranks in named.items():  # also the one that this call does not use
            self._across(one, ranks)
        found = []
        for ranks in map(dist.get_process_group_ranks, _as_list(group)):
            if self.rank not in ranks:
                raise BridgeError(f"rank {self.rank} is not in the group of ranks {ranks}")
            found.append(ranks[(ranks.index(self.rank) + (1 if side == "next" else -1)) % len(ranks)])
        return self._across(side, named[side] or found)

    def _across(self, side: _Sides, named: Sequence[int]) -> Edge | None:
        ends = [(b.edge, b.source.ranks, b.destination.ranks) for b in self._boundaries]
        if side == "previous":
            ends = [(edge, there, here) for edge, here, there in ends]
        across = [(edge, there) for edge, here, there in ends if self.rank in here]
        found = [edge for edge, there in across if set(named) <= set(there)]
        if named and not found:
            where = f"ranks {list(across[0][1])}" if across else "nowhere, at the end of a chain"
            raise BridgeError(f"rank {self.rank} names {[*named]} as its {side} ranks, but its lanes lead to {where}")
        return found[0] if found else None

    def _start_send(self, tensor: torch.Tensor, direction: Direction, edge: Edge | None) -> list[Handle] | None:
        self._require_alive()
        if edge is None:
            return None
        sending = self.isend(tensor, edge=edge, direction=direction)
        return list(sending.handles) if isinstance(sending, BridgeSend) else [sending]

    def _start_receive(self, shape: Any, settings: P2PConfig, direction: Direction, edge: Edge | None) -> BridgeReceive:
        """Start a receive into a tensor that is there at once: `BridgeReceive.value`."""
        name, dtype = ARRIVES[direction], settings.pipeline_dtype
        if dtype is None:
            subject = "pipeline_dtype" if direction is _F else "dtype"
            raise P2PUsageError(f"{subject} must be provided if {name} is True: set pipeline_dtype in the config")
        wanted = self._shape(shape, name, required=True)
        way = self._there(edge, name), direction
        if self._closed or wanted is None or way not in self._arriving:
            raise self._no_way(*way, sends=False)
        wants_grad = dtype.is_floating_point or dtype.is_complex
        into = torch.empty(wanted, dtype=dtype, device=self.device, requires_grad=wants_grad)
        return self._arriving[way].irecv_into(into)

    def _shape(self, shape: Any, name: str, *, required: bool = False) -> tuple[int, ...] | None:
        """The shape that the caller of a receive expects; None is any."""
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

    def _there(self, edge: Edge | None, what: str) -> Edge:
        if edge is None:
            raise BridgeError(f"{what} on stage {self.stage}: there is no stage on that side without ring=True")
        return edge

    def _settings(self, config: Any) -> P2PConfig:
        """The settings of one call: its own config's, where it gives one."""
        if config is None or config is self.config:
            return self.config
        settings, own = as_config(config), self.config.pipeline_dtype
        if None not in (own, settings.pipeline_dtype) and settings.pipeline_dtype != own:
            raise P2PUsageError(f"this call's pipeline_dtype is {settings.pipeline_dtype}, but the lanes have {own}")
        return settings

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
        return self._receive_with_reqs(tensor_shape, config, _F, self._beside("previous", **named), wait_on_reqs)

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
        return self._receive_with_reqs(tensor_shape, config, _B, self._beside("next", **named), wait_on_reqs)

    def _receive_with_reqs(
        self, shape: Any, config: Any, direction: Direction, edge: Edge | None, wait_on_reqs: bool
    ) -> tuple[torch.Tensor | None, Requests | None]:
        settings = self._settings(config)
        if settings.batch_p2p_comm and not wait_on_reqs:
            raise P2PUsageError("wait_on_reqs=False needs batch_p2p_comm=False: a batch is waited for as a whole")
        with timed(settings.timers, f"{direction.name.lower()}-recv"):
            receive = self._start_receive(shape, settings, direction, edge)
            if wait_on_reqs:
                return receive.result(), None
        return receive.value, {ARRIVES[direction]: receive}

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
        if not is_last_stage and self.topology.sends_forward(self.stage, is_end_stage=is_end_stage):
            self._send(output_tensor, config, _F, self._beside("next", **named))

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
        if not is_first_stage and self.topology.receives_forward(self.stage, is_end_stage=is_end_stage):
            self._send(input_tensor_grad, config, _B, self._beside("previous", **named))

    def _send(self, tensor: torch.Tensor, config: Any, direction: Direction, edge: Edge | None) -> None:
        there = self._there(edge, f"send_{direction.name.lower()}")
        with timed(self._settings(config).timers, f"{direction.name.lower()}-send"):
            self.isend(tensor, edge=there, direction=direction).wait()

    def recv_forward(self, tensor_shapes: Any = None, is_first_stage: bool = False) -> torch.Tensor | None:
        """The next activation; None on the first stage. Without a shape, one of any shape."""
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
        """Receive a tensor, and meanwhile send that of ``sending``, if any, to the same stage."""
        leaving = _B if arriving is _F else _F
        edge = self._there(self._beside("previous" if arriving is _F else "next"), ARRIVES[arriving])
        timer = f"{arriving.name.lower()}-recv"
        with timed(self.config.timers, f"{leaving.name.lower()}-send-{timer}" if sending else timer):
            # A batch of both, by lane: in the order of calls both sides would receive first.
            with self.lanes.batch(by_lane=True) if sending else nullcontext():
                receiving = self.irecv(edge=edge, direction=arriving, shapes=shapes)
                sent = [self.isend(tensor, edge=edge, direction=leaving) for tensor in sending]
            received: torch.Tensor = receiving.result()
            for handle in sent:
                handle.wait()
        return received


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
