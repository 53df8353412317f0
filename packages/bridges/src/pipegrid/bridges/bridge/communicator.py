"""The bridge between two modules: a tensor leaves one grid's last stage and arrives at another grid's first.

The path of a message, file by file: `BridgeCommunicator.send_forward` here; `Exchange.isend_forward` (exchange), the
plans for its shape; `EdgeTraffic.send` (traffic), a packed piece for each peer; `Lane.isend` (transport), the backend.
On the other side: `Lane.irecv`; `BridgeReceive` (receive), which is filled when all pieces are there;
`EdgeTraffic.fill`, pieces in their places and the completion among copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from attrs import evolve

from pipegrid.bridges.bridge.ends import BridgeEnds
from pipegrid.bridges.bridge.exchange import Exchange
from pipegrid.bridges.bridge.leaves import leaves_of
from pipegrid.bridges.bridge.options import EdgeArguments, EdgeOptions
from pipegrid.bridges.bridge.traffic import EdgeTraffic
from pipegrid.bridges.bridge.wiring import group_spec
from pipegrid.bridges.collectives import abort_groups, own_groups
from pipegrid.core import Direction, checked
from pipegrid.core.lanes import LaneSharing
from pipegrid.reshard import BridgeError, GridLike
from pipegrid.topology import discard_groups
from pipegrid.transport import Handle, Lane, Lanes, P2PUsageError, ReceiveHandle
from pipegrid.transport.config import P2PConfig, ShapeMode, as_config
from pipegrid.transport.control.opening import open_lanes, resolve_device
from pipegrid.transport.streams import new_stream

Shapes = Literal["fixed", "variable"]
_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD


class BridgeCommunicator(BridgeEnds):
    """Moves activations from ``src_grid``'s last stage to ``dest_grid``'s first, and gradients back.

    Construct it on every rank of both grids, in the same order relative to other communicators. Ranks of a
    grid that are not on its boundary stage may call everything; it does nothing there and returns None.

    What each rank holds follows from its grid: ``dp`` splits the batch, ``cp`` the sequence, ``tp`` holds
    copies; ``src_placements`` and ``dest_placements`` override that and declare further dims. Source replicas are
    consecutive blocks of the batch; destination replicas take consecutive blocks of the same batch, in any ratio.

    Sizes: with ``shapes="fixed"`` the first message of the edge carries the source's shape, and later messages
    are payload only; a tensor of another shape is a ShapeError. With ``shapes="variable"`` each message has a
    header on a CPU group, so lanes, sequences and packed samples may change from microbatch to microbatch, and
    a replica may have no rows. Gradients then belong to activations in the order in which those were sent, counting
    those sent with gradients enabled: run forward-only steps under `torch.no_grad`.

    Attributes (beside those of `BridgeEnds`):
        exchange: the implementation of the verbs on a rank of the boundary.

    Args:
        src_grid: grid of the module that makes the tensor.
        dest_grid: grid of the module that consumes it.
        dim_mapping: axis of ``"b"``, ``"s"`` and ``"h"``; default ``{"s": 1, "b": 0, "h": 2}``, and for
            ``tensor_ndim=2`` ``[b*s, h]``.
        comm_dtype: dtype on the wire; what arrives has the dtype of what was sent. None is the tensor's own.
        src_module_name: for labels and messages.
        dest_module_name: for labels and messages.
        tensor_ndim: axes of the tensor.
        options: of the edge; its ``dim_mapping``, ``comm_dtype`` and ``tensor_ndim`` take precedence where they are
            set. Each of the other `EdgeOptions` may be given by its name in place of them.
        directions: those that the plan uses; lanes and groups of the other are not opened. None is all that it has.
        shapes: ``"fixed"`` or ``"variable"``, see above; None is ``"variable"`` where ``config.variable_seq_lengths``.
        config: of the lanes; see `pipegrid.transport.P2PConfig`.
        backend: of lanes and groups; None is the grids' backend, else the default group's for ``device``.
        device: of the tensors; None is the current GPU where the backend is NCCL, else the CPU.
        label: tells apart bridges between the same modules.
        stage_dim: the grids' pipeline dim.
        src_stage: place of the source's last stage along ``stage_dim``; None is the last.
        dest_stage: place of the destination's first stage along ``stage_dim``; None is the first.
        replicas: of the source and of the destination (``dp``): the bridge leads from the one to the other alone. None
            is from all to all.
        open: False leaves the lanes to the caller, who opens ``lane_specs`` with ``lane_config`` together with
            others, so that one batch can span them, and gives them to `attach`.

    Raises:
        BridgeError: a dim of a grid without a declaration, or a sharded axis that the tensor does not name; replicas of
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
        options: EdgeOptions | None = None,
        directions: Iterable[Direction] | None = None,
        shapes: Shapes | None = None,
        config: Any = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        label: str | None = None,
        stage_dim: str = "pp",
        src_stage: int | None = None,
        dest_stage: int | None = None,
        replicas: tuple[int, int] | None = None,
        open: bool = True,  # noqa: A002 -- reads as what it does
        **edge: Unpack[EdgeArguments],
    ) -> None:
        options = evolve(options or EdgeOptions(), **edge)
        shapes = checked(shapes, Shapes | None, "shapes", BridgeError)
        super().__init__(
            dist.get_rank(),
            (src_grid, dest_grid),
            (src_module_name, dest_module_name),
            evolve(
                options, dim_mapping=options.dim_mapping or dim_mapping, comm_dtype=options.comm_dtype or comm_dtype
            ),
            tensor_ndim=options.tensor_ndim or tensor_ndim,
            label=label,
            directions=directions,
            stage_dim=stage_dim,
            stages=(src_stage, dest_stage),
            replicas=replicas,
        )
        settings = as_config(config)
        self.variable = settings.variable_seq_lengths if shapes is None else shapes == "variable"
        backend = backend or getattr(src_grid, "backend", None) or getattr(dest_grid, "backend", None)
        backend, self.device = resolve_device(backend, device, staged=settings.staged)
        self.lane_config = lane_config(settings, variable=self.variable)
        name, wiring, stream = str(self), self._wiring, new_stream(self.device)
        self._traffic = EdgeTraffic(name, wiring, backend=backend, device=self.device, config=settings, stream=stream)
        leaves = leaves_of(name, self.options, wiring, device=self.device, variable=self.variable)
        skips_empty = self.strategy == "auto" and not self.variable
        self.exchange = Exchange(self._traffic, leaves, variable=self.variable, skips_empty=skips_empty)
        self._traffic.groups = own_groups(
            wiring.group_specs, backend=backend, deadline=settings.deadline, max_ctas=settings.max_ctas
        )
        self._owns_lanes, self._destroyed = open, False
        if open:
            self._open(backend)

    def _open(self, backend: str) -> None:
        with ExitStack() as undo:  # after an error of the lanes the bridge has no groups either
            undo.callback(discard_groups, self._traffic.groups)
            lanes = open_lanes(
                self.lane_specs, config=self.lane_config, backend=backend, device=self.device, declared=self.declared
            )
            self.attach(lanes)
            undo.pop_all()

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
        return self._traffic.groups[group_spec(ranks, self.label, what)]

    def verb(self, direction: Direction, *, sends: bool) -> Callable[[Any], Any] | None:
        """The function that starts a send (or a receive) in ``direction``; None where this rank has none."""
        at_end = self.is_source if (direction is _FORWARD) is sends else self.is_destination
        if not at_end or direction not in self._wiring.directions:
            return None
        exchange = self.exchange
        if direction is _FORWARD:
            return exchange.isend_forward if sends else exchange.irecv_forward
        return exchange.isend_backward if sends else exchange.irecv_backward

    def isend_forward(self, tensor: Any, *, samples: Sequence[int] | None = None) -> Handle | None:
        """Start sending this rank's part of an activation.

        Args:
            tensor: of ``tensor_ndim`` axes, or of the declared payload; no rows are legal. Its memory may be what
                travels, so do not change it before the handle's ``wait()`` has returned.
            samples: for packed ``[tokens, h]``: rows of each sample of this replica (whole samples, where cp cuts
                each of them). ``Packed(tensor, samples)`` says the same, and so does the attribute
                ``_mimo_bridge_split_sizes`` of a tensor, which Megatron's models set.

        Raises:
            BridgeError: this rank is not in the source grid, or the tensor requires grad and the edge has no backward.
            ShapeError: not one tensor, wrong number of axes, or a dtype that does not survive the wire; or, with
                fixed shapes, not the shape and dtype that were agreed.
        """
        if (self._destroyed or not self.is_source) and not self.takes_part(_FORWARD, sends=True):
            return None
        return self.exchange.isend_forward(tensor, samples=samples)

    def irecv_forward(self, shape: Sequence[int] | None = None) -> ReceiveHandle | None:
        """Start receiving the next activation; ``result()`` of what is returned is the tensor.

        With ``shape``, anything else that arrives is a ShapeError.
        """
        if (self._destroyed or not self.is_destination) and not self.takes_part(_FORWARD, sends=False):
            return None
        return self.exchange.irecv_forward(shape)

    def isend_backward(self, grad: Any) -> Handle | None:
        """Start sending the gradient of the oldest activation that has none yet; None means zeros.

        Of a payload, a tree of gradients, with None for leaves without.

        Raises:
            BridgeError: this rank is not in the destination grid, the edge has no backward, or no activation is waiting
                for a gradient.
            ShapeError: not the shape of that activation.
        """
        if not self.takes_part(_BACKWARD, sends=True):
            return None
        return self.exchange.isend_backward(grad)

    def irecv_backward(self, shape: Sequence[int] | None = None) -> ReceiveHandle | None:
        """Start receiving the gradient of the oldest activation that has none yet.

        Raises:
            BridgeError: this rank is not in the source grid, the edge has no backward, or no activation was sent.
        """
        if not self.takes_part(_BACKWARD, sends=False):
            return None
        return self.exchange.irecv_backward(shape)

    def check(self) -> None:
        """Raise if a completion that was waited for on a device has failed since: a wait there only orders streams.

        Raises:
            CollectiveFailedError: it has.
        """
        self._traffic.waits.check()

    def abort(self, reason: str) -> None:
        """End lanes and completions at once, and tell the other side why."""
        groups = self._traffic.end(reason)
        abort_groups(groups, reason, beside=lambda: self.lanes.abort(reason) if self._owns_lanes else None)

    def destroy(self) -> None:
        """Close the lanes and destroy the groups of this bridge. Idempotent."""
        if not self._destroyed:
            self._destroyed = True
            self._traffic.close_groups(beside=self.lanes.close if self._owns_lanes else (lambda: None))

    def batch(self) -> AbstractContextManager[None]:
        """Issue the sends and receives of the block together, at its end."""
        return self.lanes.batch()

    def renew_shapes(self) -> None:
        """Let the next message agree on shapes anew; all ranks of the bridge call it between the same two microbatches.

        Raises:
            P2PUsageError: shapes vary anyway, or receives are under way; nothing was renewed then.
        """
        renew_lanes(self.lanes.values())
        self.exchange.forget()

    def send_forward(self, tensor: Any, *, samples: Sequence[int] | None = None) -> None:
        """Send an activation from the source side, and wait for the send.

        Ranks on both sides post `isend_forward` and receive before they wait: over gloo a send ends where it is taken.
        """
        _waited(self.isend_forward(tensor, samples=samples))

    def recv_forward(self) -> Any:
        """The next activation, on the destination side; it requires grad unless the edge has no backward."""
        return _result(self.irecv_forward())

    def send_backward(self, grad: Any) -> None:
        """Send the gradient of the oldest activation that has none yet, from the destination side."""
        _waited(self.isend_backward(grad))

    def recv_backward(self) -> Any:
        """The gradient of the oldest activation that has none yet, on the source side, in that one's shape."""
        return _result(self.irecv_backward())

    def send_forward_recv_backward(self, tensor: Any, *, samples: Sequence[int] | None = None) -> Any:
        """Send an activation and receive a gradient, which may be of an earlier one; both are posted before any wait.

        Raises:
            BridgeError: the edge has no backward; nothing is sent then.
        """
        if self.is_source and not self.carries_gradients:
            raise self._no_backward("send_forward_recv_backward")
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


def _waited(sending: Handle | None) -> None:
    if sending is not None:
        sending.wait()


def _result(receiving: ReceiveHandle | None) -> Any:
    return None if receiving is None else receiving.result()


def _exchanged(sending: Handle | None, receiving: ReceiveHandle | None) -> Any:
    """The received tensor, after the send has ended; None on a rank without both."""
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
    """The settings of lanes that carry bridges: any dtype, and shapes that vary or are agreed with a header.

    `P2PUsageError`: communicators of a plan. A bridge has several lanes for one of the plan's, and may start a receive
    after its batch, when the sizes have arrived; the proof knows neither.
    """
    if isinstance(settings.communicators, LaneSharing):
        raise P2PUsageError(
            "communicators has those of a plan, which are for a P2PCommunicator; lanes of bridges, modules and "
            "variable-TP stages are 'separate' or 'shared'"
        )
    varying: ShapeMode = "learned" if settings.shape_mode == "learned" else "header"
    shapes = varying if variable else "agreed"
    return evolve(settings, pipeline_dtype=None, variable_seq_lengths=variable, shapes=shapes)
