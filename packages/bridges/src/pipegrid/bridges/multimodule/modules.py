"""Modules on grids as one pipeline: the place of each stage, and the length of the pipeline. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from pipegrid.core.edge import Edge
from pipegrid.core.fields import Name, checked
from pipegrid.core.graph import ModuleGraph, ModuleGraphError
from pipegrid.reshard import (
    GridLike,
    as_grid,
)
from pipegrid.reshard.errors import BridgeError


def module_graph(
    topology: Mapping[str, Sequence[str] | None],
    grids: Mapping[str, GridLike],
    placement: Mapping[str, Sequence[int]] | None = None,
    skips: Mapping[str, Sequence[Edge]] | None = None,
) -> ModuleGraph:
    """The graph of stages: a module has one for each entry of its placement, by default for each pipeline rank.

    ``skips``: the edges past stages of each module, of stages counted inside of it.

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
    depth = {name: as_grid(grid, f"the grid of {name!r}").length("pp") for name, grid in grids.items()}
    depth |= {name: len(places) for name, places in (placement or {}).items()}
    graph = ModuleGraph(depth, {name: edges.get(name, ()) for name in grids})
    if not skips:
        return graph
    ends = [(name, edge.source, edge.destination) for name, own in skips.items() for edge in own]
    return evolve(graph, skips=[Edge(graph.stage(name, a), graph.stage(name, b)) for name, a, b in ends])


def total_pipeline_stages(
    topology: Mapping[str, Sequence[str] | None],
    grids: Mapping[str, GridLike],
    *,
    rank: int | None = None,
    module_name: str | None = None,
) -> int:
    """Pipeline ranks on the longest path; with ``rank``, up to and including that rank's place.

    A rank of several modules has its place in ``module_name``; by default the largest of its places counts.
    """
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
    boxes = {name: as_grid(grids[name]) for name in among if name in grids}
    holding = [name for name, box in boxes.items() if rank in box.ranks]
    if not holding:
        raise BridgeError(f"rank {rank} is in none of the modules {among}")
    return max(before[name] + boxes[name].place(rank, "pp") + 1 for name in holding)
