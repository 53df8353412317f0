"""A choice of grids, layout, schedule and microbatch size: its plan of computes, its costs, its figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Annotated, TypeAlias

from attrs import field, frozen

from pipegrid.bridges import ModuleGraph, Side, boundary_side, collective_edges, positions_of
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.planner.model import CostModel, Part, Stage, Times, bandwidth
from pipegrid.schedules import ActionKind, Costs, Plan, Simulation, schedule_for, simulate
from pipegrid.schedules.verify import dataflow_of
from pipegrid.topology.fields import instance
from pipegrid.topology.grid import Grid
from pipegrid.transport.edge import Edge


@frozen(slots=False)
class Arrangement:
    """A grid for each module, in the order of the graph: each on ranks of its own, or all on those of the last."""

    parts: tuple[Part, ...]
    colocated: bool = False

    @property
    def gpus(self) -> int:
        """Ranks of all modules together."""
        return self.parts[-1].ranks if self.colocated else sum(part.ranks for part in self.parts)

    @cached_property
    def grids(self) -> dict[str, Grid]:
        """The grids. Modules apart lie by descending tp x cp, so that groups of powers of two do not cross nodes."""
        offset, found = 0, {}
        for part in sorted(self.parts, key=lambda part: -part.tp * part.cp):
            found[part.module] = part.grid(offset)
            offset += 0 if self.colocated else part.ranks
        return {part.module: found[part.module] for part in self.parts}

    def __str__(self) -> str:
        """Each grid by its sizes above 1."""
        texts = []
        for part in self.parts:
            sizes = [(name, getattr(part, name)) for name in ("tp", "cp", "dp", "pp")]
            texts.append(" ".join([f"{name}={size}" for name, size in sizes if size > 1] or ["1 rank"]))
        return (" & " if self.colocated else " | ").join(texts)


@frozen
class Memory:
    """Bytes of a rank of one position."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    communicators: float
    reserved: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.communicators + self.reserved


def in_flight(plan: Plan) -> tuple[int, ...]:
    """Per stage, the most microbatches whose activations it holds at once."""
    peaks = [0] * plan.num_stages
    for position in range(plan.num_positions):
        live: Counter[int] = Counter()
        for action in plan.actions(position):
            if action.kind is ActionKind.F:
                live[action.stage] += 1
                peaks[action.stage] = max(peaks[action.stage], live[action.stage])
                live[action.stage] -= action.stage in plan.forward_only
            elif action.kind in {ActionKind.B, ActionKind.W}:
                live[action.stage] -= 1
    return tuple(peaks)


@frozen(slots=False)
class Wiring:
    """The graph of modules cut to depth, and the positions of its stages, which `positions_of` numbers alike."""

    graph: ModuleGraph
    placement: tuple[tuple[int, ...], ...]

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Per position, its stages."""
        held: dict[int, list[int]] = {}
        for stage, places in enumerate(self.placement):
            for position in places:
                held.setdefault(position, []).append(stage)
        return tuple(tuple(held[position]) for position in sorted(held))

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The edges between stages."""
        return self.graph.stage_edges


@cache
def wiring(
    modules: tuple[tuple[str, int], ...],
    edges: tuple[tuple[str, str], ...],
    places: tuple[tuple[int, ...], ...],
    *,
    colocated: bool,
) -> Wiring:
    """The wiring of modules (name, depth) in the order of the graph, whose stages lie at ``places`` of each grid."""
    graph = ModuleGraph(modules, edges)
    placement: list[tuple[int, ...]] = []
    everywhere, first = tuple(range(max(places[-1]) + 1)), 0
    for own in places:
        if colocated and max(own) < max(places[-1]):  # a grid without pp on the ranks of one with it
            placement.append(everywhere)
            continue
        placement += [(first + place,) for place in own]
        first += 0 if colocated else max(own) + 1
    return Wiring(graph, tuple(placement))


