"""The sharing of communicators by lanes: one word for all lanes, or a `LaneSharing` that a proof found. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from attrs import field, frozen

from pipegrid.core.edge import Direction
from pipegrid.core.errors import P2PUsageError
from pipegrid.core.fields import Index, Rule, checked_fields
from pipegrid.core.spec import LaneSpec


def _direction_key(direction: Direction) -> str:
    return direction.value


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
    direction: Direction = field(order=_direction_key)

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

    Args:
        specs: all lanes between two ranks; with a `LaneSharing`, also those of other ranks.
        kind: the rule by which they share.
        carried: the lane of the plan that each one carries, for a `LaneSharing`.

    Raises:
        P2PUsageError: a lane that carries none of the `LaneSharing`; or two of the same ranks that carry one lane of
            the plan, whose messages would follow the order of their labels.
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
