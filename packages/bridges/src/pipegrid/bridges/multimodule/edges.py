"""The edges between modules as they are declared: options, sides, directions. The same on every rank; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from attrs import frozen

from pipegrid.bridges.bridge.options import EdgeOptions
from pipegrid.bridges.bridge.wiring import Traffic, boundary_sides
from pipegrid.core import Edge, ModuleGraph
from pipegrid.core.fields import checked, instance
from pipegrid.reshard import REPLICAS, BridgeError, GridLike, Placement, Side, alike, as_grid, edge_between

Ends = tuple[str, str]
"""The modules of an edge: source, destination."""
EdgesThere = tuple[tuple[Edge, str], ...]
"""Edges of a stage, each with the module at its other end."""

_OPTIONS = Annotated[EdgeOptions, instance(EdgeOptions, "EdgeOptions(...)")]


def checked_options(given: Mapping[Ends, EdgeOptions] | None, graph: ModuleGraph) -> dict[Ends, EdgeOptions]:
    """The options of every edge of ``graph``.

    `BridgeError`: options for no edge of it, or a gradient that would have to pass a module without backward.
    """
    edges = dict(given or {})
    if unknown := [edge for edge in edges if edge not in graph.edges]:
        raise BridgeError(f"options for edges {unknown}, but the topology has {list(graph.edges)}")
    options: dict[Ends, EdgeOptions] = {
        edge: checked(edges.get(edge, EdgeOptions()), _OPTIONS, f"the options of edge {edge}", BridgeError)
        for edge in graph.edges
    }
    trained = modules_with_backward(graph, options)
    for (src, dst), option in options.items():
        if option.backward and not trained[dst]:
            raise BridgeError(f"edge {src!r} -> {dst!r} has a backward, but no gradient ever reaches {dst!r}")
    return options


def modules_with_backward(graph: ModuleGraph, options: Mapping[Ends, EdgeOptions]) -> dict[str, bool]:
    """Whether a gradient reaches each module: a sink, or one with an edge that has a backward."""
    return {
        name: name in graph.sinks or any(option.backward for (src, _), option in options.items() if src == name)
        for name in graph.order
    }


@frozen(eq=False)
class ModuleEdges:
    """The edges between the modules of a job, as `MultiModulePipelineCommunicator` is given them."""

    graph: ModuleGraph
    grids: Mapping[str, GridLike]
    stage_placement: Mapping[str, tuple[int, ...]]
    options: Mapping[Ends, EdgeOptions]
    placements: Mapping[str, Mapping[str, Placement]]
    traffic: Traffic | None

    def in_order(self) -> list[Ends]:
        """The edges in the order of the graph: that of their bridges on every rank."""
        return sorted(self.graph.edges, key=lambda edge: tuple(map(self.graph.order.index, edge)))

    def by_stages(self) -> dict[Edge, Ends]:
        """The modules of each edge between their stages."""
        return {edge_between(self.graph, *ends): ends for ends in self.in_order()}

    def placements_at(self, ends: Ends) -> tuple[dict[str, Placement], dict[str, Placement]]:
        """The placements of the source's and the destination's dims at an edge: the module's, and the edge's own."""
        (src, dst), option = ends, self.options[ends]
        return (
            {**self.placements.get(src, {}), **(option.src_placements or {})},
            {**self.placements.get(dst, {}), **(option.dest_placements or {})},
        )

    def stages(self, ends: Ends) -> tuple[int, int]:
        """The places of the source's last stage and the destination's first, in their pipelines."""
        return self.stage_placement[ends[0]][-1], self.stage_placement[ends[1]][0]

    def boundary(self, ends: Ends) -> tuple[Side, Side]:
        """The source's and the destination's side of an edge."""
        option = self.options[ends]
        return boundary_sides(
            (self.grids[ends[0]], self.grids[ends[1]]),
            names=ends,
            placements=self.placements_at(ends),
            stages=self.stages(ends),
            lanes=(option.src_lanes, option.dest_lanes),
        )

    def replica_of(self, rank: int, *, wanted: bool) -> tuple[int | None, int]:
        """The replica of ``rank``, and their number, where units move between replicas (``wanted``), else None and 0.

        `BridgeError` on every rank alike: modules with other numbers of replicas, or a rank in two of them; or a
        boundary that replicas share otherwise than in equal parts.
        """
        if not wanted:
            return None, 0
        boxes = {name: as_grid(grid) for name, grid in self.grids.items()}
        sizes = {name: box.length(REPLICAS) for name, box in boxes.items()}
        if len({*sizes.values()}) > 1:
            raise BridgeError(
                f"replicas=True, and the modules have dp {sizes}: units move where each has as many replicas"
            )
        for ends in self.options:
            for side in self.boundary(ends):
                side.replica_dim  # noqa: B018 -- raises where replicas are not parts of the batch
        places: dict[int, set[int]] = {}
        for box in boxes.values():
            for one in box.ranks:
                places.setdefault(one, set()).add(box.place(one, REPLICAS))
        for one, found in places.items():
            if len(found) > 1:
                raise BridgeError(
                    f"rank {one} is in replicas {sorted(found)} of its modules; where units move it is in one"
                )
        return min(places.get(rank, {0})), max(sizes.values())

    def sides(self) -> Iterator[tuple[str, str, Side, Side]]:
        """Both sides of every edge; of a payload that moves, those of each of its leaves."""
        for ends, option in self.options.items():
            both, structure = self.boundary(ends), option.structure
            moved = [both]
            if structure is not None and not alike(*both):
                moved = [leaf.sides(*both) for leaf in structure.leaves]
            for sides in moved:
                yield (*ends, *sides)

    def require_dicts(self) -> None:
        """Raise, on every rank alike, unless each rank can exchange dicts by module.

        `BridgeError`: a module with several stages on one place; a rank that holds a module and one that depends on it,
        and so would wait for a tensor before it sends what that is made of; or a rank that holds two modules with one
        source, whose name is the key of one entry.
        """
        needs: dict[str, set[str]] = {}
        boxes = {name: as_grid(grid) for name, grid in self.grids.items()}
        for name in self.graph.order:
            stages, places = len(self.stage_placement[name]), boxes[name].length("pp")
            if stages > places:
                raise BridgeError(f"module {name!r} has {stages} stages on {places} places: use isend with edges")
            feeding = {src for src, dst in self.graph.edges if dst == name}
            needs[name] = feeding.union(*(needs[src] for src in feeding))
            for source in sorted(needs[name]):
                if shared := sorted({*boxes[source].ranks} & {*boxes[name].ranks}):
                    raise BridgeError(
                        f"rank {shared[0]} holds {source!r} as well as {name!r}, which it feeds, and would wait for "
                        "itself: use isend and irecv with edges"
                    )
        fed: dict[tuple[str, int], str] = {}
        for src, dst in self.in_order():
            for rank in self.boundary((src, dst))[1].ranks:
                if (other := fed.setdefault((src, rank), dst)) != dst:
                    raise BridgeError(
                        f"rank {rank} holds {other!r} and {dst!r}, which {src!r} feeds both, and a dict has one entry "
                        f"{src!r}: use isend and irecv with edges"
                    )