class Shape:
    """An arrangement cut into stages: where each lies, what it costs. Microbatches of any size, any schedule of a kind.

    ``places``: of the stages of the last module.
    """

    def __init__(
        self,
        model: CostModel,
        arrangement: Arrangement,
        places: tuple[int, ...],
        layouts: Sequence[PipelineParallelLayerLayout] | None = None,
    ) -> None:
        self.model, self.arrangement, self.job, self.places = model, arrangement, model.job, places
        self.parts = arrangement.parts
        depths = [*(part.pp for part in self.parts[:-1]), len(places)]
        if layouts is None:
            found = (model.layout(p.module, p.tp, p.cp, depth) for p, depth in zip(self.parts, depths, strict=True))
            layouts = [layout for layout in found if layout is not None]
        self.layouts = tuple(layouts)
        names = tuple((part.module, depth) for part, depth in zip(self.parts, depths, strict=True))
        each = (*(tuple(range(part.pp)) for part in self.parts[:-1]), places)
        self.wiring = wiring(names, self.job.edges, each, colocated=arrangement.colocated)
        self.stages: list[Stage] = []
        self.part_of: list[Part] = []
        for part, layout in zip(self.parts, self.layouts, strict=True):  # in the order of the graph
            stages = model.stages(part.module, part.tp, part.cp, layout)
            self.stages += stages
            self.part_of += [part] * len(stages)

    def plan(self, schedule: str, microbatch: int) -> Plan:
        """The schedule's plan of computes."""
        return schedule_for(
            self.wiring.graph,
            schedule,
            self.job.global_batch // microbatch,
            placement=self.wiring.placement,
            forward_only=[module.name for module in self.job.modules if module.frozen],
        )

    @cached_property
    def spans(self) -> list[range]:
        """Per stage, its ranks: those of all its positions."""
        spans = []
        for part, at in zip(self.part_of, self._index, strict=True):
            size, start = part.ranks // part.pp, self.arrangement.grids[part.module].rank_offset
            place = self.places[at] if part is self.parts[-1] else at
            spans.append(range(start + place * size, start + (place + 1) * size))
        return spans

    @cached_property
    def _index(self) -> list[int]:
        """Per stage, its number in its module."""
        seen: Counter[str] = Counter()
        index = []
        for part in self.part_of:
            index.append(seen[part.module])
            seen[part.module] += 1
        return index

    @cached_property
    def times(self) -> list[Times]:
        """Per stage, seconds of F, I and W for each sample of a microbatch, shared by its ranks.

        A boundary of modules that share ranks belongs to its source.
        """
        found = []
        for stage, part in zip(self.stages, self.part_of, strict=True):
            f, i, w = stage.times
            found.append((f / part.dp, i / part.dp, w / part.dp))
        for edge, seconds in self._collectives.items():
            f, i, w = found[edge.source]
            trained = not self.job.module(self.part_of[edge.source].module).frozen
            found[edge.source] = (f + seconds, i + seconds * trained, w)
        return found

    @cached_property
    def _boundaries(self) -> dict[Edge, tuple[Part, Part]]:
        graph, found = self.wiring.graph, {}
        for source, destination in self.job.edges:
            edge = Edge(graph.stage(source, -1), graph.stage(destination, 0))
            found[edge] = self.part_of[edge.source], self.part_of[edge.destination]
        return found

    @property
    def stage_places(self) -> dict[str, tuple[int, ...]]:
        """Per module, the pp rank of each stage."""
        return {part.module: self.places if part is self.parts[-1] else tuple(range(part.pp)) for part in self.parts}

    @property
    def sides(self) -> Iterator[tuple[str, str, Side, Side]]:
        """Each edge between modules with its two sides: source, destination, side of the one and of the other."""
        grids, places = self.arrangement.grids, self.stage_places
        for source, destination in self.job.edges:
            yield (
                source,
                destination,
                boundary_side(grids[source], "source", name=source, stage=places[source][-1]),
                boundary_side(grids[destination], "destination", name=destination, stage=places[destination][0]),
            )

    @cached_property
    def _collectives(self) -> dict[Edge, float]:
        """Seconds per sample of each boundary that is a collective: some ranks are on both of its sides."""
        if not self.arrangement.colocated:
            return {}
        graph, grids = self.wiring.graph, self.arrangement.grids
        edges = collective_edges(graph, positions_of(graph, grids, self.stage_places), self.sides)
        ranks = grids[self.parts[-1].module].ranks
        speed = bandwidth(self.job.links, ranks)
        return {
            edge: self.job.module(source.module).message / len(ranks) / speed
            for edge, (source, _) in self._boundaries.items()
            if edge in edges
        }

    @property
    def collectives(self) -> dict[Edge, str]:
        """The group of each boundary that is a collective, for `lower`."""
        return {edge: f"{edge.source}-{edge.destination}" for edge in self._collectives}

    def message(self, edge: Edge) -> float:
        """Bytes of a sample that each sending rank moves along ``edge``; none where it is a collective."""
        if edge in self._collectives:
            return 0.0
        part = self.part_of[edge.source]
        size = self.job.module(part.module).message
        if edge in self._boundaries:  # each byte crosses once, shared by all ranks of the boundary's smaller side
            return size / min(one.tp * one.cp * one.dp for one in self._boundaries[edge])
        return size / (part.dp * part.cp)

    def costs(self, microbatch: int) -> Costs:
        """Costs of the plan: seconds, and bytes of activations per microbatch and rank."""
        speeds = []
        for edge in self.wiring.edges:
            ends = [self.spans[edge.source], self.spans[edge.destination]]
            ranks = range(min(span[0] for span in ends), max(span[-1] for span in ends) + 1)
            speeds.append((edge, bandwidth(self.job.links, ranks)))
        joined = [0.0] * len(self.stages)  # latency of the collectives that belong to a stage
        for edge in self._collectives:
            joined[edge.source] += self.job.links.latency
        trained = [not self.job.module(part.module).frozen for part in self.part_of]
        return Costs(
            F=tuple(f * microbatch + once for (f, _, _), once in zip(self.times, joined, strict=True)),
            I=tuple(
                i * microbatch + once * back for (_, i, _), once, back in zip(self.times, joined, trained, strict=True)
            ),
            W=tuple(w * microbatch for _, _, w in self.times),
            latency=self.job.links.latency,
            overhead=self.job.device.overhead,
            bandwidth=tuple(speeds) or math.inf,
            message=tuple((edge, self.message(edge) * microbatch) for edge in self.wiring.edges) or 0.0,
            activation=tuple(size * microbatch for size in self.activations),
        )

    @cached_property
    def activations(self) -> list[float]:
        """Per stage, bytes of a rank for each sample of a microbatch."""
        return [stage.activations / part.dp for stage, part in zip(self.stages, self.part_of, strict=True)]

    @cached_property
    def reduction(self) -> float:
        """Seconds of the slowest position's sums of gradients."""
        each = [self.model.reduction(p, stage.parameters) for stage, p in zip(self.stages, self.part_of, strict=True)]
        return max(sum(each[s] for s in stages) for stages in self.wiring.held)

    def lower_bound(self, microbatch: int, *, split: bool) -> float:
        """Seconds that no plan of this shape, with backwards whole or ``split``, is faster than.

        A position begins when the forwards before it are done, and does all its work; after its last backward come
        those of the stages before it. With split backwards, its weight halves may come later.
        """
        bound = 0.0
        for first, last, last_inputs, work, inputs in self._bounds:
            whole = microbatch * first + work
            if split:
                bound = max(bound, whole, microbatch * (first + last_inputs) + inputs)
            else:
                bound = max(bound, whole + microbatch * last)
        return bound + self.reduction

    @cached_property
    def _bounds(self) -> list[tuple[float, float, float, float, float]]:
        """Per position: seconds before its first compute and after its last, per sample; of all its work."""
        head, tail, tail_inputs = ([0.0] * len(self.stages) for _ in range(3))
        for edge in sorted(self.wiring.edges, key=lambda edge: edge.destination):
            (f, i, w), s, d = self.times[edge.source], edge.source, edge.destination
            head[d] = max(head[d], head[s] + f)
            tail[d] = max(tail[d], tail[s] + i + w)
            tail_inputs[d] = max(tail_inputs[d], tail_inputs[s] + i)
        batch, found = self.job.global_batch, []
        for stages in self.wiring.held:
            f, i, w = (sum(self.times[s][kind] for s in stages) * batch for kind in range(3))
            first, last, last_inputs = (min(of[s] for s in stages) for of in (head, tail, tail_inputs))
            found.append((first, last, last_inputs, f + i + w, f + i))
        return found

    @cached_property
    def static(self) -> list[tuple[float, float, float]]:
        """Per position, bytes of parameters, gradients and optimizer states of a rank."""
        sizes = {part: self.model.parameter_bytes(part) for part in self.parts}
        found = []
        for stages in self.wiring.held:
            rows = [[self.stages[s].parameters * size for size in sizes[self.part_of[s]]] for s in stages]
            found.append((sum(r[0] for r in rows), sum(r[1] for r in rows), sum(r[2] for r in rows)))
        return found

    def communicators(self, plan: Plan, microbatch: int) -> list[float]:
        """Per position, bytes of a rank's communicators, and of two messages on each of its lanes."""
        buffer, found = self.job.device.communicator, []
        for stages in self.wiring.held:
            parts = {self.part_of[s] for s in stages}
            found.append(buffer * sum((part.tp > 1) + (part.cp > 1) + (part.dp > 1) for part in parts))
        for flow in dataflow_of(plan).crossing:
            if flow.edge in self._collectives:
                continue
            for route in flow.routes:
                for position in route:
                    found[position] += buffer + 2 * self.message(flow.edge) * microbatch
        return found

    def memory(self, plan: Plan, microbatch: int, activations: Sequence[float]) -> tuple[Memory, ...]:
        """Per position, bytes of a rank that holds ``activations`` at its peak."""
        reserved = self.job.device.reserved
        rows = zip(self.static, activations, self.communicators(plan, microbatch), strict=True)
        return tuple(Memory(*static, live, buffers, reserved) for static, live, buffers in rows)

    def choice(self, plan: Plan, schedule: str, microbatch: int) -> Choice:
        """The figures of ``plan``, which is this shape's own."""
        costs = self.costs(microbatch)
        simulation = simulate(plan, costs)
        return Choice(
            self,
            schedule,
            microbatch,
            plan,
            costs,
            simulation.makespan,
            max(simulation.busy),
            simulation.bubble(),
            self.memory(plan, microbatch, simulation.peaks()),
        )


