"""Modules on grids as one pipeline, as one rank sees it: stages, edges, positions. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from attrs import evolve

from pipegrid.bridges.bridge.options import EdgeOptions
from pipegrid.bridges.bridge.wiring import checked_traffic
from pipegrid.bridges.multimodule.edges import EdgesThere, Ends, ModuleEdges, checked_options, modules_with_backward
from pipegrid.core import Direction, Edge, ModuleGraph, ModuleGraphError, Name, checked
from pipegrid.reshard import GridLike, Placement, as_axis_of, as_grid, axis_names
from pipegrid.reshard.errors import BridgeError
from pipegrid.reshard.positions import Positions, check_places, collective_edges, positions_of


def module_graph(
    topology: Mapping[str, Sequence[str] | None],
    grids: Mapping[str, GridLike],
    placement: Mapping[str, Sequence[int]] | None = None,
    skips: Mapping[str, Sequence[Edge]] | None = None,
) -> ModuleGraph:
    """The graph of stages: a module has one for each entry of its placement, by default for each pipeline rank.

    ``skips``: the edges past stages of each module, of stages counted inside of it. `ModuleGraphError`: a cycle, a
    module without a grid, or a grid without a module.
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


class ModulePipeline:
    """The pipeline of a `MultiModulePipelineCommunicator`; its arguments are that one's. Nothing is sent here.

    Attributes:
        module_to_grid_map: grid of each module.
        topology: the modules that each module feeds.
        graph: of the stages of all modules.
        stage_placement: per module, the place in its pipeline of each of its stages.
        dim_mapping: axes of the modules' outputs.
        module_output_ndim: axes of each module's output, where they are not 3.
        rank: this rank.
        places: this rank's modules, in the order of the graph, with its place in the pipeline of each.
    """

    def __init__(
        self,
        rank: int,
        module_to_grid_map: Mapping[str, GridLike],
        topology: Mapping[str, Sequence[str]],
        dim_mapping: Mapping[str, int] | None = None,
        module_output_ndim: Mapping[str, int] | None = None,
        *,
        edges: Mapping[Ends, EdgeOptions] | None = None,
        placements: Mapping[str, Mapping[str, Placement]] | None = None,
        stage_placement: Mapping[str, Sequence[int]] | None = None,
        traffic: Iterable[tuple[Edge, Direction]] | None = None,
        skips: Mapping[str, Sequence[Edge]] | None = None,
    ) -> None:
        self.rank = rank
        grids = self.module_to_grid_map = dict(module_to_grid_map)
        self.topology = {name: list(topology.get(name) or ()) for name in module_to_grid_map}
        self.dim_mapping = {"s": 1, "b": 0, "h": 2} if dim_mapping is None else as_axis_of(dim_mapping)
        self.module_output_ndim = self._named(module_output_ndim, "module_output_ndim")
        for ndim in self.module_output_ndim.values():
            axis_names(ndim, self._mapping(ndim))
        given = self._named(stage_placement, "stage_placement")
        graph = self.graph = module_graph(topology, grids, given, self._named(skips, "skips"))
        self.stage_placement = {name: tuple(given.get(name, range(graph.depth(name)))) for name in grids}
        check_places(graph, grids, self.stage_placement)
        options = checked_options(edges, graph)
        self._has_backward = modules_with_backward(graph, options)
        placed, used = self._named(placements, "placements"), checked_traffic(traffic, graph.stage_edges)
        self._edges = ModuleEdges(graph, grids, self.stage_placement, options, placed, used)
        boxes = {name: as_grid(grids[name]) for name in graph.order}
        self.places = {name: box.place(rank, "pp") for name, box in boxes.items() if rank in box.ranks}

    def _named(self, given: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
        """Values by module, checked to name modules of the graph."""
        named = dict(given or {})
        if unknown := sorted(set(named) - set(self.module_to_grid_map)):
            raise BridgeError(f"{what} names modules {unknown}; known modules: {sorted(self.module_to_grid_map)}")
        return named

    def _mapping(self, ndim: int) -> Mapping[str, int] | None:
        """The axes of an output: the last one is hidden, a 2-d one is ``[b*s, h]``."""
        if ndim == 2 and max(self.dim_mapping.values()) > 1:
            return None
        return self.dim_mapping

    def _options(self, ends: Ends) -> EdgeOptions:
        """The options of an edge, with those that its modules give."""
        option = self._edges.options[ends]
        declared = 3 if option.shape is None else len(option.shape)
        ndim = option.tensor_ndim or self.module_output_ndim.get(ends[0], declared)
        axes = option.dim_mapping or self._mapping(ndim)
        src, dst = self._edges.placements_at(ends)
        return evolve(option, tensor_ndim=ndim, dim_mapping=axes, src_placements=src, dest_placements=dst)

    @cached_property
    def positions(self) -> Positions:
        """The positions of the job, for the placement of a plan; the same on every rank."""
        return positions_of(self.graph, self.module_to_grid_map, self.stage_placement)

    @cached_property
    def collective_edges(self) -> tuple[Edge, ...]:
        """The edges for which a plan has a ``COLLECTIVE``, ascending: those between modules that share ranks."""
        return collective_edges(self.graph, self.positions, self._edges.sides())

    @cached_property
    def forward_edges(self) -> tuple[Edge, ...]:
        """The edges declared without backward, ascending; the same on every rank."""
        edges = self._edges.by_stages().items()
        return tuple(sorted(edge for edge, ends in edges if not self._edges.options[ends].backward))

    @cached_property
    def payload_edges(self) -> frozenset[Edge]:
        """The edges whose payload is declared, and checked where it is sent; the same on every rank."""
        edges = self._edges.by_stages().items()
        return frozenset(edge for edge, ends in edges if self._edges.options[ends].payload is not None)

    @property
    def frozen_modules(self) -> tuple[str, ...]:
        """Modules that get no gradient, because every edge that leaves them is declared without backward."""
        return tuple(name for name in self.graph.order if not self._has_backward[name])

    @property
    def total_stages(self) -> int:
        """Pipeline ranks on the longest path through the modules."""
        return self.compute_total_pipeline_stages(self.topology, self.module_to_grid_map)

    @staticmethod
    def compute_total_pipeline_stages(
        topology: Mapping[str, Sequence[str]],
        module_to_grid_map: Mapping[str, GridLike],
        rank: int | None = None,
        module_name: str | None = None,
    ) -> int:
        """Pipeline ranks on the longest path; with ``rank``, up to and including that rank's place.

        Of a rank in several modules it is that in ``module_name``, by default the one where that gives most.

        Raises:
            ValueError: the topology has a cycle or no terminal node, or ``rank`` is not there.
        """
        if not module_to_grid_map:
            raise ModuleGraphError("the topology has no terminal node: it has no modules")
        graph = module_graph(topology, module_to_grid_map)
        before: dict[str, int] = {}
        for name in graph.order:
            feeding = [src for src, dst in graph.edges if dst == name]
            before[name] = max((before[src] + graph.depth(src) for src in feeding), default=0)
        if rank is None:
            return max(before[name] + graph.depth(name) for name in graph.sinks)
        among = list(module_to_grid_map) if module_name is None else [module_name]
        boxes = {name: as_grid(module_to_grid_map[name]) for name in among if name in module_to_grid_map}
        holding = [name for name, box in boxes.items() if rank in box.ranks]
        if not holding:
            raise BridgeError(f"rank {rank} is in none of the modules {among}")
        return max(before[name] + boxes[name].place(rank, "pp") + 1 for name in holding)

    def _is_source_module(self, module_name: str) -> bool:
        return module_name in self.graph.sources

    def _is_sink_module(self, module_name: str) -> bool:
        return module_name in self.graph.sinks

    def is_current_rank_in_grid(self, grid: GridLike) -> bool:
        """Whether this rank is in ``grid``."""
        return self.rank in as_grid(grid).ranks

    @property
    def stages(self) -> tuple[int, ...]:
        """The global numbers of the stages on this rank, ascending."""
        return tuple(
            sorted(
                self.graph.stage(name, index)
                for name, here in self.places.items()
                for index, place in enumerate(self.stage_placement[name])
                if place == here
            )
        )

    @property
    def current_stage(self) -> int:
        """The place of this rank on the longest path that leads to it, from 0."""
        return self.compute_total_pipeline_stages(self.topology, self.module_to_grid_map, rank=self.rank) - 1

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this rank holds the first stage of a module that nothing feeds."""
        return any(self._is_source_module(name) and self._holds_end(name, 0) for name in self.places)

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this rank holds the last stage of a module that feeds nothing."""
        return any(self._is_sink_module(name) and self._holds_end(name, -1) for name in self.places)

    def is_module_pp_first_stage(self, module_name: str) -> bool:
        """Whether this rank holds the first stage of a module that it takes part in."""
        self._require_held(module_name)
        return self._holds_end(module_name, 0)

    def is_module_pp_last_stage(self, module_name: str) -> bool:
        """Whether this rank holds the last stage of a module that it takes part in."""
        self._require_held(module_name)
        return self._holds_end(module_name, -1)

    def _require_held(self, module_name: str) -> None:
        if module_name not in self.places:
            raise BridgeError(f"this rank is not in module {module_name!r}; it is in {list(self.places)}")

    def _ends_here(self) -> dict[str, tuple[EdgesThere, EdgesThere]]:
        """The edges at this rank's stages, by module in the order of the graph."""
        inside = {edge: (name, name) for name in self.places for edge in self.graph.edges_inside(name)}
        modules, held = {**inside, **self._edges.by_stages()}, set(self.stages)
        into = [(edge, ends) for edge, ends in modules.items() if edge.destination in held]
        out = [(edge, ends) for edge, ends in modules.items() if edge.source in held]
        return {
            name: (
                tuple((edge, src) for edge, (src, dst) in into if dst == name),
                tuple((edge, dst) for edge, (src, dst) in out if src == name),
            )
            for name in self.places
        }

    def _holds_end(self, module_name: str, end: int) -> bool:
        """Whether this rank holds the first (0) or the last (-1) stage of the module."""
        place: int = self.stage_placement[module_name][end]
        return place == self.places[module_name]
