"""Lanes as plain data: ends, counts, the communicators that they share, and those that a pipeline needs. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from attrs import define, field, frozen

from pipegrid.core.edge import Direction, Edge
from pipegrid.core.errors import P2PUsageError
from pipegrid.core.fields import Index, Rule, checked, checked_fields
from pipegrid.core.graph import ModuleGraph

_LABEL_BYTES = 4096


def _label(value: Any) -> str:
    if not isinstance(value, str) or len(value.encode()) > _LABEL_BYTES:  # UnicodeEncodeError is a ValueError
        raise ValueError
    return value


@frozen(order=True, field_transformer=checked_fields(P2PUsageError))
class LaneSpec:
    """Traffic from one rank to another.

    Attributes:
        source: the global rank that sends.
        destination: the global rank that receives.
        label: tells apart lanes of the same ranks; part of the names of groups and threads and of every error.

    Examples:
        >>> lane = LaneSpec(3, 1, "images")
        >>> str(lane), lane.pair
        ('3>1[images]', (1, 3))
    """

    source: Index
    destination: Index
    label: Annotated[str, Rule(_label, f"a string of at most {_LABEL_BYTES} bytes in UTF-8")] = ""

    def __str__(self) -> str:
        return f"{self.source}>{self.destination}" + (f"[{self.label}]" if self.label else "")

    @property
    def is_local(self) -> bool:
        """Whether both ends are one rank: a copy, without a process group."""
        return self.source == self.destination

    @property
    def pair(self) -> tuple[int, int]:
        """Both ranks, ascending: the key of a shared communicator."""
        return min(self.source, self.destination), max(self.source, self.destination)


def opening_key(ranks: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """The place of a pair of ranks, or of the members of a communicator, in the one order in which all ranks open.

    A key of the ranks alone (ascending), and another for each set: every rank, whichever lanes it knows, connects its
    own in a restriction of one total order, which cannot deadlock (`creation_order` of topology).

    Pairs come by distance, and those of one distance ``d`` in two rounds: ``a // d`` is even for one end of a pair
    and odd for the other, so no rank is in two pairs of a round. A chain of ranks, of any stride, opens in two rounds,
    and the way from its last rank to its first is a third. Where all ranks of two sides pair up, a rank waits for at
    most two rounds for each distance that occurs.
    """
    distance = ranks[-1] - ranks[0]
    return distance, ranks[0] // distance % 2 if distance else 0, ranks


@frozen(kw_only=True)
class LaneStats:
    """Counts of one end of a lane since it was opened.

    Attributes:
        messages: payloads sent, or received.
        transfers: tensors moved for them.
        bytes: size of these tensors.
        headers: announcements sent or received beside them, on a CPU group.
        host_syncs: waits of the host for anything but the payload it asked for: a header, or a device.
        allocations: receives that got new buffers. Where all buffers are released, the number of buffers that were in
            use at once.
        live: receives whose buffers were not released.

    Examples:
        >>> LaneStats(messages=2, bytes=64).messages
        2
    """

    messages: int = 0
    transfers: int = 0
    bytes: int = 0
    headers: int = 0
    host_syncs: int = 0
    allocations: int = 0
    live: int = 0


@define(eq=False)
class Tally:
    """The counts of a lane while they grow; see `LaneStats`."""

    transfers: int = 0
    bytes: int = 0
    headers: int = 0
    host_syncs: int = 0
    allocations: int = 0
    released: int = 0

    def count(self, tensors: Iterable[Any]) -> None:
        """Count tensors that are moved."""
        for tensor in tensors:
            self.transfers += 1
            self.bytes += tensor.nbytes


@frozen(order=True, cache_hash=True, field_transformer=checked_fields(P2PUsageError))
class PositionLane:
    """One direction of traffic from one position of a plan to another, first in, first out.

    All edges that lead between the two positions in that direction share it.

    Examples:
        >>> from pipegrid.core import Direction
        >>> str(Lane(source=0, destination=1, direction=Direction.FORWARD))
        'F0>1'
    """

    source: Index
    destination: Index
    direction: Direction = field(order=attrgetter("value"))

    def __str__(self) -> str:
        return f"{self.direction.value}{self.source}>{self.destination}"


AnyLane = TypeVar("AnyLane", LaneSpec, PositionLane)


def _joined(lanes: Iterable[AnyLane]) -> list[tuple[AnyLane, ...]]:
    """The lanes parted into sets that have no end in common, each ascending."""
    at: dict[int, list[AnyLane]] = {}
    for lane in lanes:
        part: list[AnyLane] = at.get(lane.source, [])
        other: list[AnyLane] = at.get(lane.destination, [])
        part.append(lane)
        if other is not part:
            part += other
        ends = {lane.source, lane.destination, *(one.source for one in other), *(one.destination for one in other)}
        at.update(dict.fromkeys(ends, part))
    return sorted(tuple(sorted(part)) for part in {id(part): part for part in at.values()}.values())


def _as_communicators(value: Iterable[Iterable[PositionLane]]) -> tuple[tuple[PositionLane, ...], ...]:
    found = sorted(part for lanes in value for part in _joined(lanes))
    every = [lane for lanes in found for lane in lanes]
    if twice := [lane for lane in every if every.count(lane) > 1]:
        raise P2PUsageError(f"lane {twice[0]} is on two communicators; each lane has one")
    return tuple(found)


@frozen
class LaneSharing:
    """The communicators of a plan's lanes: what ``fewest_communicators`` finds. Equal on all ranks of a pipeline.

    Attributes:
        communicators: of each its lanes, each lane once. It joins the positions at their ends; lanes without a common
            end, directly or by others, are on two.
    """

    communicators: tuple[tuple[PositionLane, ...], ...] = field(converter=_as_communicators)

    @property
    def numbers(self) -> Mapping[PositionLane, int]:
        """The number of each lane's communicator."""
        return {lane: number for number, lanes in enumerate(self.communicators) for lane in lanes}

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The positions that each communicator joins, ascending."""
        return tuple(
            tuple(sorted({end for lane in lanes for end in (lane.source, lane.destination)}))
            for lanes in self.communicators
        )


def _rule(value: Any) -> Any:
    if isinstance(value, LaneSharing):
        return LaneSharing(value.communicators)  # without the proof that it came with: the same from another proof
    if not isinstance(value, str) or value not in ("separate", "shared"):
        raise ValueError
    return value


Communicators: TypeAlias = Annotated[
    Literal["separate", "shared"] | LaneSharing,
    Rule(_rule, "'separate' or 'shared', or what fewest_communicators(plan) returns"),
]
"""``separate``: each lane has a communicator of its own; order matters within a lane only.

