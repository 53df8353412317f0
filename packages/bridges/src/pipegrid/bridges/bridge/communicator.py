"""The bridge between two modules: a tensor leaves one grid's last stage and arrives at another grid's first.

The way of a message, file by file: `BridgeCommunicator.send_forward` here; `TensorExchange.isend_forward` (tensor), the
plans for its shape; `EdgeTraffic.send` (traffic), a packed piece for each peer; `Lane.isend` (transport), the backend.
On the other side: `Lane.irecv`; `BridgeReceive` (receive), which lands when all pieces are there; `EdgeTraffic.fill`,
pieces in their places and the completion among copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
import torch.distributed as dist
from attrs import evolve

from pipegrid.bridges.bridge.payload import PayloadExchange
from pipegrid.bridges.bridge.shape_exchange import ShapeExchange
from pipegrid.bridges.bridge.structure import Declared, checked_structure
from pipegrid.bridges.bridge.tensor import TensorExchange
from pipegrid.bridges.bridge.traffic import EdgeTraffic
from pipegrid.bridges.bridge.wiring import BridgeWiring, PayloadWiring, boundary_sides, group_spec
from pipegrid.bridges.collectives import abort_groups, close_groups, own_groups
from pipegrid.bridges.errors import BridgeError, DestroyedError
from pipegrid.bridges.reshard import (
    AUTO_LEADER_BYTES,
    Choice,
    End,
    GridLike,
    Links,
    Placement,
    Strategy,
    axis_names,
    is_in,
)
from pipegrid.topology import discard_groups
from pipegrid.topology.fields import checked, shown
from pipegrid.transport.config import P2PConfig, as_config
from pipegrid.transport.control.lanes import Lanes
from pipegrid.transport.control.opening import open_lanes, resolve_device
from pipegrid.transport.edge import Direction
from pipegrid.transport.lane.lane import Lane
from pipegrid.transport.protocol import Handle, ReceiveHandle
from pipegrid.transport.streams import new_stream

Shapes = Literal["fixed", "variable"]
_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD


class BridgeCommunicator:
    """Moves activations from ``src_grid``'s last stage to ``dest_grid``'s first, and gradients back.

    Construct it on every rank of both grids, in the same order relative to other communicators. Ranks of a
    grid that are not on its boundary stage may call everything; it does nothing there and returns None.

    What each rank holds follows from its grid: ``dp`` splits the batch, ``cp`` the sequence, ``tp`` holds
    copies; ``src_placements`` and ``dest_placements`` override that and declare further dims. Source lanes are
    consecutive blocks of the batch; destination lanes take consecutive blocks of the same batch, in any ratio.

    Sizes: with ``shapes="fixed"`` the first message of the edge carries the source's shape, and later messages
    are payload only; a tensor of another shape is a ShapeError. With ``shapes="variable"`` each message has a
    header on a CPU group, so lanes, sequences and packed samples may change from microbatch to microbatch, and
    a lane may have no rows. Gradients then belong to activations in the order in which those were sent, counting
    those sent with gradients enabled: run forward-only steps under `torch.no_grad`.

    Attributes:
        is_source: whether this rank gives activations.
        is_destination: whether this rank gets activations.
        exchange: what the verbs do on a rank of the boundary.

    Args:
        src_grid: grid of the module that makes the tensor.
        dest_grid: grid of the module that consumes it.
        dim_mapping: axis of ``"b"``, ``"s"`` and ``"h"``; default ``{"s": 1, "b": 0, "h": 2}``, and for
            ``tensor_ndim=2`` ``[b*s, h]``.
        comm_dtype: dtype on the wire; what arrives has the dtype of what was sent. None is the tensor's own.
        src_module_name: for labels and messages.
        dest_module_name: for labels and messages.
        tensor_ndim: axes of the tensor.
        shape: extents of the whole tensor, over all ranks of the source; None where an extent may change.
        payload: what crosses in place of one tensor: `Axes` and `Whole` in dicts, lists and tuples. ``tensor_ndim``,
            ``dim_mapping`` and ``shape`` describe one tensor and have no effect then.
        src_placements: what each dim of the source grid does with the tensor, see `boundary_side`.
        dest_placements: the same for the destination.
        src_lanes: samples of each source lane per microbatch, where lanes are not equal.
        dest_lanes: samples of each destination lane per microbatch; by default those of
            `pipegrid.topology.lane_sizes`, where ``src_lanes`` are declared.
        strategy: see `plan_reshard`.
        leader_below: bytes below which ``"auto"`` uses a leader, where no links are given.
        links: what ``"auto"`` decides by: bandwidth, latency, and which ranks share a link.
        backward: False declares an edge without gradients (a frozen source).
        directions: those that the plan uses; lanes and groups of the other are not opened. None is all that it has.
        shapes: ``"fixed"`` or ``"variable"``, see above; None is ``"variable"`` where
            ``config.variable_seq_lengths``.
        config: of the lanes; see `pipegrid.transport.P2PConfig`.
        backend: of lanes and groups; None is the grids' backend, else the default group's for ``device``.
        device: where tensors live; None is the current GPU where the backend is NCCL, else the CPU.
        label: tells apart bridges between the same modules.
        stage_dim: the grids' pipeline dim.
        src_stage: place of the source's last stage along ``stage_dim``; None is the last.
        dest_stage: place of the destination's first stage along ``stage_dim``; None is the first.
        open: False leaves the lanes to the caller, who opens ``lane_specs`` with ``lane_config`` together with
            others, so that one batch can span them, and gives them to `attach`.

    Raises:
        BridgeError: a dim of a grid without a declaration, or a sharded axis that the tensor does not name; lanes of
            the two sides that hold different numbers of samples.
    """

    def __init__(
        self,
        src_grid: GridLike,
        dest_grid: GridLike,
        dim_mapping: Mapping[str, int] | None = None,
        comm_dtype: torch.dtype | None = None,
        src_module_name: str | None = None,
        dest_module_name: str | None = None,
        tensor_ndim: int = 3,
        *,
        shape: Sequence[int | None] | None = None,
        payload: Declared = None,
        src_placements: Mapping[str, Placement] | None = None,
        dest_placements: Mapping[str, Placement] | None = None,
        src_lanes: Sequence[int] | None = None,
        dest_lanes: Sequence[int] | None = None,
        strategy: Strategy = "direct",
        leader_below: int = AUTO_LEADER_BYTES,
        links: Links | None = None,
        backward: bool = True,
        directions: Iterable[Direction] | None = None,
        shapes: Shapes | None = None,
        config: Any = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        label: str | None = None,
        stage_dim: str = "pp",
        src_stage: int | None = None,
        dest_stage: int | None = None,
        open: bool = True,  # noqa: A002 -- reads as what it does
    ) -> None:
        choice = Choice(strategy, leader_below, links)
        structure = None if payload is None else checked_structure(payload, strategy, shape)
        shapes = checked(shapes, Shapes | None, "shapes", BridgeError)
        if comm_dtype is not None and not getattr(comm_dtype, "is_floating_point", False):
            raise BridgeError(f"comm_dtype is {shown(comm_dtype)}; it must be a floating-point torch.dtype, or None")
        self.src_grid, self.dest_grid = src_grid, dest_grid
        self.src_module_name = src_module_name or "src"
        self.dest_module_name = dest_module_name or "dest"
        self.tensor_ndim, self.comm_dtype = tensor_ndim, comm_dtype
        self.axes = axis_names(tensor_ndim, dim_mapping)
        self.strategy: Strategy = strategy
        self.backward = backward
        self.label = label or f"{self.src_module_name}>{self.dest_module_name}"
        self.src, self.dst = boundary_sides(
            (src_grid, dest_grid),
            names=(self.src_module_name, self.dest_module_name),
            placements=(src_placements, dest_placements),
            stages=(src_stage, dest_stage),
            lanes=(src_lanes, dest_lanes),
            stage_dim=stage_dim,
        )
        self.rank = dist.get_rank()
        self.is_source, self.is_destination = self.rank in self.src.coords_of, self.rank in self.dst.coords_of
        settings = as_config(config)
        self.variable = settings.variable_seq_lengths if shapes is None else shapes == "variable"
        backend = backend or getattr(src_grid, "backend", None) or getattr(dest_grid, "backend", None)
        backend, self.device = resolve_device(backend, device)
        has = tuple(Direction) if backward else (_FORWARD,)
        used = tuple(way for way in has if directions is None or way in set(directions))
        ends = self.label, self.src, self.dst
        wiring = BridgeWiring(*ends, self.axes, strategy, used, self.rank)
        if structure is not None:
            wiring = PayloadWiring.of(*ends, structure, used, self.rank)
        self._wiring, self.lane_specs = wiring, wiring.lane_specs
        self.declared = dict.fromkeys(self.lane_specs, f"{wiring.declaration}; on the wire {comm_dtype or 'as it is'}")
        self.lane_config = lane_config(settings, variable=self.variable)
        self._traffic = EdgeTraffic(
            str(self),
            self._wiring,
            backend=backend,
            device=self.device,
            config=settings,
            stream=new_stream(self.device),
        )
        self.exchange = self._new_exchange(wiring, choice, shape)
        self._groups = self._traffic.groups = own_groups(
            self._wiring.group_specs, backend=backend, deadline=settings.deadline, max_ctas=settings.max_ctas
        )
        self._owns_lanes, self._destroyed = open, False
        if open:
            self._open(backend)

    def _new_exchange(
        self, wiring: BridgeWiring, choice: Choice, shape: Sequence[int | None] | None
    ) -> TensorExchange | PayloadExchange:
        common: dict[str, Any] = {"backward": self.backward, "variable": self.variable, "comm_dtype": self.comm_dtype}
        if isinstance(wiring, PayloadWiring):
            return PayloadExchange(wiring, self._traffic, **common)
        extents = None if shape is None else tuple(shape)
        shapes = ShapeExchange(str(self), wiring, choice, self.comm_dtype, self.variable, extents)
        skips_empty = self.strategy == "auto" and not self.variable
        return TensorExchange(shapes, self._traffic, **common, skips_empty=skips_empty)

    def _open(self, backend: str) -> None:
        with ExitStack() as undo:  # after an error of the lanes the bridge has no groups either
            undo.callback(discard_groups, self._groups)
            lanes = open_lanes(
                self.lane_specs, config=self.lane_config, backend=backend, device=self.device, declared=self.declared
            )
            self.attach(lanes)
            undo.pop_all()

    def __str__(self) -> str:
        return f"bridge {self.label}"

    def attach(self, lanes: Lanes) -> None:
        """Use lanes that are open already, this rank's of ``lane_specs`` among them.

        Raises:
            BridgeError: no lanes, or one of this rank's is not among them.
        """
        self._traffic.attach(lanes)

    @property
    def lanes(self) -> Lanes:
        """The lanes."""
        if self._traffic.lanes is None:
            raise BridgeError(f"{self} has no lanes before attach()")
        return self._traffic.lanes

    def lane(self, source: int, destination: int, direction: Direction | str) -> Lane:
        """The lane of one pair of ranks; ``direction`` is a `Direction`, or its value ``"F"`` or ``"B"``."""
        return self.lanes[self._wiring.lane_spec(source, destination, Direction(direction))]

    def group(self, what: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of the bridge's own for ``what`` (``"complete/F"``, ``"reduce/B"``, ...) among ``ranks``."""
        return self._groups[group_spec(ranks, self.label, what)]

    @property
    def num_groups(self) -> int:
        """Groups of this rank beside the lanes: one per direction in which copies complete each other, or add up."""
        return len(self._groups)

    # -- who am I ---------------------------------------------------------------------------------------

    def _takes_part(self, end: End, verb: str) -> bool:
        """Whether this rank is on that side's boundary; False on the other stages of that side's grid."""
        if self._destroyed:
            raise DestroyedError(f"{self} was destroyed; make a new one")
        if self.is_source if end == "source" else self.is_destination:
            return True
        side, other = (self.src, self.dst) if end == "source" else (self.dst, self.src)
        here, there = (self.src_grid, self.dest_grid) if end == "source" else (self.dest_grid, self.src_grid)
        if is_in(here, self.rank):
            return False
        elsewhere = f"the side of {other.name!r}" if is_in(there, self.rank) else "neither"
        raise BridgeError(
            f"{self}: {verb} is for the {end} side ({side.name!r}, ranks {shown(side.ranks)}), but rank {self.rank} is "
            f"on {elsewhere}"
        )

    # -- the asynchronous verbs -------------------------------------------------------------------------

    def isend_forward(self, tensor: Any, *, samples: Sequence[int] | None = None) -> Handle | None:
        """Start sending this rank's part of an activation.

        Args:
            tensor: of ``tensor_ndim`` axes, or of the declared payload; no rows are legal. Its memory may be what
                travels, so do not change it before the handle's ``wait()`` has returned.
            samples: for packed ``[tokens, h]``: rows of each sample of this lane (whole samples, where cp cuts
                each of them). ``Packed(tensor, samples)`` says the same.

        Raises:
            BridgeError: this rank is not in the source grid; the tensor requires grad and the edge has no backward.
            ShapeError: not one tensor, wrong number of axes, or a dtype that does not survive the wire; or, with fixed
                shapes, not the shape and dtype that were agreed.
        """
        if (self._destroyed or not self.is_source) and not self._takes_part("source", "send_forward"):
            return None
        return self.exchange.isend_forward(tensor, samples=samples)

    def irecv_forward(self, shape: Sequence[int] | None = None) -> ReceiveHandle | None:
        """Start receiving the next activation; ``result()`` of what is returned is the tensor.

        With ``shape``, anything else that arrives is a ShapeError.
        """
        if not self._takes_part("destination", "recv_forward"):
            return None
        return self.exchange.irecv_forward(shape)

    def isend_backward(self, grad: Any) -> Handle | None:
        """Start sending the gradient of the oldest activation that has none yet; None stands for zeros.

        Of a payload, a tree of gradients, with None for leaves without.

        Raises:
            BridgeError: this rank is not in the destination grid; the edge has no backward; no activation is waiting
                for a gradient.
            ShapeError: not the shape of that activation.
        """
        if not self._takes_part("destination", "send_backward"):
            return None
        self._require_backward("send_backward")
        return self.exchange.isend_backward(grad)

    def irecv_backward(self, shape: Sequence[int] | None = None) -> ReceiveHandle | None:
        """Start receiving the gradient of the oldest activation that has none yet.

        Raises:
            BridgeError: as `isend_backward`.
            BridgeError: no activation was sent.
        """
        if not self._takes_part("source", "recv_backward"):
            return None
        self._require_backward("recv_backward")
        return self.exchange.irecv_backward(shape)

    def check(self) -> None:
        """Raise if a completion that was waited for on a device has failed since: a wait there only orders streams.

        Raises:
            CompletionError: it has.
        """
        self._traffic.waits.check()

    def abort(self, reason: str) -> None:
        """End lanes and completions at once, and tell the other side why."""
        abort_groups(self.end(reason), reason, beside=lambda: self.lanes.abort(reason) if self._owns_lanes else None)

    def end(self, reason: str) -> Iterable[dist.ProcessGroup]:
        """Fail completions with ``reason``, those under way and later ones; returns their groups, to abort."""
        self._traffic.waits.end(reason)
        return self._groups.values()

    @property
    def failed_groups(self) -> Iterable[dist.ProcessGroup]:
        """The groups of completions, where one may be stuck or a lane has failed: to abort, not to destroy."""
        return self._groups.values() if self._has_failed() else ()

    def _has_failed(self) -> bool:
        return self._traffic.waits.stuck or (self._traffic.lanes is not None and self._traffic.lanes.failed)

    def destroy(self) -> None:
        """Close the lanes and destroy the groups of this bridge. Idempotent."""
        if not self._destroyed:
            self._destroyed = True
            self._traffic.waits.end("destroyed")
            beside = self.lanes.close if self._owns_lanes else (lambda: None)
            waits = self._traffic.waits
            close_groups(self._groups, failed=self._has_failed(), seconds=waits.deadline, beside=beside)

    def batch(self) -> AbstractContextManager[None]:
        """Issue the sends and receives of the block together, at its end."""
        return self.lanes.batch()

    def renew_shapes(self) -> None:
        """Let the next message agree on shapes anew; all ranks of the bridge call it between the same two microbatches.

        Raises:
            P2PUsageError: shapes vary anyway, or receives are under way; nothing was renewed then.
        """
        renew_lanes(self.lanes.values())
        self.forget_shapes()

    def forget_shapes(self) -> None:
        """Forget what was agreed; the lanes are renewed by the caller."""
        self.exchange.forget()

    # -- the blocking verbs -----------------------------------------------------------------------------

    def send_forward(self, tensor: Any, *, samples: Sequence[int] | None = None) -> None:
        """Send an activation from the source side, and wait until it is on its way."""
        handle = self.isend_forward(tensor, samples=samples)
        if handle is not None:
            handle.wait()

    def recv_forward(self) -> Any:
        """The next activation, on the destination side; it requires grad unless the edge has no backward."""
        handle = self.irecv_forward()
        return None if handle is None else handle.result()

    def send_backward(self, grad: Any) -> None:
        """Send the gradient of the oldest activation that has none yet, from the destination side."""
        handle = self.isend_backward(grad)
        if handle is not None:
            handle.wait()

    def recv_backward(self) -> Any:
        """The gradient of the oldest activation that has none yet, on the source side, in that one's shape."""
        handle = self.irecv_backward()
        return None if handle is None else handle.result()

    def send_forward_recv_backward(self, tensor: Any, *, samples: Sequence[int] | None = None) -> Any:
        """Send an activation and receive a gradient, which may be of an earlier one; both are posted before any wait.

        Raises:
            BridgeError: the edge has no backward; nothing is sent then.
        """
        if self.is_source:
            self._require_backward("send_forward_recv_backward")
        with self.lanes.batch(by_lane=True):  # in the order of calls both sides would send first
            sending = self.isend_forward(tensor, samples=samples)
            receiving = self.irecv_backward()
        return _exchanged(sending, receiving)

    def send_backward_recv_forward(self, grad: Any) -> Any:
        """Send a gradient and receive an activation; both are posted before any wait."""
        with self.lanes.batch(by_lane=True):
            sending = self.isend_backward(grad)
            receiving = self.irecv_forward()
        return _exchanged(sending, receiving)

    # -- underneath -------------------------------------------------------------------------------------

    @property
    def carries_gradients(self) -> bool:
        """Whether there are lanes for gradients: the edge has a backward, and its plan uses it."""
        return self.backward and _BACKWARD in self._wiring.directions

    def _require_backward(self, verb: str) -> None:
        if not self.carries_gradients:
            why = "which its plan does not use" if self.backward else "being declared without backward"
            raise BridgeError(f"{self} has no lanes for gradients, {why}: no {verb} on it")


def _exchanged(sending: Handle | None, receiving: ReceiveHandle | None) -> Any:
    """What is received, once all is sent; None on a rank that does neither."""
    if sending is None or receiving is None:
        return None
    received = receiving.result()
    sending.wait()
    return received


def renew_lanes(lanes: Iterable[Lane]) -> None:
    """Let the next message of every lane agree on shapes anew: all lanes, or, after an error, none."""
    lanes = tuple(lanes)
    for lane in lanes:
        lane.require_renewable()
    for lane in lanes:
        lane.renew()


def lane_config(settings: P2PConfig, *, variable: bool) -> P2PConfig:
    """The settings of lanes that carry bridges: any dtype, and shapes that vary or are agreed with a header."""
    return evolve(
        settings, pipeline_dtype=None, variable_seq_lengths=variable, shapes="header" if variable else "agreed"
    )
