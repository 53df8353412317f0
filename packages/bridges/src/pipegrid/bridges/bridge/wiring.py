"""The lanes and groups of a bridge, and the ranks that use them; known before any size is. Pure; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TypeAlias

from attrs import evolve, frozen

from pipegrid.bridges.bridge.structure import Structure
from pipegrid.core import Direction, Edge, LaneSpec
from pipegrid.reshard import AxisNames, End, GridLike, Placement, Route, Side, Strategy, boundary_side, routes
from pipegrid.reshard.errors import BridgeError
from pipegrid.topology import GroupSpec, replica_sizes

Traffic: TypeAlias = frozenset[tuple[Edge, Direction]]
"""The edges that a plan uses, each with the direction."""


@frozen(slots=False)
class BridgeWiring:
    """The lanes and groups of ``rank`` on an edge from ``src`` to ``dst``, of a tensor with these names of ``axes``.

    ``label`` is part of the names of its lanes and groups; ``directions`` are those in which something travels.
    """

    label: str
    src: Side
    dst: Side
    axes: AxisNames
    strategy: Strategy
    directions: tuple[Direction, ...]
    rank: int

    @property
    def leaves(self) -> tuple[BridgeWiring, ...]:
        """The wiring of each leaf: of the one tensor, this."""
        return (self,)

    @cached_property
    def routes(self) -> dict[Direction, tuple[Route, ...]]:
        """The pairs (sending rank, receiving rank) of which this rank is one, ascending, by direction."""
        found = partial(routes, self.src, self.dst, self.axes, strategy=self.strategy, rank=self.rank)
        return {way: found(backward=way is Direction.BACKWARD) for way in self.directions}

    def receivers(self, direction: Direction) -> tuple[int, ...]:
        """The ranks that may receive a part of this rank's tensor in that direction, ascending."""
        return tuple(there for here, there in self.routes.get(direction, ()) if here == self.rank)

    def senders(self, direction: Direction) -> tuple[int, ...]:
        """The ranks that may send this rank a part of its tensor in that direction, ascending."""
        return tuple(here for here, there in self.routes.get(direction, ()) if there == self.rank)

    def lane_spec(self, source: int, destination: int, direction: Direction) -> LaneSpec:
        """The lane from one rank to another."""
        return LaneSpec(source, destination, f"{self.label}/{direction.value}")

    @property
    def lane_specs(self) -> tuple[LaneSpec, ...]:
        """The lanes of this rank."""
        return tuple(self.lane_spec(*route, way) for way in self.directions for route in self.routes[way])

    @property
    def declaration(self) -> str:
        """The text on which both ends of a lane must agree: axes of the tensor, both sides, and the strategy."""
        axes = ", ".join("*".join(names) for names in self.axes)
        return f"[{axes}]: {self.src} > {self.dst}; {self.strategy}"

    def completion_group(self, ranks: Sequence[int], direction: Direction) -> GroupSpec:
        """The group in which these copies complete each other."""
        return group_spec(ranks, self.label, f"complete/{direction.value}")

    def reduction_group(self, ranks: Sequence[int], direction: Direction) -> GroupSpec:
        """The group in which these ranks add up their partial sums."""
        return group_spec(ranks, self.label, f"reduce/{direction.value}")

    @property
    def group_specs(self) -> tuple[GroupSpec, ...]:
        """The groups of this rank."""
        groups: list[GroupSpec] = []
        for direction in self.directions:
            giver, taker = (self.src, self.dst) if direction is Direction.FORWARD else (self.dst, self.src)
            groups += [self.completion_group(copies, direction) for copies in taker.classes.values() if len(copies) > 1]
            groups += [self.reduction_group(ranks, direction) for ranks in giver.partial_groups]
        return tuple(spec for spec in groups if self.rank in spec.ranks)

    @cached_property
    def reductions(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that add up partial sums of an activation with this rank."""
        return tuple(ranks for ranks in self.src.partial_groups if self.rank in ranks)

    def copies(self, direction: Direction) -> tuple[int, ...]:
        """The ranks that receive what this rank receives in that direction, itself included; empty if it is nothing."""
        taker = self.dst if direction is Direction.FORWARD else self.src
        return taker.classes[taker.class_of(self.rank)] if self.rank in taker.coords_of else ()

    @cached_property
    def sizes_from(self) -> int | None:
        """The copy that passes the source's sizes on to this rank (strategy "leader"); None if each has a lane."""
        if self.strategy != "leader" or self.rank not in self.dst.coords_of:
            return None
        copies = self.copies(Direction.FORWARD)
        leader = copies[0]
        pairs = routes(self.src, self.dst, self.axes, strategy="leader", rank=leader)
        held = (self.src.classes[self.src.class_of(here)] for here, there in pairs if there == leader)
        # What all copies hold themselves needs no leader; of the rest it alone hears, from itself where it is a source.
        return leader if len(copies) > 1 and any(not set(copies) <= set(ranks) for ranks in held) else None


@frozen(slots=False)
class PayloadWiring(BridgeWiring):
    """The lanes and groups of an edge with a payload: those of all its leaves, which have sides of their own."""

    structure: Structure

    @cached_property
    def leaves(self) -> tuple[BridgeWiring, ...]:
        """The wiring of each leaf."""
        sides = [leaf.sides(self.src, self.dst) for leaf in self.structure.leaves]
        return tuple(
            BridgeWiring(self.label, *both, leaf.axes, self.strategy, self.directions, self.rank)
            for leaf, both in zip(self.structure.leaves, sides, strict=True)
        )

    @cached_property
    def routes(self) -> dict[Direction, tuple[Route, ...]]:
        """The pairs of ranks between which some leaf may travel, by direction."""
        return {
            direction: tuple(sorted({route for leaf in self.leaves for route in leaf.routes[direction]}))
            for direction in self.directions
        }

    @property
    def declaration(self) -> str:
        """The text on which both ends of a lane must agree: payload and both sides."""
        return f"{self.structure}: {self.src} > {self.dst}"

    @property
    def group_specs(self) -> tuple[GroupSpec, ...]:
        """The groups of this rank."""
        return tuple(dict.fromkeys(spec for leaf in self.leaves for spec in leaf.group_specs))

    @cached_property
    def reductions(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that add up partial sums of some leaf with this rank."""
        return tuple(dict.fromkeys(ranks for leaf in self.leaves for ranks in leaf.reductions))

    def copies(self, direction: Direction) -> tuple[int, ...]:
        """The ranks with which this rank completes some leaf, itself included."""
        return tuple(sorted({rank for leaf in self.leaves for rank in leaf.copies(direction)}))


def boundary_sides(
    grids: tuple[GridLike, GridLike],
    *,
    names: tuple[str | None, str | None],
    placements: tuple[Mapping[str, Placement] | None, Mapping[str, Placement] | None],
    stages: tuple[int | None, int | None],
    lanes: tuple[Sequence[int] | None, Sequence[int] | None],
    stage_dim: str = "pp",
) -> tuple[Side, Side]:
    """The sides of an edge, source first; see `boundary_side`.

    Where the source alone declares its replicas, those of the destination are `replica_sizes`. `BridgeError`: the two
    sides declare different numbers of samples, or a replica of the destination has none.
    """
    ends: tuple[End, End] = ("source", "destination")
    src, dst = (
        boundary_side(grid, end, placements=placed, name=name, stage_dim=stage_dim, stage=stage, lane_weights=weights)
        for grid, end, placed, name, stage, weights in zip(grids, ends, placements, names, stages, lanes, strict=True)
    )
    given, wanted = src.lane_weights, dst.lane_weights
    if len({sum(declared) for declared in (given, wanted) if declared is not None}) > 1 or not all(wanted or ()):
        raise BridgeError(
            f"{src.name} > {dst.name}: src_lanes {given} and dest_lanes {wanted} must hold the same batch, and each "
            "destination replica some of it"
        )
    if wanted is None and given is not None and sum(given) >= dst.num_lanes:
        dst = evolve(dst, lane_weights=replica_sizes(sum(given), dst.num_lanes))
    return src, dst


def group_spec(ranks: Sequence[int], label: str, what: str) -> GroupSpec:
    """A group of a bridge's own, for its traffic alone."""
    return GroupSpec(tuple(ranks), f"{label}/{what}", shared=False)


def directions_of(edge: Edge, *, backward: bool, traffic: Traffic | None) -> tuple[Direction, ...]:
    """The directions of an edge that need lanes: those that ``traffic`` lists, or, where it is None, all it has."""
    has = tuple(Direction) if backward else (Direction.FORWARD,)
    return has if traffic is None else tuple(direction for direction in has if (edge, direction) in traffic)


def checked_traffic(traffic: Iterable[tuple[Edge, Direction]] | None, edges: Iterable[Edge]) -> Traffic | None:
    """The edges and directions that a plan uses, as a set; `BridgeError` where an edge is not among ``edges``."""
    if traffic is None:
        return None
    found, known = frozenset(traffic), sorted(edges)
    if unknown := ", ".join(map(str, sorted({edge for edge, _ in found} - set(known)))):
        raise BridgeError(f"traffic has edges {unknown}; the stages are joined by {', '.join(map(str, known))}")
    return found