``shared``: all lanes between two ranks use one communicator; each exchange is one batch, and the batches of the two
ranks match pairwise, in order. Takes less of a GPU and demands more of the plan.

A `LaneSharing`: these communicators, and no lanes but theirs. A batch is one call for each communicator in it.
"""


def communicators_of(
    specs: Iterable[LaneSpec], kind: Communicators, carried: Mapping[LaneSpec, PositionLane]
) -> list[tuple[LaneSpec, ...]]:
    """The lanes of each communicator, ascending.

    Where positions have several ranks, a communicator of the plan is one for each set of ranks that its lanes join.

    `P2PUsageError`: a lane that carries none of the `LaneSharing`; or two of the same ranks that carry one lane of the
    plan, whose messages would follow the order of their labels.
    """
    numbers = kind.numbers if isinstance(kind, LaneSharing) else {}
    bundles: dict[object, list[LaneSpec]] = {}
    seen: dict[object, LaneSpec] = {}
    for spec in sorted(specs):
        key: object = spec.pair if kind == "shared" else spec
        if isinstance(kind, LaneSharing):
            lane = carried.get(spec)
            if lane is None or lane not in numbers:
                what = f"{spec} carries no lane of a plan" if lane is None else f"{spec} carries {lane}"
                raise P2PUsageError(
                    f"communicators has {', '.join(map(str, sorted(numbers)))} of a plan, but lane {what}"
                )
            key = numbers[lane]
            twin = seen.setdefault((spec.source, spec.destination, lane), spec)
            if twin is not spec and len(kind.communicators[key]) > 1:
                raise P2PUsageError(f"lanes {twin} and {spec} both carry lane {lane}, which shares a communicator")
        bundles.setdefault(key, []).append(spec)
    return [part for bundle in bundles.values() for part in _joined(bundle)]


def direction_lane(source_stage_rank: int, destination_stage_rank: int, direction: Direction) -> LaneSpec:
    """The lane of an edge between stages on these global ranks: gradients travel against the edge."""
    if direction is Direction.FORWARD:
        return LaneSpec(source_stage_rank, destination_stage_rank, "forward")
    if direction is Direction.BACKWARD:
        return LaneSpec(destination_stage_rank, source_stage_rank, "backward")
    raise P2PUsageError(f"the direction is {direction!r}; it must be Direction.FORWARD or Direction.BACKWARD")


def require_edge(edge: Any, placement: Sequence[int] | None, edges: Collection[Edge] | None = None) -> None:
    """Raise unless ``edge`` is one of ``edges``, by default of a chain of stages with this placement."""
    if edges is not None:
        if edge not in edges:
            raise P2PUsageError(f"the edge is {edge}; those of the graph are {', '.join(map(str, sorted(edges)))}")
        return
    last = math.inf if placement is None else len(placement) - 1
    if not isinstance(edge, Edge) or edge.destination != edge.source + 1 or not 0 <= edge.source < last:
        raise P2PUsageError(f"the edge is {edge}; it must be an Edge of this pipeline, such as Edge(0, 1)")


def placed(placement: Any, count: int) -> tuple[int, ...]:
    """A checked placement: the index of each of two or more stages in the ``count`` ranks of the pipeline."""
    stages: tuple[int, ...] = checked(placement, tuple[Index, ...], "placement", P2PUsageError)
    if len(stages) < 2 or max(stages) >= count:
        raise P2PUsageError(f"placement is {placement!r}; it must give two or more stages an index below {count} each")
    return stages


def placed_stages(placement: Any, count: int, graph: ModuleGraph | None) -> tuple[int, ...] | None:
    """The index among ``count`` ranks of each stage: as given, of a graph round and round, or None of a chain.

    `P2PUsageError`: as `placed`; or a placement of another number of stages than the graph has.
    """
    if graph is None:
        return None if placement is None else placed(placement, count)
    found = placed([s % count for s in range(graph.num_stages)] if placement is None else placement, count)
    if len(found) != graph.num_stages:
        raise P2PUsageError(
            f"placement is {placement!r}; it must give the {graph.num_stages} stages of the graph a rank"
        )
    return found


def pipeline_lanes(
    ranks: Sequence[int],
    *,
    placement: Sequence[int] | None = None,
    traffic: Iterable[tuple[Edge, Direction]] | None = None,
) -> tuple[LaneSpec, ...]:
    """The lanes of a pipeline on ``ranks`` (global): one per ordered neighbour pair and direction, ascending.

    Args:
        ranks: the ranks of the pipeline, in order.
        placement: the index in ``ranks`` of each stage; None is cyclic, with lanes from the last rank to the first.
        traffic: the edges and directions that a plan uses; None is all of them.
    """
    count = len(ranks)
    stages = tuple(range(count)) if placement is None else placed(placement, count)
    if traffic is None:
        last = count if placement is None else len(stages) - 1
        traffic = [(Edge(stage, stage + 1), direction) for stage in range(last) for direction in Direction]
    lanes = set()
    for edge, direction in traffic:
        if edge.source < 0 or (placement is not None and max(edge.source, edge.destination) >= len(stages)):
            raise P2PUsageError(f"traffic has edge {edge}, but the placement {placement!r} has {len(stages)} stages")
        source, destination = (ranks[stages[stage % len(stages)]] for stage in (edge.source, edge.destination))
        lanes.add(direction_lane(source, destination, direction))
    return tuple(sorted(lanes))


def checked_replicas(
    given: Any, ranks: Sequence[int], communicators: Communicators
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The ranks of the pipeline of each replica, and the replica whose pipeline is on ``ranks``."""
    replicas: tuple[tuple[int, ...], ...] = checked(given, tuple[tuple[Index, ...], ...], "replicas", P2PUsageError)
    every = [rank for row in replicas for rank in row]
    if tuple(ranks) not in replicas or {len(row) for row in replicas} != {len(ranks)} or len({*every}) < len(every):
        raise P2PUsageError(
            f"replicas is {given!r}; it must give each replica {len(ranks)} ranks of its own, one of them {list(ranks)}"
        )
    if isinstance(communicators, LaneSharing):
        raise P2PUsageError(
            "replicas beside communicators of a plan, which have no lanes between replicas; give 'separate' or 'shared'"
        )
    return replicas, replicas.index(tuple(ranks))


