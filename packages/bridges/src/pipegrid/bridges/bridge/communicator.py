"""The bridge between two modules: a tensor leaves one grid's last stage and arrives at another grid's first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
import torch.distributed as dist
from attrs import evolve, frozen

from pipegrid.bridges.bridge.payload import PayloadExchange, PayloadWiring
from pipegrid.bridges.bridge.receive import BridgeReceive, BridgeSend, Landed, PostedReceives
from pipegrid.bridges.bridge.shape_exchange import Announcement, Passage, PendingGradients, ShapeExchange
from pipegrid.bridges.bridge.structure import Declared, Packed, checked_structure
from pipegrid.bridges.bridge.traffic import EdgeTraffic
from pipegrid.bridges.bridge.wiring import BridgeRole, BridgeWiring, group_spec, with_lanes
from pipegrid.bridges.checks import as_integers
from pipegrid.bridges.collectives import abort_groups, own_groups
from pipegrid.bridges.errors import (
    BridgeError,
    CompletionError,
    DestroyedError,
    NoBackwardError,
    PendingGradientError,
    ShapeError,
    StageError,
)
from pipegrid.bridges.reshard import (
    AUTO_LEADER_BYTES,
    Choice,
    GridLike,
    Links,
    Placement,
    RankPart,
    Strategy,
    axis_names,
    boundary_side,
)
from pipegrid.bridges.steps import broadcast_text
from pipegrid.topology import destroy_groups
from pipegrid.topology.fields import shown
from pipegrid.transport.config import P2PConfig, as_config
from pipegrid.transport.edge import Direction
from pipegrid.transport.lane import Lane
from pipegrid.transport.lanes import Lanes
from pipegrid.transport.opening import open_lanes, resolve_device
from pipegrid.transport.protocol import Handle, ReceiveHandle
from pipegrid.transport.streams import new_stream

Shapes = Literal["fixed", "variable"]
_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD
_DIRECTIONS = (*Direction, *(direction.value for direction in Direction))


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
        UndeclaredDimError: a dim of a grid without a declaration, or a sharded axis that the tensor does not name.
        LaneTotalsError: lanes of the two sides that hold different numbers of samples.
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
        if shapes not in (None, "fixed", "variable"):
            raise BridgeError(f"shapes is {shown(shapes)}; use 'fixed' or 'variable'")
        if comm_dtype is not None and not (isinstance(comm_dtype, torch.dtype) and comm_dtype.is_floating_point):
            raise BridgeError(
                f"comm_dtype is {shown(comm_dtype)}; what travels is rounded to it, so give a floating-point "
                "torch.dtype such as torch.bfloat16, or None for the tensor's own"
            )
        self.src_grid, self.dest_grid = src_grid, dest_grid
        self.src_module_name = src_module_name or "src"
        self.dest_module_name = dest_module_name or "dest"
        self.tensor_ndim, self.comm_dtype = tensor_ndim, comm_dtype
        self.axes = axis_names(tensor_ndim, dim_mapping)
        self.strategy: Strategy = strategy
        self.backward = backward
        self.label = label or f"{self.src_module_name}>{self.dest_module_name}"
        self.src = boundary_side(
            src_grid,
            "source",
            placements=src_placements,
            name=self.src_module_name,
            stage_dim=stage_dim,
            stage=src_stage,
            lane_weights=src_lanes,
        )
        self.dst = boundary_side(
            dest_grid,
            "destination",
            placements=dest_placements,
            name=self.dest_module_name,
            stage_dim=stage_dim,
            stage=dest_stage,
            lane_weights=dest_lanes,
        )
        self.dst = with_lanes(self.src, self.dst, str(self))
        self.rank = dist.get_rank()
        self._role = BridgeRole(str(self), self.src, self.dst, src_grid, dest_grid, self.rank)
        self.is_source, self.is_destination = self._role.is_source, self._role.is_destination
        settings = as_config(config)
        self.variable = settings.variable_seq_lengths if shapes is None else shapes == "variable"
        backend = backend or getattr(src_grid, "backend", None) or getattr(dest_grid, "backend", None)
        backend, self.device = resolve_device(backend, device)
        has = tuple(Direction) if backward else (_FORWARD,)
        used = tuple(way for way in has if directions is None or way in set(directions))
        ends = self.label, self.src, self.dst
        self._wiring = (
            BridgeWiring(*ends, self.axes, strategy, used, self.rank)
            if structure is None
            else PayloadWiring.of(*ends, structure, used, self.rank)
        )
        self.lane_specs = self._wiring.lane_specs
        self.declared = dict.fromkeys(self.lane_specs, str(structure)) if structure is not None else {}
        self.lane_config = lane_config(settings, variable=self.variable)
        self._shapes = ShapeExchange(
            str(self),
            self.src,
            self.dst,
            self.axes,
            choice,
            self.rank,
            comm_dtype,
            self.variable,
            None if shape is None else tuple(shape),
        )
        self._traffic = EdgeTraffic(
            str(self),
            self._wiring,
            backend=backend,
            device=self.device,
            config=settings,
            stream=new_stream(self.device),
        )
        self._payload = (
            PayloadExchange(
                structure,
                self._wiring,
                self._traffic,
                backward=backward,
                variable=self.variable,
                comm_dtype=comm_dtype,
            )
            if structure is not None and isinstance(self._wiring, PayloadWiring)
            else None
        )
        self._groups = self._traffic.groups = own_groups(
            self._wiring.group_specs, backend=backend, deadline=settings.deadline
        )
        self._owns_lanes = open
        if open:
            try:
                lanes = open_lanes(
                    self.lane_specs,
                    config=self.lane_config,
                    backend=backend,
                    device=self.device,
                    declared=self.declared,
                )
            except BaseException:
                destroy_groups(self._groups)
                raise
            self.attach(lanes)
        self._announced: Announcement | None = None
        self._agreed: Passage | None = None
        self._steady: _Steady | None = None
        self._sent: PendingGradients[Passage] = PendingGradients(self.variable)
        self._received: PendingGradients[_Incoming | Passage] = PendingGradients(self.variable)
        self._destroyed = False

    def __str__(self) -> str:
        return f"bridge {self.label}"

    def attach(self, lanes: Lanes) -> None:
        """Use these lanes, which hold this rank's of ``lane_specs``: what `open_lanes` returns, or what acts like it.

        Raises:
            BridgeError: no lanes, or one of this rank's is not among them.
        """
        self._traffic.attach(lanes)

    @property
    def lanes(self) -> Lanes:
        """The lanes."""
        if self._traffic.lanes is None:
            raise BridgeError(f"{self} was made with open=False and has no lanes yet; call attach()")
        return self._traffic.lanes

    def lane(self, source: int, destination: int, direction: Direction | str) -> Lane:
        """The lane of one pair of ranks; ``direction`` is a `Direction`, or its value ``"F"`` or ``"B"``."""
        if direction not in _DIRECTIONS:
            raise StageError(f"direction is {shown(direction)}; give a Direction, or 'F' or 'B'")
        spec = self._wiring.lane_spec(source, destination, Direction(direction))
        if spec not in self.lanes:
            raise StageError(
                f"{self} has no lane {spec} on rank {self.rank}; it has {', '.join(map(str, self.lane_specs))}"
            )
        return self.lanes[spec]

    def group(self, what: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of the bridge's own for ``what`` (``"complete/F"``, ``"reduce/B"``, ...) among ``ranks``."""
        spec = group_spec(ranks, self.label, what)
        if spec not in self._groups:
            raise StageError(f"{self} has no group {spec} on rank {self.rank}; it has {list(map(str, self._groups))}")
        return self._groups[spec]

    @property
    def num_groups(self) -> int:
        """Groups of this rank beside the lanes: one per direction in which copies complete each other, or add up."""
        return len(self._groups)

    # -- who am I ---------------------------------------------------------------------------------------

    def _takes_part(self, side: Literal["source", "destination"], verb: str) -> bool:
        """Whether this rank is on that side's boundary; False on the other stages of that side's grid."""
        if self._destroyed:
            raise DestroyedError(f"{self} was destroyed; make a new one")
        return self._role.takes_part(side, verb)

    # -- the asynchronous verbs -------------------------------------------------------------------------

    def isend_forward(self, tensor: Any, *, samples: Sequence[int] | None = None) -> Handle | None:
        """Start sending this rank's part of an activation.

        Args:
            tensor: of ``tensor_ndim`` axes, or of the declared payload; no rows are legal. Its memory may be what
                travels, so do not change it before the handle's ``wait()`` has returned.
            samples: for packed ``[tokens, h]``: rows of each sample of this lane (whole samples, where cp cuts
                each of them). ``Packed(tensor, samples)`` says the same.

        Raises:
            WrongSideError: this rank is not in the source grid.
            NoBackwardError: the tensor requires grad and the edge has no backward.
            ShapeError: not one tensor, wrong number of axes, or a dtype that does not survive the wire; or, with
                fixed shapes, not the shape and dtype that were agreed.
        """
        steady = self._steady
        if (
            steady is not None
            and samples is None
            and isinstance(tensor, torch.Tensor)
            and tensor.shape == steady.shape
            and tensor.dtype is steady.passage.dtype
            and (self.backward or not tensor.requires_grad)
        ):
            return self._start(steady.passage, steady.passage.there, tensor, _FORWARD, peers=steady.peers)
        if not self._takes_part("source", "send_forward"):
            return None
        if self._payload is not None:
            return self._payload.isend_forward(tensor)
        if isinstance(tensor, Packed):
            tensor, samples = tensor.tensor, tensor.samples
        if not isinstance(tensor, torch.Tensor):
            raise ShapeError(
                f"{self} carries one tensor, got {type(tensor).__name__}; declare several with payload={{...}}, and "
                "where a microbatch has nothing to send, send a tensor without rows"
            )
        if self.comm_dtype is not None and not tensor.is_floating_point():
            raise ShapeError(
                f"{self} travels as {self.comm_dtype}, which would round the {_name(tensor.dtype)} values of this "
                "tensor; send a floating-point tensor, or declare the edge with comm_dtype=None"
            )
        if tensor.requires_grad and not self.backward:
            raise NoBackwardError(
                f"{self} was declared without backward, but the tensor requires grad; detach it (the source is "
                f"frozen) or declare the edge with backward=True"
            )
        announced = Announcement(tensor.shape, _name(tensor.dtype), samples)
        if self._announced is not None and not self.variable and announced != self._announced:
            raise ShapeError(
                f"{self}: rank {self.rank} sends {announced}, but {self._announced} was agreed with the first message; "
                f"sizes that change need shapes='variable', or renew_shapes() between two steps"
            )
        self._shapes.check(announced)
        known = self._shapes.passage({self.rank: announced})
        if known.there.given != announced.shape:
            raise ShapeError(
                f"{self}: rank {self.rank} holds shape {announced.shape}, but with samples {announced.samples} its "
                f"part is {known.there.given}"
            )
        # Every rank that may get something must hear of the sizes; gradients need no such message.
        sending = self._start(known, known.there, tensor, _FORWARD, note=announced.encode())
        # Only now: after a lane's error nothing was sent, and no gradient of it will come.
        self._announced = announced
        if not self.variable and samples is None:
            self._steady = _Steady(tensor.shape, known, known.there.sends if self.skips_empty else None)
        self._sent.add(known, has_gradient=self.backward and torch.is_grad_enabled())
        return sending

    def irecv_forward(self, shape: Sequence[int] | None = None) -> ReceiveHandle | None:
        """Start receiving the next activation; ``result()`` of what is returned is the tensor.

        With ``shape``, anything else that arrives is a ShapeError.
        """
        if not self._takes_part("destination", "recv_forward"):
            return None
        if self._payload is not None:
            return self._payload.irecv_forward()
        expected = None if shape is None else as_integers(shape, "the expected shape", error=ShapeError)
        if self._agreed is not None:
            whole = self._receive_whole(self._agreed, self._agreed.there, _FORWARD, expected)
            if whole is not None:
                return whole
        is_first = self._received.first is None
        incoming = _Incoming()

        def peers() -> Iterable[int] | None:
            if is_first or not self.skips_empty:
                return self._wiring.senders
            return None if self._agreed is None else self._agreed.there.receives

        def land(handles: PostedReceives) -> Landed:
            known = incoming.passage = self.announced({peer: _note(handle) for peer, handle in handles.items()})
            self._require_shape(expected, known.there)
            tensor, completing = self._traffic.fill(
                known.there, handles, _FORWARD, dtype=known.dtype, wire_dtype=known.wire_dtype
            )
            return [tensor], completing

        incoming.receive = receive = self._traffic.receive(
            _FORWARD,
            land,
            peers=peers,
            requires_grad=self.backward,
            blocks=None if self._wiring.teller is None else self._asks_its_leader,
        )
        self._received.add(incoming, has_gradient=self.backward and torch.is_grad_enabled())
        return receive

    def isend_backward(self, grad: Any) -> Handle | None:
        """Start sending the gradient of the oldest activation that has none yet; None stands for zeros.

        Of a payload, a tree of gradients, with None for leaves without.

        Raises:
            WrongSideError: this rank is not in the destination grid.
            NoBackwardError: the edge has no backward.
            PendingGradientError: no activation is waiting for a gradient.
            ShapeError: not the shape of that activation.
        """
        if not self._takes_part("destination", "send_backward"):
            return None
        self._require_backward("send_backward")
        if self._payload is not None:
            return self._payload.isend_backward(grad)
        oldest = self._received.oldest
        if oldest is None:
            raise PendingGradientError(
                f"{self}: send_backward on rank {self.rank}, but no activation that was received waits for a gradient"
            )
        known = oldest if isinstance(oldest, Passage) else oldest.known()
        given = known.back.given
        if grad is None:
            grad = torch.zeros(given, dtype=known.dtype, device=self.device)
        if not isinstance(grad, torch.Tensor):
            raise ShapeError(f"{self}: a gradient is one tensor, or None for zeros; got {shown(grad)}")
        if grad.shape != given:
            raise ShapeError(
                f"{self}: the gradient has shape {tuple(grad.shape)}, its activation had {given}; "
                f"send the gradient of what was received, in the same order"
            )
        if grad.dtype is not known.dtype:
            raise ShapeError(f"{self}: the gradient is {grad.dtype}, its activation was {known.dtype}; convert it")
        sending = self._start(known, known.back, grad, _BACKWARD, peers=known.back.sends)
        self._received.answer()  # only now: after a refusal the same activation still waits
        return sending

    def irecv_backward(self, shape: Sequence[int] | None = None) -> ReceiveHandle | None:
        """Start receiving the gradient of the oldest activation that has none yet.

        Raises:
            WrongSideError, NoBackwardError: as `isend_backward`.
            PendingGradientError: no activation was sent.
        """
        if not self._takes_part("source", "recv_backward"):
            return None
        self._require_backward("recv_backward")
        if self._payload is not None:
            return self._payload.irecv_backward()
        known = self._sent.oldest
        if known is None:
            raise PendingGradientError(
                f"{self}: recv_backward on rank {self.rank}, but no activation that was sent waits for a gradient"
            )
        expected = None if shape is None else as_integers(shape, "the expected shape", error=ShapeError)

        receive = self._receive_whole(known, known.back, _BACKWARD, expected)
        if receive is None:

            def land(handles: PostedReceives) -> Landed:
                self._require_shape(expected, known.back)
                tensor, completing = self._traffic.fill(
                    known.back, handles, _BACKWARD, dtype=known.dtype, wire_dtype=known.wire_dtype
                )
                return [tensor], completing

            receive = self._traffic.receive(_BACKWARD, land, peers=lambda: known.back.receives, requires_grad=False)
        self._sent.answer()
        return receive

    def abort(self, reason: str) -> None:
        """End lanes and completions at once, and tell the other side why."""
        abort_groups(self.end(reason), beside=lambda: self.lanes.abort(reason) if self._owns_lanes else None)

    def end(self, reason: str) -> Iterable[dist.ProcessGroup]:
        """Let completions that are waited for, now or later, fail with the reason; returns their groups, to abort."""
        self._traffic.waits.end(reason)
        return self._groups.values()

    def destroy(self) -> None:
        """Close the lanes and destroy the groups of this bridge. Idempotent."""
        if not self._destroyed:
            self._destroyed, self._steady = True, None
            self._traffic.waits.end("destroyed")
            if self._owns_lanes:
                self.lanes.close()
            destroy_groups(self._groups)

    def batch(self) -> AbstractContextManager[None]:
        """Issue the sends and receives that are started inside together, at the end."""
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
        self._announced = self._agreed = self._steady = None
        self._sent, self._received = PendingGradients(self.variable), PendingGradients(self.variable)
        if self._payload is not None:
            self._payload.forget()

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
        """Both, posted before either is waited for. The gradient may be that of an earlier activation.

        Raises:
            NoBackwardError: the edge has no backward; nothing is sent then.
        """
        if self.is_source:
            self._require_backward("send_forward_recv_backward")
        with self.batch():
            sending = self.isend_forward(tensor, samples=samples)
            receiving = self.irecv_backward()
        if sending is None or receiving is None:
            return None
        grad = receiving.result()
        sending.wait()
        return grad

    def send_backward_recv_forward(self, grad: Any) -> Any:
        """Both, posted before either is waited for."""
        with self.batch():
            sending = self.isend_backward(grad)
            receiving = self.irecv_forward()
        if sending is None or receiving is None:
            return None
        tensor = receiving.result()
        sending.wait()
        return tensor

    # -- underneath -------------------------------------------------------------------------------------

    def _require_backward(self, verb: str) -> None:
        """Raise unless the edge carries gradients.

        Raises:
            NoBackwardError: there are none.
        """
        if not self.backward:
            raise NoBackwardError(f"{self} was declared without backward; there is no {verb} on it")
        if _BACKWARD not in self._wiring.directions:
            raise NoBackwardError(f"{self} has no lanes for gradients, which its plan does not use; no {verb} on it")

    @property
    def skips_empty(self) -> bool:
        """Whether lanes that carry nothing are left out from the second activation on: sizes are fixed by then.

        Only where a strategy leaves lanes unused; otherwise a message without bytes, for a tensor with fewer
        elements than ranks, costs less than waiting for the first one before a second receive is posted.
        """
        return self.strategy == "auto" and not self.variable

    def _start(
        self,
        known: Passage,
        part: RankPart,
        tensor: torch.Tensor,
        direction: Direction,
        *,
        peers: Iterable[int] | None = None,
        note: str | None = None,
    ) -> Handle:
        given = tensor.detach() if tensor.requires_grad else tensor
        handles = self._traffic.send(part, given, direction, dtype=known.wire_dtype, peers=peers, note=note)
        return handles[0] if len(handles) == 1 else BridgeSend(handles)

    def _receive_whole(
        self, known: Passage, part: RankPart, direction: Direction, expected: tuple[int, ...] | None
    ) -> ReceiveHandle | None:
        """A receive that has no more to do than its lane's, where the sizes are known; None where it has."""
        if known.wire_dtype is not known.dtype or expected not in {None, part.taken}:
            return None
        requires_grad = direction is _FORWARD and self.backward
        return self._traffic.receive_whole(part, direction, requires_grad=requires_grad)

    def _require_shape(self, expected: tuple[int, ...] | None, part: RankPart) -> None:
        if expected not in {None, part.taken}:
            raise ShapeError(
                f"{self}: rank {self.rank} expects shape {expected}, but {part.taken} comes; the source's tensors and "
                f"the sides' data lanes decide"
            )

    def announced(self, notes: Mapping[int, str]) -> Passage:
        """What the source ranks' announcements mean for this rank; a copy without a lane asks its leader."""
        if self._agreed is not None:
            return self._agreed
        teller = self._wiring.teller
        if teller is not None:
            copies, waits = self._wiring.copies(_FORWARD), self._traffic.waits
            group, own = (
                self._groups[self._wiring.completion_group(copies, _FORWARD)],
                json.dumps(sorted(notes.items())),
            )
            try:
                text = broadcast_text(own, teller, group, self.device, lambda work: waits.wait(work, copies, host=True))
            except RuntimeError as error:
                raise CompletionError(
                    f"rank {self.rank}, {self}: rank {teller}, which hears the source, did not tell the sizes before "
                    f"the deadline ({error})"
                ) from error
            notes = dict(json.loads(text))
        known = self._shapes.passage({rank: Announcement.decode(text) for rank, text in notes.items()})
        if not self.variable:
            # In place of the first receive, which would keep its tensor for as long as the bridge lives.
            self._agreed = self._received.first = known
        return known

    def _asks_its_leader(self) -> bool:
        """Whether `announced` still has to talk to the copies of this rank, and so may block."""
        return self._agreed is None and self._wiring.teller is not None


@frozen
class _Steady:
    """What activations without samples are once their shape is agreed, and the ranks that get some of them."""

    shape: torch.Size
    passage: Passage
    peers: Iterable[int] | None


class _Incoming:
    """An activation on its way: its receive, and its sizes once they are known."""

    __slots__ = ("passage", "receive")

    def __init__(self) -> None:
        self.passage: Passage | None = None
        self.receive: BridgeReceive | None = None

    def known(self) -> Passage:
        """The sizes; lands the receive if that is what it takes."""
        if self.passage is None:
            assert self.receive is not None
            self.receive.let_land()
        assert self.passage is not None
        return self.passage


def _note(handle: Any) -> str:
    note: str = handle.note
    return note


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
