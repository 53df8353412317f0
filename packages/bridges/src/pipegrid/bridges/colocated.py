"""Colocated modules: two layouts of the same ranks, bridged inside autograd."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch.autograd.function import once_differentiable

from pipegrid.bridges.collectives import CollectiveWaits, abort_groups, close_groups, own_groups
from pipegrid.bridges.replication import ReplicationCheck
from pipegrid.bridges.steps import Completing, pack, unpack
from pipegrid.core.fields import Index, checked, checked_fields, shown
from pipegrid.reshard import (
    BATCH,
    BridgeError,
    GridLike,
    RankPart,
    ReshardPlan,
    ShapeError,
    Sizes,
    as_axis_of,
    as_grid,
    axis_names,
    boundary_side,
    marked_samples,
    plan_reshard,
)
from pipegrid.topology import GroupSpec
from pipegrid.topology.grid import span_of
from pipegrid.transport.collectives.differences import difference
from pipegrid.transport.collectives.gathering import gather_flat
from pipegrid.transport.collectives.starting import start
from pipegrid.transport.control.opening import resolve_device
from pipegrid.transport.errors import P2PLaneDeadError

KNOWN_DIMS = ("tp", "cp", "dp", "pp")
_DEADLINE = 300.0  # seconds of an exchange
_TASK = "the ranks {} did not exchange their tensors with this one"


@frozen(field_transformer=checked_fields(BridgeError))
class SliceInfo:
    """The samples ``[start, start + size)`` of a batch that a rank works on.

    Attributes:
        start: the first sample.
        size: the number of samples.
    """

    start: Index
    size: Index


class BridgeDirection(str, enum.Enum):  # noqa: UP042 -- the seed's bases: a member formats as the enum it is
    """The side of the bridge with more replicas.

    FAN_IN: the source has more; forward gathers along the batch, backward keeps this rank's slice.
    FAN_OUT: the destination has more; forward keeps this rank's slice, backward gathers the gradients of all
    slices, because each consumer of the activation saw another part of it.
    EQUAL: as many on both sides.
    """

    FAN_IN = "fan_in"
    FAN_OUT = "fan_out"
    EQUAL = "equal"


class ColocatedBridgeCommunicator:
    """Moves tensors from one layout of a set of ranks to another layout of the same ranks.

    ``y = bridge.communicate(x)`` is differentiable. Every rank of the grids calls it, and every rank runs the
    backward of its result. All ranks give tensors of one shape and dtype, which they compare in the first call with
    each shape, and the ranks of a source replica the same values, which ``check_replicated=True`` compares.

    Where the number of replicas of one side divides the other's and nothing else is in the way, this is one
    all-gather in one direction and one slice in the other. Any other pair of layouts (dp 3 and 2, context
    parallel, a pipelined destination) goes through a reshard plan. Where the destination is pipelined, the
    ranks outside of its first stage get a tensor without rows that is joined to the graph: run its backward
    as well, since gradients for their own source replica arrive through it.

    Args:
        src_grid: layout of the module that makes the tensor.
        dest_grid: layout of the module that consumes it; the same ranks.
        src_module_name: for messages.
        dest_module_name: for messages.
        dim_mapping: axis of ``"b"``, ``"s"``, ``"h"``; default ``{"b": 0, "s": 1, "h": 2}``. For flattened
            ``[tokens, h]`` pass ``{"b": 0, "h": 1}``: samples then need equal numbers of tokens.
        check_replicated: in the first call, compare checksums over the copies of each source replica, and their rows.
        check_every: compare them again every so many calls; 0 is never again.
        backend: of the groups; None is the default group's.
        timeout: of the groups; a ``timedelta``, None is beyond the deadline.
        deadline: seconds that one exchange may take.

    Raises:
        BridgeError: the grids hold different ranks, have a dim beside tp, cp, dp and pp, or the source is pipelined.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from pipegrid.topology import HyperCommGrid
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> bridge = ColocatedBridgeCommunicator(HyperCommGrid([1], ["tp"]), HyperCommGrid([1], ["dp"]))
        >>> bridge.communicate(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        src_grid: GridLike,
        dest_grid: GridLike,
        src_module_name: str = "src",
        dest_module_name: str = "dest",
        dim_mapping: dict[str, int] | None = None,
        *,
        check_replicated: bool = False,
        check_every: int = 0,
        backend: str | None = None,
        timeout: timedelta | None = None,
        deadline: float = _DEADLINE,
    ) -> None:
        check_every = checked(check_every, Index, "check_every", BridgeError)
        self.src_grid, self.dest_grid = src_grid, dest_grid
        self._boxes = as_grid(src_grid, "src_grid"), as_grid(dest_grid, "dest_grid")
        self.src_module_name = src_module_name
        self.dest_module_name = dest_module_name
        self.dim_mapping = {"b": 0, "s": 1, "h": 2} if dim_mapping is None else as_axis_of(dim_mapping)
        self._label = f"colocated/{src_module_name}>{dest_module_name}"
        self._validate_grids()
        self._rank = dist.get_rank()
        self._extract_parallelism_info()
        self._build_rank_mappings()
        self._destroyed = False
        self._agreed: set[tuple[torch.Size, torch.dtype]] = set()
        self._make_groups(backend, timeout, deadline, check_replicated=check_replicated)
        _, device = resolve_device(backend, None)
        self._waits = CollectiveWaits(self._label, self._rank, device, deadline, _TASK)
        self._check: ReplicationCheck | None = None
        if check_replicated:
            groups = self._group("check"), self._group("shapes")
            self._check = ReplicationCheck(self._src, self._rank, check_every, *groups, self._waits)

    def _validate_grids(self) -> None:
        src, dst = self._boxes
        if src.ranks != dst.ranks:
            spans = [span_of(box.ranks) for box in self._boxes]
            raise BridgeError(f"{self._label}: the source is on ranks {spans[0]}, the destination on {spans[1]}")
        for box, known in ((src, KNOWN_DIMS[:-1]), (dst, KNOWN_DIMS)):
            other = {dim: size for dim, (size, _) in box.axes.items() if dim not in known and size > 1}
            if other:
                raise BridgeError(
                    f"{self._label}: a grid has dims {other}, where {known} may be larger than 1; a BridgeCommunicator "
                    "takes others (placements), and a source with stages (pp)"
                )

    def _extract_parallelism_info(self) -> None:
        src, dst = self._boxes
        self.src_tp_size, self.src_dp_size = src.length("tp"), src.length("dp")
        self.dest_tp_size, self.dest_dp_size = dst.length("tp"), dst.length("dp")
        wide, narrow = max(self.src_dp_size, self.dest_dp_size), min(self.src_dp_size, self.dest_dp_size)
        self.scale: int | None = wide // narrow if wide % narrow == 0 else None
        if self.src_dp_size > self.dest_dp_size:
            self.direction = BridgeDirection.FAN_IN
        elif self.src_dp_size < self.dest_dp_size:
            self.direction = BridgeDirection.FAN_OUT
        else:
            self.direction = BridgeDirection.EQUAL

    def _build_rank_mappings(self) -> None:
        # The coordinates (dp, tp) of every rank, also in a grid with cp or pp.
        self.rank_to_src_pos, self.rank_to_dest_pos = (
            {rank: (box.place(rank, "dp"), box.place(rank, "tp")) for rank in box.ranks} for box in self._boxes
        )
        self._src = boundary_side(self.src_grid, "source", name=self.src_module_name)
        self._dst = boundary_side(self.dest_grid, "destination", name=self.dest_module_name)
        self.gather_group_ranks: list[list[int]] = []
        self._by_slots = self._is_slotted()
        self._passes_through = self._by_slots and self.direction is BridgeDirection.EQUAL
        if self._by_slots and self.scale is not None:
            if self.is_fan_in():
                self.gather_group_ranks = self._build_gather_groups(
                    self.dest_dp_size, self.src_tp_size, self.scale, self.rank_to_src_pos
                )
            elif self.is_fan_out():
                self.gather_group_ranks = self._build_gather_groups(
                    self.src_dp_size, self.dest_tp_size, self.scale, self.rank_to_dest_pos
                )

    def _is_slotted(self) -> bool:
        """Whether each rank's replica on one side lies inside of its replica on the other: slices are enough."""
        if self.scale is None or any(box.length(dim) > 1 for box in self._boxes for dim in ("cp", "pp")):
            return False
        fan_in = self.src_dp_size // self.dest_dp_size or 1
        fan_out = self.dest_dp_size // self.src_dp_size or 1
        return all(
            self.rank_to_src_pos[rank][0] // fan_in == self.rank_to_dest_pos[rank][0] // fan_out
            for rank in self.rank_to_src_pos
        )

    @staticmethod
    def _build_gather_groups(
        iter_size: int, sibling_tp_size: int, scale: int, rank_to_pos: dict[int, tuple[int, int]]
    ) -> list[list[int]]:
        """The gather groups: ``scale`` ranks per slot of the side with fewer replicas and tp shard of the other.

        The order inside of a group is the order of the replicas, which is the order of concatenation.
        """
        rank_at = {pos: rank for rank, pos in rank_to_pos.items()}
        return [
            [rank_at[slot * scale + part, tp] for part in range(scale)]
            for slot, tp in itertools.product(range(iter_size), range(sibling_tp_size))
        ]

    def _make_groups(
        self, backend: str | None, timeout: timedelta | None, deadline: float, *, check_replicated: bool
    ) -> None:
        # Slices need the gather groups only; a plan needs one group for its messages and its completions.
        specs = [self._spec(ranks, "gather") for ranks in self.gather_group_ranks]
        if not self._by_slots:
            specs.append(self._spec(self._boxes[0].ranks, "messages"))
            for side in (self._src, self._dst):
                specs += [self._spec(r, "complete") for r in side.classes.values() if len(r) > 1]
        if check_replicated:
            specs += [self._spec(r, "check") for r in self._src.classes.values() if len(r) > 1]
        if check_replicated or not self._passes_through:
            specs.append(self._spec(self._boxes[0].ranks, "shapes"))
        self._groups = own_groups(specs, backend=backend, deadline=deadline, timeout=timeout)
        self.gather_pg: dist.ProcessGroup | None = self._group("gather")

    def _spec(self, ranks: Sequence[int], what: str) -> GroupSpec:
        return GroupSpec(tuple(ranks), f"{self._label}/{what}", shared=False)

    def _group(self, what: str) -> dist.ProcessGroup | None:
        label = f"{self._label}/{what}"
        return next((group for spec, group in self._groups.items() if spec.label == label), None)

    def is_fan_in(self) -> bool:
        """Whether the source has more replicas: forward gathers."""
        return self.direction is BridgeDirection.FAN_IN

    def is_fan_out(self) -> bool:
        """Whether the destination has more replicas: forward slices."""
        return self.direction is BridgeDirection.FAN_OUT

    def get_slice_info(self, batch_size: int) -> SliceInfo:
        """The slice of this rank, out of ``batch_size`` samples, on the side that slices.

        For FAN_OUT that is forward's slice of the source batch; for FAN_IN backward's slice of the gathered
        one; for EQUAL everything.

        Raises:
            BridgeError: the batch is not divisible by ``scale``, or the dp sizes have no integer scale.
        """
        if self.scale is None or not self._by_slots:
            raise BridgeError(
                f"{self._label}: dp {self.src_dp_size} and dp {self.dest_dp_size} have no slices: neither divides the "
                "other, or a rank is in two blocks of the batch; communicate() works all the same"
            )
        self._check_divisible(batch_size)
        size = batch_size // self.scale
        position = self.rank_to_dest_pos if self.is_fan_out() else self.rank_to_src_pos
        slot = position[self._rank][0] % self.scale
        return SliceInfo(start=slot * size, size=size)

    def _check_divisible(self, batch_size: int) -> None:
        if self.scale is not None and batch_size % self.scale:
            raise BridgeError(f"{self._label}: a batch of {batch_size} is not divisible by scale {self.scale}")

    def communicate(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of this rank's destination replica, from ``tensor`` of its source replica.

        On fan-out and between equal replicas it may share memory with ``tensor``: do not change it in place.

        Raises:
            BridgeError: FAN_OUT by an integer scale that does not divide the batch; with ``check_replicated``, the
                copies of a source replica differ.
            ShapeError: too few axes for ``dim_mapping``; a tensor that Megatron's model has marked with the rows of its
                samples (``_mimo_bridge_split_sizes``), where equal slices cut inside of one; or the ranks' tensors
                differ in shape or dtype, or their ``dim_mapping``: compared in the first call with each shape.
            CollectiveFailedError: a rank did not join before the deadline, or died; or the bridge was aborted.
            P2PLaneDeadError: after `destroy`.
        """
        self._require_alive()
        axis = self.dim_mapping[BATCH]
        if not isinstance(tensor, torch.Tensor) or tensor.ndim <= axis:
            found = shown(getattr(tensor, "shape", tensor))
            raise ShapeError(f"{self._label} carries one tensor with batch axis {axis}, got {found}")
        if self._check is not None:
            self._check.look(tensor, tensor.shape[axis])
        if self._passes_through:
            return tensor
        if (tensor.shape, tensor.dtype) not in self._agreed:
            self._agree(tensor)
        if self.is_fan_out():
            self._check_divisible(tensor.shape[axis])
        self._require_equal_cuts(tensor)
        result: torch.Tensor = _ColocatedCommunicate.apply(tensor, self)  # type: ignore[no-untyped-call]
        return result

    def _require_equal_cuts(self, tensor: torch.Tensor) -> None:
        """Raise ShapeError for a tensor marked with the rows of its samples that equal slices cut inside of one."""
        samples = marked_samples(tensor)
        if not samples or (self._by_slots and self.is_fan_in()):
            return
        count, rest = divmod(len(samples), self.scale if self._by_slots and self.scale is not None else len(samples))
        if rest or len({sum(samples[first : first + count]) for first in range(0, len(samples), count)}) > 1:
            raise ShapeError(
                f"{self._label}: the tensor is marked as samples of {shown(samples)} rows, and replicas get equal "
                "slices, which cut inside of samples; pad the samples, or use a BridgeCommunicator with variable shapes"
            )

    def abort(self, reason: str) -> None:
        """End exchanges under way on this rank, now or later, with ``reason``: for a rank that fails elsewhere."""
        self._waits.end(reason)
        abort_groups(self._groups.values(), reason)

    def destroy(self) -> None:
        """Destroy this communicator's groups. Idempotent."""
        if not self._destroyed:
            self._destroyed = True
            self._waits.end("destroyed")
            close_groups(self._groups, failed=self._waits.stuck, seconds=self._waits.deadline)
            self._groups, self.gather_pg = {}, None

    def _require_alive(self) -> None:
        if self._destroyed:
            raise P2PLaneDeadError(
                f"{self._label} was destroyed; destroy it after the last backward, or make a new one"
            )

    def _agree(self, tensor: torch.Tensor) -> None:
        """Compare the shape, the dtype and the axes of ``tensor`` among all ranks: another size would end a process."""
        group, ranks = self._group("shapes"), self._boxes[0].ranks
        assert group is not None
        mine = f"shape {tuple(tensor.shape)} of {tensor.dtype}, dim_mapping {self.dim_mapping}"
        found = difference(self._waits.gather_text(mine, ranks, group))
        if found is not None:
            raise ShapeError(f"{self._label}: the ranks give different tensors: {found}")
        self._agreed.add((tensor.shape, tensor.dtype))

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.gather_pg is not None
        return _all_gather_along_batch_dim(tensor, self.gather_pg, self.dim_mapping[BATCH], waits=self._waits)

    def _narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        axis = self.dim_mapping[BATCH]
        piece = self.get_slice_info(tensor.shape[axis])
        return tensor.narrow(axis, piece.start, piece.size).contiguous()

    def _plans(self, tensor: torch.Tensor) -> tuple[ReshardPlan, ReshardPlan]:
        """Forward and backward plan for a source tensor: all source replicas are as large as this one."""
        names = axis_names(tensor.ndim, {k: v for k, v in self.dim_mapping.items() if v < tensor.ndim})
        shape = list(tensor.shape)
        for axis, here in enumerate(names):
            for name in here:
                shape[axis] *= self._src.num_shards(name)
        sizes = Sizes(tuple(shape), axes=names)
        plan = partial(plan_reshard, self._src, self._dst, sizes, itemsize=tensor.element_size(), rank=self._rank)
        return plan(backward=False), plan(backward=True)

    def _move(self, plan: ReshardPlan, tensor: torch.Tensor) -> torch.Tensor:
        """Run a plan in which every rank of the grids takes part at once: one all-to-all, then the completions."""
        messages, rank, dtype = self._group("messages"), self._rank, tensor.dtype
        assert messages is not None
        part, ranks = RankPart(plan, rank), dist.get_process_group_ranks(messages)
        receives = rank in plan.dst.coords_of
        shape = list(part.destination_shape if receives else plan.sizes.shape)
        if not receives:
            shape[self.dim_mapping[BATCH]] = 0
        out = torch.empty(shape, dtype=dtype, device=tensor.device)
        given = [pack(tensor, part.sends.get(peer, ()), dtype).view(-1) for peer in ranks]
        taken = [sum(box.numel for box in part.receives.get(peer, ())) for peer in ranks]
        arrived = torch.empty(sum(taken), dtype=dtype, device=tensor.device)
        sizes = [piece.numel() for piece in given]
        work = start(dist.all_to_all_single, arrived, torch.cat(given), taken, sizes, group=messages)
        self._waits.wait(work, ranks, messages)
        for peer, piece in zip(ranks, torch.split(arrived, taken), strict=True):
            unpack(piece, part.receives.get(peer, ()), out)
        copies = {spec.ranks: group for spec, group in self._groups.items() if spec.label.endswith("/complete")}
        completing = [Completing(step, out, copies[step.ranks], rank=rank, dtype=dtype) for step in part.completions]
        for step, made in zip(part.completions, completing, strict=True):
            self._waits.wait(made.work, step.ranks, made.group)
            made.write()
        return out


class _ColocatedCommunicate(torch.autograd.Function):
    """The bridge as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comm: ColocatedBridgeCommunicator) -> torch.Tensor:
        """Gather on fan-in, slice on fan-out, run the plan otherwise."""
        ctx.comm = comm
        if comm._by_slots:  # noqa: SLF001 -- one class in two, as autograd wants it
            return comm._gather(tensor) if comm.is_fan_in() else comm._narrow(tensor)  # noqa: SLF001
        forward, ctx.back = comm._plans(tensor)  # noqa: SLF001
        return comm._move(forward, tensor.contiguous())  # noqa: SLF001

    @staticmethod
    @once_differentiable  # a collective's own gradient would be missing in silence
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The adjoint: slice on fan-in, gather on fan-out, run the backward plan otherwise."""
        comm: ColocatedBridgeCommunicator = ctx.comm
        comm._require_alive()  # noqa: SLF001
        (grad,) = grads
        if comm._by_slots:  # noqa: SLF001
            return (comm._narrow(grad) if comm.is_fan_in() else comm._gather(grad)), None  # noqa: SLF001
        return comm._move(ctx.back, grad.contiguous()), None  # noqa: SLF001


def _all_gather_along_batch_dim(
    tensor: torch.Tensor, group: dist.ProcessGroup, batch_dim: int, *, waits: CollectiveWaits | None = None
) -> torch.Tensor:
    """All ranks' tensors, concatenated along ``batch_dim`` in group order; no copy beside the gather on axis 0.

    ``waits``: of a communicator; by default with the deadline of one.
    """
    waits = waits or CollectiveWaits("colocated", dist.get_rank(), tensor.device, _DEADLINE, _TASK)
    tensor = tensor.contiguous()
    parts = (dist.get_world_size(group), *tensor.shape)
    gathered = torch.empty((parts[0] * parts[1], *parts[2:]), dtype=tensor.dtype, device=tensor.device)
    work = gather_flat(gathered.view(-1), tensor.view(-1), group)
    waits.wait(work, dist.get_process_group_ranks(group), group)
    return gathered if batch_dim == 0 else torch.cat(gathered.view(parts).unbind(0), dim=batch_dim)
