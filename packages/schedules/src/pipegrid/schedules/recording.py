"""What the clock said when a plan ran: per rank, when each action started and ended."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen

from pipegrid.schedules.plan import Plan
from pipegrid.schedules.timelines import TimelineError


@frozen
class Recorded:
    """An action of a position (its place in `Plan.actions`) took from ``start`` to ``end``, in seconds.

    For a message, that is from posting to completion.
    """

    index: int
    start: float
    end: float


@frozen
class Aside:
    """Something that a rank did beside its plan, such as loading data or the optimizer's step, in seconds."""

    name: str
    start: float
    end: float


def _recorded(value: Iterable[Recorded]) -> tuple[Recorded, ...]:
    return tuple(value)


def _asides(value: Iterable[Aside]) -> tuple[Aside, ...]:
    return tuple(value)


@frozen
class Track:
    """What ``rank``, which holds ``position``, did."""

    rank: int
    position: int
    actions: tuple[Recorded, ...] = field(converter=_recorded)
    asides: tuple[Aside, ...] = field(converter=_asides, default=())


def _tracks(value: Iterable[Track]) -> tuple[Track, ...]:
    return tuple(sorted(value, key=lambda track: (track.position, track.rank)))


@frozen
class Recording:
    """A run of ``plan``: one track for each rank that was recorded, times from one clock common to all.

    Raises:
        TimelineError: a track of a position, or of an action, that the plan does not have.
    """

    plan: Plan
    tracks: tuple[Track, ...] = field(converter=_tracks)

    def __attrs_post_init__(self) -> None:
        count = [sum(1 for _ in self.plan.actions(p)) for p in range(self.plan.num_positions)]
        for track in self.tracks:
            if not 0 <= track.position < len(count):
                raise TimelineError(
                    f"rank {track.rank} recorded position {track.position}; the plan has positions 0..{len(count) - 1}"
                )
            for entry in track.actions:
                if not 0 <= entry.index < count[track.position]:
                    raise TimelineError(
                        f"rank {track.rank} recorded action {entry.index} of position {track.position}, "
                        f"which has {count[track.position]} actions, numbered from 0"
                    )
