"""Positions (ranks that act alike), and the edges between modules that share ranks. No torch.

Modules on ranks of their own give every stage a position of its own. Where modules share ranks, a rank holds a stage
of each: an encoder on the same ranks as a language model of two stages makes two positions, both with the encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from attrs import frozen

from pipegrid.core import Edge, ModuleGraph
from pipegrid.core.fields import checked_arguments
from pipegrid.reshard.errors import BridgeError
from pipegrid.reshard.side import GridLike, Side, as_grid

Grids: TypeAlias = Mapping[str, GridLike]


@frozen
class Positions:
    """The positions of a job: classes of ranks that hold the same stages.

    Attributes:
        ranks: per position its ranks, ascending. Positions are in the order of the stages they hold, so that stages
            with ranks of their own have their own number.
        placement: per stage the positions that hold it, ascending.

    Examples:
        >>> Positions(ranks=((0, 1), (2,)), placement=((0,), (1,))).placement
        ((0,), (1,))
    """

    ranks: tuple[tuple[int, ...], ...]
    placement: tuple[tuple[int, ...], ...]


def check_places(graph: ModuleGraph, grids: Grids, stage_placement: Mapping[str, Sequence[int]]) -> None:
    """Raise unless each stage has a place in its module's pipeline, and each place a stage.

    Raises:
        BridgeError: some stage or place has none.

    Examples:
        >>> from pipegrid.core import ModuleGraph
        >>> from pipegrid.topology import place
        >>> grids = place({"images": {"dp": 2}, "language": {"pp": 2}}, world_size=4)
        >>> graph = ModuleGraph({"images": 1, "language": 2}, {"images": ["language"]})
        >>> check_places(graph, grids, {"images": [0], "language": [0, 0]})
        Traceback (most recent call last):
            ...
        pipegrid.reshard.errors.BridgeError: module 'language' has 2 stages on places (0, 0), not on 0 to 1
    """
    for what, by_module in (("grids", grids), ("stage_placement", stage_placement)):
        if not by_module.keys() >= set(graph.order):
            raise BridgeError(f"{what} has modules {list(by_module)}; it must have those of the graph, {graph.order}")
    for name in graph.order:
        places, depth = stage_placement[name], as_grid(grids[name]).length("pp")
        if set(places) != set(range(depth)) or len(places) != graph.depth(name):
            raise BridgeError(
                f"module {name!r} has {graph.depth(name)} stages on places {tuple(places)}, not on 0 to {depth - 1}"
            )


@checked_arguments(BridgeError, kinds=True)
def positions_of(graph: ModuleGraph, grids: Grids, stage_placement: Mapping[str, Sequence[int]]) -> Positions:
    """The positions of modules on ``grids``, with their stages at the places of ``stage_placement``.

    Raises:
        BridgeError: as `check_places`.

    Examples:
        >>> from pipegrid.core import ModuleGraph
        >>> from pipegrid.topology import place
        >>> grids = place({"images": {"dp": 2}, "language": {"pp": 2}}, world_size=4)
        >>> graph = ModuleGraph({"images": 1, "language": 2}, {"images": ["language"]})
        >>> positions_of(graph, grids, {"images": [0], "language": [0, 1]}).ranks
        ((0, 1), (2,), (3,))
    """
    check_places(graph, grids, stage_placement)
    held: dict[int, list[int]] = {}
    for name in graph.order:
        at_place: dict[int, list[int]] = {}
        for index, place in enumerate(stage_placement[name]):
            at_place.setdefault(place, []).append(graph.stage(name, index))
        box = as_grid(grids[name])
        for rank in box.ranks:
            held.setdefault(rank, []).extend(at_place[box.place(rank, "pp")])
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(held):
        alike.setdefault(tuple(sorted(held[rank])), []).append(rank)
    ordered = sorted(alike)
    placement = tuple(
        tuple(position for position, stages in enumerate(ordered) if stage in stages)
        for stage in range(graph.num_stages)
    )
    return Positions(tuple(tuple(alike[stages]) for stages in ordered), placement)


@checked_arguments(BridgeError, kinds=True)
def edge_between(graph: ModuleGraph, source: str, destination: str) -> Edge:
    """The edge between stages that joins two modules: from the last stage of the one to the first of the other.

    Examples:
        >>> from pipegrid.core import ModuleGraph
        >>> str(edge_between(ModuleGraph({"images": 2, "language": 2}, {"images": ["language"]}), "images", "language"))
        '1>2'
    """
    return Edge(graph.stage(source, -1), graph.stage(destination, 0))


@checked_arguments(BridgeError, kinds=True)
def collective_edges(
    graph: ModuleGraph, positions: Positions, sides: Iterable[tuple[str, str, Side, Side]]
) -> tuple[Edge, ...]:
    """The edges whose data travels by a collective, ascending: neither messages between positions nor data that stays.

    That is where some rank is on both sides and the ranks do not need just what they have made; and where copies on
    different positions complete each other's part, since they must do so at the same time.
    ``sides`` names each edge with its two sides: source module, destination module, source side, destination side.

    Examples:
        >>> from pipegrid.core import ModuleGraph
        >>> from pipegrid.topology import HyperCommGrid
        >>> grids = HyperCommGrid([2], ["tp"], world_size=2), HyperCommGrid([2], ["dp"], world_size=2)
        >>> edge = "a", "b", boundary_side(grids[0], "source"), boundary_side(grids[1], "destination")
        >>> collective_edges(ModuleGraph({"a": 1, "b": 1}, {"a": ["b"]}), Positions([[0, 1]], [[0], [0]]), [edge])
        (Edge(source=0, destination=1),)
    """
    position_of = {rank: position for position, ranks in enumerate(positions.ranks) for rank in ranks}
    needing = set()
    for source, destination, here, there in sides:
        if alike(here, there):
            continue
        copies = (*here.classes.values(), *there.classes.values(), *here.partial_groups, *there.partial_groups)
        disjoint = set(here.ranks).isdisjoint(there.ranks)
        if not disjoint or any(len({position_of[rank] for rank in ranks}) > 1 for ranks in copies):
            needing.add(edge_between(graph, source, destination))
    return tuple(sorted(needing))


@checked_arguments(BridgeError, kinds=True)
def alike(source: Side, destination: Side) -> bool:
    """Whether every rank needs exactly what it has made, so that nothing has to move.

    Examples:
        >>> from pipegrid.topology import place
        >>> grid = place({"model": {"tp": 2, "dp": 2}}, world_size=4)["model"]
        >>> alike(boundary_side(grid, "source"), boundary_side(grid, "destination"))
        True
    """
    sums = (*source.partial_groups, *destination.partial_groups)
    return _held(source) == _held(destination) and not sums


def _held(side: Side) -> object:
    """A key that is equal for sides whose ranks hold equal parts."""
    return side.base, side.dims, side.lane_weights, side.members
