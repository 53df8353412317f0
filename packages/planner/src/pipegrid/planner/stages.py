"""An arrangement cut into stages: where each lies, and what it costs for each sample of a microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property

from attrs import field, frozen

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.planner.grids import Arrangement, GridPart
from pipegrid.planner.job import Job
from pipegrid.planner.model import CostModel, StageCosts, Times, bandwidth
from pipegrid.plans.plan import stages_on
from pipegrid.reshard import Side, boundary_side, collective_edges, positions_of


@frozen
class PlacedGraph:
    """The graph of modules cut to depth, and the positions of its stages: all that a plan depends on."""

    graph: ModuleGraph
    placement: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]  # per position, its stages


@cache
def placed_graph(
    modules: tuple[tuple[str, tuple[int, ...]], ...], edges: tuple[tuple[str, str], ...], *, colocated: bool
) -> PlacedGraph:
    """The graph of modules (name, pp ranks of its stages) in their order, and the positions of its stages.

    Other dims than pp do not matter, so the positions are those of the smallest grids with these stages.
    """
    graph = ModuleGraph([(name, len(places)) for name, places in modules], edges)
    depths = [max(places) + 1 for _, places in modules]
    parts = [
        GridPart(name, 1, 1, depths[-1] // pp if colocated else 1, pp)
        for (name, _), pp in zip(modules, depths, strict=True)
    ]
    placement = positions_of(graph, Arrangement(tuple(parts), colocated).grids, dict(modules)).placement
    held = stages_on(placement)
    return PlacedGraph(graph, placement, tuple(tuple(held[position]) for position in sorted(held)))


@frozen(slots=False, eq=False)
class Shape:
    """An arrangement cut into stages, for microbatches of any size under any schedule."""

    model: CostModel
    arrangement: Arrangement
    places: tuple[int, ...]  # the pp rank of each stage of the last module
    layouts: tuple[PipelineParallelLayerLayout, ...] = field()  # of each module; by default the balanced ones

    @layouts.default
    def _balanced(self) -> tuple[PipelineParallelLayerLayout, ...]:
        return tuple(
            self.model.layout(part.module, part.tp, part.cp, len(self.stage_places[part.module])) for part in self.parts
        )

    @property
    def job(self) -> Job:
        """The job of the cost model."""
        return self.model.job

    @property
    def parts(self) -> tuple[GridPart, ...]:
        """The modules on their grids, in the order of the graph."""
        return self.arrangement.parts

    @property
    def chunks(self) -> int:
        """Stages of the last module on each of its positions."""
        return len(self.places) // self.parts[-1].pp

    @cached_property
    def stage_places(self) -> dict[str, tuple[int, ...]]:
        """The pp rank of each stage, by module."""
        return {part.module: tuple(range(part.pp)) for part in self.parts[:-1]} | {self.parts[-1].module: self.places}

    @cached_property
    def placed(self) -> PlacedGraph:
        """The graph of stages and their positions; the same object for all shapes with equal ones."""
        return placed_graph(tuple(self.stage_places.items()), self.job.edges, colocated=self.arrangement.colocated)

    @cached_property
    def stages(self) -> tuple[StageCosts, ...]:
        """The stages of all modules, in the order of the graph."""
        cut = zip(self.parts, self.layouts, strict=True)
        return tuple(stage for part, layout in cut for stage in self.model.stages(part, layout))

    @cached_property
    def trained(self) -> tuple[bool, ...]:
        """Whether each stage runs backwards."""
        return tuple(not self.job.module(stage.part.module).frozen for stage in self.stages)

    @cached_property
    def spans(self) -> list[range]:
        """The ranks of each stage: those of all its positions."""
        spans = []
        for part in self.parts:
            size, start = part.ranks // part.pp, self.arrangement.grids[part.module].rank_offset
            spans += [
                range(start + place * size, start + (place + 1) * size) for place in self.stage_places[part.module]
            ]
        return spans

    @cached_property
    def times(self) -> list[Times]:
        """Seconds of F, I and W of each stage for one sample; a boundary on shared ranks is its source's."""
        found = [stage.times for stage in self.stages]
        for edge, seconds in self._collectives.items():
            f, i, w = found[edge.source]
            found[edge.source] = (f + seconds, i + seconds * self.trained[edge.source], w)
        return found

    @cached_property
    def boundaries(self) -> dict[Edge, tuple[str, str]]:
        """The edges between modules, each with its source and its destination."""
        graph = self.placed.graph
        return {
            Edge(graph.stage(source, -1), graph.stage(destination, 0)): (source, destination)
            for source, destination in self.job.edges
        }

    def sides(self) -> Iterator[tuple[Edge, Side, Side]]:
        """The edges between modules, each with its two sides, which have the modules' names."""
        grids, places = self.arrangement.grids, self.stage_places
        for edge, (source, destination) in self.boundaries.items():
            yield (
                edge,
                boundary_side(grids[source], "source", name=source, stage=places[source][-1]),
                boundary_side(grids[destination], "destination", name=destination, stage=places[destination][0]),
            )

    @cached_property
    def _collectives(self) -> dict[Edge, float]:
        """Seconds per sample of each boundary that is a collective: some ranks are on both of its sides."""
        if not self.arrangement.colocated:
            return {}
        graph, grids = self.placed.graph, self.arrangement.grids
        named = [(here.name, there.name, here, there) for _, here, there in self.sides()]
        edges = collective_edges(graph, positions_of(graph, grids, self.stage_places), named)
        ranks = grids[self.parts[-1].module].ranks
        speed = bandwidth(self.job.links, ranks)
        return {
            edge: self.job.module(source).message / len(ranks) / speed
            for edge, (source, _) in self.boundaries.items()
            if edge in edges
        }

    @cached_property
    def collectives(self) -> dict[Edge, str]:
        """The group of each boundary that is a collective, for `lower`."""
        return {edge: f"{edge.source}-{edge.destination}" for edge in self._collectives}

    def message(self, edge: Edge) -> float:
        """Bytes of a sample that each sending rank moves along ``edge``; none where it is a collective."""
        if edge in self._collectives:
            return 0.0
        part = self.stages[edge.source].part
        size = self.job.module(part.module).message
        if edge in self.boundaries:  # each byte crosses once, shared by all ranks of the boundary's smaller side
            ends = part, self.stages[edge.destination].part
            return size / min(one.tp * one.cp * one.dp for one in ends)
        return size / (part.dp * part.cp)

    def bandwidth(self, edge: Edge) -> float:
        """Bytes per second along ``edge``."""
        ends = self.spans[edge.source], self.spans[edge.destination]
        return bandwidth(self.job.links, range(min(span[0] for span in ends), max(span[-1] for span in ends) + 1))

    @cached_property
    def reduction(self) -> float:
        """Seconds of the slowest position's sums of gradients."""
        each = [self.model.reduction(stage) for stage in self.stages]
        return max(sum(each[s] for s in stages) for stages in self.placed.held)

    @cached_property
    def position_bounds(self) -> list[tuple[float, float, float, float, float]]:
        """Lower bounds of the seconds that any plan takes before, after and in the computes of each position.

        For each sample of a microbatch the forwards before its first compute, the backwards after its last, and the I
        of those alone; for the batch F, I and W together, and F and I.
        """
        head, tail, tail_inputs = ([0.0] * len(self.stages) for _ in range(3))
        for edge in sorted(self.placed.graph.stage_edges, key=lambda edge: edge.destination):
            (f, i, w), s, d = self.times[edge.source], edge.source, edge.destination
            head[d] = max(head[d], head[s] + f)
            tail[d] = max(tail[d], tail[s] + i + w)
            tail_inputs[d] = max(tail_inputs[d], tail_inputs[s] + i)
        batch, found = self.job.global_batch, []
        for stages in self.placed.held:
            f, i, w = (sum(self.times[s][kind] for s in stages) * batch for kind in range(3))
            first, last, last_inputs = (min(of[s] for s in stages) for of in (head, tail, tail_inputs))
            found.append((first, last, last_inputs, f + i + w, f + i))
        return found

    @cached_property
    def static(self) -> list[tuple[float, float, float]]:
        """Bytes of parameters, gradients and optimizer states of a rank, by position."""
        sizes = {part: self.model.parameter_bytes(part) for part in self.parts}
        found = []
        for stages in self.placed.held:
            rows = [[self.stages[s].parameters * size for size in sizes[self.stages[s].part]] for s in stages]
            found.append((sum(r[0] for r in rows), sum(r[1] for r in rows), sum(r[2] for r in rows)))
        return found
