"""The two sides of one edge between modules, whose lanes hold the same batch. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from attrs import frozen

from pipegrid.bridges.errors import LaneTotalsError
from pipegrid.bridges.reshard.side import GridLike, Placement, Side, boundary_side

Thing = TypeVar("Thing")


@frozen
class Ends(Generic[Thing]):
    """Something of the source of an edge, and the same of its destination."""

    source: Thing
    destination: Thing


def edge_sides(
    label: str,
    *,
    grids: Ends[GridLike],
    names: Ends[str],
    placements: Ends[Mapping[str, Placement] | None],
    stage_dim: str,
    stages: Ends[int | None],
    lanes: Ends[Sequence[int] | None],
) -> Ends[Side]:
    """Both sides; each argument as `boundary_side` has it, for both ends.

    Raises:
        UndeclaredDimError, BridgeError: as `boundary_side`.
        LaneTotalsError: the lanes of the two sides hold different numbers of samples, or one of the destination none.
    """
    src = boundary_side(
        grids.source,
        "source",
        placements=placements.source,
        name=names.source,
        stage_dim=stage_dim,
        stage=stages.source,
        lane_weights=lanes.source,
    )
    dst = boundary_side(
        grids.destination,
        "destination",
        placements=placements.destination,
        name=names.destination,
        stage_dim=stage_dim,
        stage=stages.destination,
        lane_weights=lanes.destination,
    )
    given, wanted = src.lane_weights, dst.lane_weights
    if given is not None and wanted is not None and sum(given) != sum(wanted):
        raise LaneTotalsError(
            f"{label}: source lanes {given} hold {sum(given)} samples per microbatch, destination lanes {wanted} "
            f"{sum(wanted)}; both sides see the same batch"
        )
    if wanted is not None and not all(wanted):
        raise LaneTotalsError(f"{label}: dest_lanes {wanted} has a lane without samples; every lane gets some")
    return Ends(src, dst)