def pair_lanes(lanes: Iterable[LaneSpec]) -> set[LaneSpec]:
    """All four lanes between the ranks of each of ``lanes``: of a communicator that they share."""
    return {
        LaneSpec(*ends, direction.name.lower())
        for lane in lanes
        for ends in (lane.pair, lane.pair[::-1])
        for direction in Direction
    }


def carried_lanes(ranks: Sequence[int], lanes: Iterable[LaneSpec]) -> dict[LaneSpec, PositionLane]:
    """The lane of a plan that each of these lanes of a pipeline carries; without those from a rank to itself."""
    return {
        lane: PositionLane(ranks.index(lane.source), ranks.index(lane.destination), Direction[lane.label.upper()])
        for lane in lanes
        if not lane.is_local
    }


def planned_lanes(
    ranks: Sequence[int],
    placement: Sequence[int] | None,
    traffic: Iterable[tuple[Edge, Direction]] | None,
    communicators: Communicators,
    edges: Collection[Edge] | None = None,
) -> tuple[Sequence[LaneSpec], Mapping[LaneSpec, PositionLane]]:
    """The lanes to open, and the lane of a plan that each carries. ``edges`` are those of a graph; None: of a chain.

    Without ``traffic``, of all lanes those for which a plan has ``communicators``; all, where no plan is given. Raises
    `P2PUsageError` where the plan has a lane that the pipeline does not have.
    """
    every = None if edges is None else [(edge, direction) for edge in edges for direction in Direction]
    lanes = pipeline_lanes(ranks, placement=placement, traffic=every if traffic is None else traffic)
    carried = carried_lanes(ranks, lanes)
    if traffic is not None or not isinstance(communicators, LaneSharing):
        return lanes, carried
    if foreign := sorted(communicators.numbers.keys() - carried.values()):
        raise P2PUsageError(
            f"communicators has lane {foreign[0]} of a plan, but these positions are no neighbours in the pipeline: it "
            f"has {', '.join(map(str, sorted(carried.values())))}"
        )
    return [lane for lane in lanes if lane.is_local or carried[lane] in communicators.numbers], carried
