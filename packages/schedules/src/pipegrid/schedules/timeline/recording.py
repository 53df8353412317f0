"""What the clock said when a plan ran: per rank, when each action started and ended."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen

from pipegrid.schedules.arguments import as_number, require, require_integer, require_items
from pipegrid.schedules.plan.plan import Plan, require_plan
from pipegrid.schedules.timeline.timeline import TimelineError


def _require_times(start: float, end: float) -> None:
    for name, time in (("start", start), ("end", end)):
        as_number(name, time, "give seconds", error=TimelineError)


@frozen
class Recorded:
    """An action of a position (its place in `Plan.actions`) took from ``start`` to ``end``, in seconds.

    For a message, that is from posting to completion.
    """

    index: int
    start: float
    end: float

    def __attrs_post_init__(self) -> None:
        require_integer("index", self.index, "an action's place in Plan.actions", least=0, error=TimelineError)
        _require_times(self.start, self.end)


@frozen
class Aside:
    """Something that a rank did beside its plan, such as loading data or the optimizer's step, in seconds."""

    name: str
    start: float
    end: float

    def __attrs_post_init__(self) -> None:
        require("name", self.name, str, "say what was done", error=TimelineError)
        _require_times(self.start, self.end)


def _recorded(value: Iterable[Recorded]) -> tuple[Recorded, ...]:
    return require_items("actions", value, Recorded, "give a list of Recorded", error=TimelineError)


def _asides(value: Iterable[Aside]) -> tuple[Aside, ...]:
    return require_items("asides", value, Aside, "give a list of Asides", error=TimelineError)


@frozen
class Track:
    """What ``rank``, which holds ``position``, did."""

    rank: int
    position: int
    actions: tuple[Recorded, ...] = field(converter=_recorded)
    asides: tuple[Aside, ...] = field(converter=_asides, default=())

    def __attrs_post_init__(self) -> None:
        for name, number in (("rank", self.rank), ("position", self.position)):
            require_integer(name, number, least=0, error=TimelineError)


def _tracks(value: Iterable[Track]) -> tuple[Track, ...]:
    remedy = "give a list of what each rank's Recorder.track(...) returned"
    tracks = require_items("tracks", value, Track, remedy, error=TimelineError)
    return tuple(sorted(tracks, key=lambda track: (track.position, track.rank)))


@frozen
class Recording:
    """A run of ``plan``: one track for each rank that was recorded, times from one clock common to all.

    Raises:
        TimelineError: a track of a position, or of an action, that the plan does not have.
    """

    plan: Plan
    tracks: tuple[Track, ...] = field(converter=_tracks)

    def __attrs_post_init__(self) -> None:
        require_plan(self.plan, error=TimelineError)
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
