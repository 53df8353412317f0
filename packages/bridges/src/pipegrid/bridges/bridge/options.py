"""The options of an edge between two modules: one record, for a bridge and for a pipeline of modules. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from attrs import field, frozen

from pipegrid.bridges.bridge.structure import Declared, Structure
from pipegrid.core.fields import Index, checked, checked_fields, shown
from pipegrid.reshard import AUTO_LEADER_BYTES, BridgeError, Links, Placement, Strategy, as_axis_of, axis_names
from pipegrid.reshard.links import StrategyChoice


def _as_lanes(value: Any) -> tuple[int, ...] | None:
    return cast("tuple[int, ...] | None", checked(value, tuple[Index, ...] | None, "lanes", BridgeError))


def _as_shape(value: Any) -> tuple[int | None, ...] | None:
    return cast("tuple[int | None, ...] | None", checked(value, tuple[int | None, ...] | None, "shape", BridgeError))


@frozen(kw_only=True, field_transformer=checked_fields(BridgeError))
class EdgeOptions:
    """Options of one edge between modules. A `BridgeCommunicator` takes each by its name as well.

    Attributes:
        strategy: see `plan_reshard`.
        leader_below: bytes below which ``"auto"`` uses a leader, where no links are given.
        links: bandwidth, latency and shared links, by which ``"auto"`` decides.
        backward: False declares an edge without gradients (a frozen source).
        comm_dtype: dtype on the wire; what arrives has the dtype of what was sent. None is the tensor's own.
        tensor_ndim: axes of the tensor; None is that of the source module.
        shape: extents of the whole tensor, over all ranks of the source; None for extents that may change:
            ``(None, 16, 64)``.
        payload: `Axes` and `Whole` in dicts, lists and tuples, sent in place of one tensor. ``tensor_ndim``,
            ``dim_mapping`` and ``shape`` describe one tensor and have no effect then.
        dim_mapping: axis of ``"b"``, ``"s"`` and ``"h"``; None is that of the source module.
        src_placements: of the tensor along each dim of the source grid, see `boundary_side`; adds to those of the
            module.
        dest_placements: the same for the destination.
        src_lanes: samples of each source replica per microbatch, where they are not equal.
        dest_lanes: samples of each destination replica per microbatch; by default those of
            `pipegrid.topology.replica_sizes`, where ``src_lanes`` are declared.

    Raises:
        BridgeError: a value of another kind. What depends on the modules is checked by the communicator.

    Examples:
        >>> EdgeOptions(strategy="auto", backward=False).strategy
        'auto'
    """

    strategy: Strategy = "direct"
    leader_below: Index = AUTO_LEADER_BYTES
    links: Links | None = None
    backward: bool = True
    comm_dtype: Any = None
    tensor_ndim: int | None = None
    shape: Sequence[int | None] | None = field(default=None, converter=_as_shape)
    payload: Declared = None
    dim_mapping: Mapping[str, int] | None = None
    src_placements: Mapping[str, Placement] | None = None
    dest_placements: Mapping[str, Placement] | None = None
    src_lanes: Sequence[int] | None = field(default=None, converter=_as_lanes)
    dest_lanes: Sequence[int] | None = field(default=None, converter=_as_lanes)

    def __attrs_post_init__(self) -> None:
        if self.payload is not None:
            self.structure  # noqa: B018 -- raises what the payload cannot be
        if self.comm_dtype is not None and not getattr(self.comm_dtype, "is_floating_point", False):
            raise BridgeError(f"comm_dtype is {shown(self.comm_dtype)}; it must be a floating-point torch.dtype")
        if self.tensor_ndim is not None:
            axis_names(self.tensor_ndim)
        if self.dim_mapping is not None:
            as_axis_of(self.dim_mapping)

    @property
    def choice(self) -> StrategyChoice:
        """The strategy, and what ``"auto"`` decides by."""
        return StrategyChoice(self.strategy, self.leader_below, self.links)

    @property
    def structure(self) -> Structure | None:
        """The structure of the payload; None on an edge of one tensor.

        Raises:
            BridgeError: the strategy or the shape is that of an edge of one tensor; or as `Structure`.
        """
        if self.payload is None:
            return None
        if self.strategy != "direct" or self.shape is not None:
            raise BridgeError(f"payload= has strategy 'direct' and no shape, not {self.strategy!r} and {self.shape}")
        return Structure(self.payload)


class EdgeArguments(TypedDict, total=False):
    """`EdgeOptions` as keyword arguments of a `BridgeCommunicator`, but for those with an argument of their own."""

    strategy: Strategy
    leader_below: int
    links: Links | None
    backward: bool
    shape: Sequence[int | None] | None
    payload: Declared
    src_placements: Mapping[str, Placement] | None
    dest_placements: Mapping[str, Placement] | None
    src_lanes: Sequence[int] | None
    dest_lanes: Sequence[int] | None