@frozen(slots=False, eq=False)
class Choice:
    """A shape under a schedule, with its figures in simulation; times in seconds, memory in bytes.

    ``microbatch``: samples, over all data lanes. ``busy``: computes of the busiest position. ``bubble``: idle share of
    all positions. ``memory``: per position, of each rank.
    """

    shape: Shape = field(repr=False)
    schedule: str
    microbatch: int
    plan: Plan = field(repr=False)
    costs: Costs = field(repr=False)
    makespan: float
    busy: float
    bubble: float
    memory: tuple[Memory, ...] = field(repr=False)

    @property
    def arrangement(self) -> Arrangement:
        """The grids."""
        return self.shape.arrangement

    @property
    def layouts(self) -> dict[str, str]:
        """The layout of each module, as its canonical text."""
        parts = zip(self.shape.parts, self.shape.layouts, strict=True)
        return {part.module: str(layout) for part, layout in parts}

    @property
    def reduction(self) -> float:
        """Seconds of the sums of gradients over dp and cp, on the slowest position."""
        return self.shape.reduction

    @property
    def step(self) -> float:
        """Predicted seconds of a training step, without the optimizer's own: ``makespan + reduction``."""
        return self.makespan + self.reduction

    @property
    def peak(self) -> float:
        """Bytes of a rank of the fullest position."""
        return max(memory.total for memory in self.memory)

    @property
    def simulation(self) -> Simulation:
        """The plan at these costs."""
        return simulate(self.plan, self.costs)


GivenChoice: TypeAlias = Annotated[Choice, instance(Choice, "a Choice, such as plan(job, gpus=8).winner")]
