"""Modules on grids as one pipeline: the place of each stage, and the length of the pipeline. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from pipegrid.bridges.bridge.structure import Declared, checked_structure
from pipegrid.bridges.checks import as_integer, as_integers, as_mapping, as_text, as_tuple, check_grid
from pipegrid.bridges.errors import LaneTotalsError, StageError
from pipegrid.bridges.graph import ModuleGraph, ModuleGraphError
from pipegrid.bridges.reshard import (
    AUTO_LEADER_BYTES,
    Choice,
    GridLike,
    Links,
    Placement,
    Strategy,
    as_axis_of,
    as_placements,
    axis_names,
    dim_size,
    is_in,
    place_of,
)


@frozen(kw_only=True)
class EdgeOptions:
    """How one edge between modules differs from the default; the names are those of `BridgeCommunicator`.

    ``payload`` declares several tensors, a tree of `Axes` and `Whole`. ``shape`` declares the one tensor that crosses
    otherwise, whole, None for extents that may change: ``(None, 16, 64)``.
    ``tensor_ndim`` and ``dim_mapping`` override the source module's; ``src_placements`` and
    ``dest_placements`` add to those of the modules.

    Raises:
        BridgeError: a value of another kind. What depends on the modules is checked by the communicator.
    """

    strategy: Strategy = "direct"
    leader_below: int = AUTO_LEADER_BYTES
    links: Links | None = None
    backward: bool = True
    comm_dtype: Any = None
    tensor_ndim: int | None = None
    shape: tuple[int | None, ...] | None = None
    payload: Declared = None
    dim_mapping: Mapping[str, int] | None = None
    src_placements: Mapping[str, Placement] | None = None
    dest_placements: Mapping[str, Placement] | None = None
    src_lanes: tuple[int, ...] | None = None
    dest_lanes: tuple[int, ...] | None = None

    def __attrs_post_init__(self) -> None:
        Choice(self.strategy, self.leader_below, self.links)
        if self.payload is not None:
            checked_structure(self.payload, self.strategy, self.shape)
        if self.tensor_ndim is not None:
            axis_names(self.tensor_ndim)
        if self.dim_mapping is not None:
            as_axis_of(self.dim_mapping)
        as_placements(self.src_placements, "src_placements")
        as_placements(self.dest_placements, "dest_placements")
        for name, lanes in (("src_lanes", self.src_lanes), ("dest_lanes", self.dest_lanes)):
            if lanes is not None:
                as_integers(lanes, name, error=LaneTotalsError)


def check_topology(topology: Mapping[str, Sequence[str] | None], grids: Mapping[str, GridLike]) -> None:
    """Raise for modules without a grid, and grids without a module.

    Raises:
        ModuleGraphError: the two name different modules.
    """
    fed = as_mapping(topology, "topology", "modules to the modules that they feed", error=ModuleGraphError)
    for name, grid in as_mapping(grids, "module_to_grid_map", "modules to grids", error=ModuleGraphError).items():
        check_grid(grid, f"the grid of {name!r}", error=ModuleGraphError)
    for name, dsts in fed.items():
        for dst in () if dsts is None else as_tuple(dsts, f"what {name!r} feeds", "modules", error=ModuleGraphError):
            as_text(dst, f"what {name!r} feeds", error=ModuleGraphError)
    named = {*topology, *(dst for dsts in topology.values() for dst in dsts or ())}
    if named != set(grids):
        raise ModuleGraphError(
            f"the topology names modules {sorted(named)}, the grid map {sorted(grids)}; missing grids: "
            f"{sorted(named - set(grids))}, unused grids: {sorted(set(grids) - named)}"
        )


def module_graph(
    topology: Mapping[str, Sequence[str] | None],
    grids: Mapping[str, GridLike],
    placement: Mapping[str, Sequence[int]],
) -> ModuleGraph:
    """The graph of stages: a module has as many as its placement has entries.

    Raises:
        ModuleGraphError: a cycle, an unknown module, a place that a grid does not have.
    """
    check_topology(topology, grids)
    for name, given in placement.items():
        size = dim_size(grids[name], "pp")
        places = as_integers(given, f"stage_placement of {name!r}", error=ModuleGraphError)
        if set(places) != set(range(size)):
            raise ModuleGraphError(
                f"module {name!r} has its stages on places {tuple(places)} of its pipeline of {size} ranks; every "
                f"place from 0 to {size - 1} holds at least one stage"
            )
    return ModuleGraph(
        {name: len(placement[name]) for name in grids},
        {name: tuple(topology.get(name) or ()) for name in grids},
    )


def total_pipeline_stages(
    topology: Mapping[str, Sequence[str] | None],
    grids: Mapping[str, GridLike],
    *,
    rank: int | None = None,
    module_name: str | None = None,
) -> int:
    """Pipeline ranks on the longest path; with ``rank``, up to and including the place of that rank.

    Raises:
        ModuleGraphError: the modules form a cycle, or nothing is a sink.
        StageError: ``rank`` is in no module (or not in ``module_name``).
    """
    check_topology(topology, grids)
    if not grids:
        raise ModuleGraphError("the topology has no terminal node: it has no modules; declare at least one")
    depth = {name: dim_size(grid, "pp") for name, grid in grids.items()}
    graph = ModuleGraph(depth, {name: tuple(topology.get(name) or ()) for name in grids})
    before: dict[str, int] = {}
    for name in graph.order:
        feeding = [src for src, dst in graph.edges if dst == name]
        before[name] = max((before[src] + depth[src] for src in feeding), default=0)
    if rank is None:
        return max(before[name] + depth[name] for name in graph.sinks)
    rank = as_integer(rank, "rank", least=0, error=StageError)
    holding = [name for name, grid in grids.items() if is_in(grid, rank)]
    if module_name is not None:
        if module_name not in holding:
            raise StageError(f"rank {rank} is not in module {module_name!r}; it is in {holding}")
        holding = [module_name]
    if not holding:
        raise StageError(f"rank {rank} is in none of the modules {sorted(grids)}")
    return max(before[name] + place_of(grids[name], rank) + 1 for name in holding)
