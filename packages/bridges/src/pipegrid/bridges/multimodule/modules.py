"""Modules on grids as one pipeline: the place of each stage, and the length of the pipeline. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict, filters, frozen

from pipegrid.bridges.bridge.structure import Declared, checked_structure
from pipegrid.bridges.errors import BridgeError
from pipegrid.bridges.graph import ModuleGraph, ModuleGraphError
from pipegrid.bridges.reshard import (
    AUTO_LEADER_BYTES,
    GridLike,
    Links,
    Placement,
    Strategy,
    as_axis_of,
    as_grid,
    axis_names,
    dim_size,
    is_in,
    place_of,
)
from pipegrid.topology.fields import Index, Name, checked, checked_fields


@frozen(kw_only=True, field_transformer=checked_fields(BridgeError))
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
    leader_below: Index = AUTO_LEADER_BYTES
    links: Links | None = None
    backward: bool = True
    comm_dtype: Any = None
    tensor_ndim: int | None = None
    shape: tuple[int | None, ...] | None = None
    payload: Declared = None
    dim_mapping: Mapping[str, int] | None = None
    src_placements: Mapping[str, Placement] | None = None
    dest_placements: Mapping[str, Placement] | None = None
    src_lanes: tuple[Index, ...] | None = None
    dest_lanes: tuple[Index, ...] | None = None

    def __attrs_post_init__(self) -> None:
        if self.payload is not None:
            checked_structure(self.payload, self.strategy, self.shape)
        if self.tensor_ndim is not None:
            axis_names(self.tensor_ndim)
        if self.dim_mapping is not None:
            as_axis_of(self.dim_mapping)

    def of_bridge(self) -> dict[str, Any]:
        """The arguments of `BridgeCommunicator` that are the option's own."""
        of_modules = filters.exclude("tensor_ndim", "dim_mapping", "src_placements", "dest_placements")
        return asdict(self, filter=of_modules, recurse=False)


def module_graph(
    topology: Mapping[str, Sequence[str] | None],
    grids: Mapping[str, GridLike],
    placement: Mapping[str, Sequence[int]] | None = None,
) -> ModuleGraph:
    """The graph of stages: a module has one for each entry of its placement, by default for each pipeline rank.

    Raises:
        ModuleGraphError: a cycle, a module without a grid, or a grid without a module.
    """
    edges = {
        src: checked(dsts or (), tuple[Name, ...], f"what {src!r} feeds", ModuleGraphError)
        for src, dsts in topology.items()
    }
    named = {*edges, *(dst for dsts in edges.values() for dst in dsts)}
    if named != set(grids):
        raise ModuleGraphError(f"the topology names modules {sorted(named)}, the grid map {sorted(grids)}")
    depth = {name: dim_size(as_grid(grid, f"the grid of {name!r}"), "pp") for name, grid in grids.items()}
    depth |= {name: len(places) for name, places in (placement or {}).items()}
    return ModuleGraph(depth, {name: edges.get(name, ()) for name in grids})


def total_pipeline_stages(
    topology: Mapping[str, Sequence[str] | None],
    grids: Mapping[str, GridLike],
    *,
    rank: int | None = None,
    module_name: str | None = None,
) -> int:
    """See `MultiModulePipelineCommunicator.compute_total_pipeline_stages`."""
    if not grids:
        raise ModuleGraphError("the topology has no terminal node: it has no modules")
    graph = module_graph(topology, grids)
    before: dict[str, int] = {}
    for name in graph.order:
        feeding = [src for src, dst in graph.edges if dst == name]
        before[name] = max((before[src] + graph.depth(src) for src in feeding), default=0)
    if rank is None:
        return max(before[name] + graph.depth(name) for name in graph.sinks)
    among = list(grids) if module_name is None else [module_name]
    holding = [name for name in among if name in grids and is_in(grids[name], rank)]
    if not holding:
        raise BridgeError(f"rank {rank} is in none of the modules {among}")
    return max(before[name] + place_of(grids[name], rank) + 1 for name in holding)
