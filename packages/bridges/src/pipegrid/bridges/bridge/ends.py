"""The two ends of a bridge, and which of them this rank is on. Nothing is sent here; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import evolve

from pipegrid.bridges.bridge.options import EdgeOptions
from pipegrid.bridges.bridge.wiring import BridgeWiring, PayloadWiring, boundary_sides
from pipegrid.core.edge import Direction
from pipegrid.core.fields import shown
from pipegrid.reshard import BATCH, AxisNames, BridgeError, GridLike, as_grid, axis_names, replica_side
from pipegrid.transport.errors import P2PLaneDeadError

_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD


class BridgeEnds:
    """The ends of a `BridgeCommunicator`; its arguments are that one's.

    Attributes:
        src_grid: grid of the module that makes the tensor.
        dest_grid: grid of the module that consumes it.
        src: the side of the source's last stage.
        dst: the side of the destination's first stage.
        axes: names of the tensor's axes.
        options: of the edge.
        rank: this rank.
        is_source: whether this rank gives activations.
        is_destination: whether this rank gets activations.
        carries_gradients: whether there are lanes for gradients: the edge has a backward, and its plan uses it.
        lane_specs: the lanes of this rank.
        declared: the text on which both ends of each lane must agree.
    """

    _destroyed = False

    def __init__(
        self,
        rank: int,
        grids: tuple[GridLike, GridLike],
        names: tuple[str | None, str | None],
        options: EdgeOptions,
        *,
        tensor_ndim: int,
        label: str | None,
        directions: Iterable[Direction] | None,
        stage_dim: str,
        stages: tuple[int | None, int | None],
        replicas: tuple[int, int] | None = None,
    ) -> None:
        self.rank, self.options = rank, options
        self.tensor_ndim, self.axes = tensor_ndim, axis_names(tensor_ndim, options.dim_mapping)
        self.comm_dtype: Any = options.comm_dtype
        self.strategy, self.backward = options.strategy, options.backward
        self.src_grid, self.dest_grid = grids
        self.src_module_name, self.dest_module_name = names[0] or "src", names[1] or "dest"
        self.label = label or f"{self.src_module_name}>{self.dest_module_name}"
        sides = boundary_sides(
            grids,
            names=(self.src_module_name, self.dest_module_name),
            placements=(options.src_placements, options.dest_placements),
            stages=stages,
            lanes=(options.src_lanes, options.dest_lanes),
            stage_dim=stage_dim,
        )
        if replicas is not None:
            self.label = f"{self.label}@{replicas[0]}>{replicas[1]}"
            self.options = options = evolve(options, shape=_of_replica(options.shape, self.axes, sides[0].num_lanes))
            sides = replica_side(sides[0], replicas[0]), replica_side(sides[1], replicas[1])
        self.src, self.dst = sides
        self.is_source, self.is_destination = rank in self.src.coords_of, rank in self.dst.coords_of
        has = tuple(Direction) if self.backward else (_FORWARD,)
        wanted = None if directions is None else set(directions)
        used = tuple(way for way in has if wanted is None or way in wanted)
        structure = options.structure
        self._wiring: BridgeWiring
        if structure is None:
            self._wiring = BridgeWiring(self.label, *sides, self.axes, options.strategy, used, rank)
        else:
            axes = structure.leaves[0].axes
            self._wiring = PayloadWiring(self.label, *sides, axes, options.strategy, used, rank, structure)
        self.carries_gradients = _BACKWARD in used
        self.lane_specs = self._wiring.lane_specs
        on_wire = options.comm_dtype or "as it is"
        self.declared = dict.fromkeys(self.lane_specs, f"{self._wiring.declaration}; on the wire {on_wire}")

    def __str__(self) -> str:
        return f"bridge {self.label}"

    def takes_part(self, direction: Direction, *, sends: bool) -> bool:
        """Whether this rank sends, or receives, in ``direction``; False on the other stages of that side's grid.

        Raises:
            P2PLaneDeadError: the bridge was destroyed.
            BridgeError: this rank is not in that side's grid, or there are no lanes for gradients.
        """
        gives = (direction is _FORWARD) is sends
        here = self.is_source if gives else self.is_destination
        if here and not self._destroyed and (direction is _FORWARD or self.carries_gradients):
            return True
        if self._destroyed:
            raise P2PLaneDeadError(f"{self} was destroyed; make a new one")
        verb = f"{'send' if sends else 'recv'}_{direction.name.lower()}"
        if here:
            raise self._no_backward(verb)
        side, other, own, there = self.src, self.dst, self.src_grid, self.dest_grid
        if not gives:
            side, other, own, there = other, side, there, own
        if self.rank in as_grid(own).ranks:
            return False
        elsewhere = f"the side of {other.name!r}" if self.rank in as_grid(there).ranks else "neither"
        raise BridgeError(
            f"{self}: {verb} is for the {'source' if gives else 'destination'} side ({side.name!r}, ranks "
            f"{shown(side.ranks)}), but rank {self.rank} is on {elsewhere}"
        )

    def _no_backward(self, verb: str) -> BridgeError:
        why = "which its plan does not use" if self.backward else "being declared without backward"
        return BridgeError(f"{self} has no lanes for gradients, {why}: no {verb} on it")


def _of_replica(shape: Sequence[int | None] | None, axes: AxisNames, replicas: int) -> tuple[int | None, ...] | None:
    """The declared extents of the tensor of all ``replicas`` as those of one; `BridgeError` without equal parts."""
    if shape is None:
        return None
    found = list(shape)
    for axis, (names, extent) in enumerate(zip(axes, shape, strict=True)):
        if BATCH in names and extent is not None:
            if extent % replicas:
                raise BridgeError(f"shape is {shape}; its batch, {extent}, is to be shared by {replicas} replicas")
            found[axis] = extent // replicas
    return tuple(found)
