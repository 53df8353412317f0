"""Recordings: when each action of a plan started and ended on each rank; and their JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Annotated, Any, TypeAlias

from attrs import astuple, field, frozen

from pipegrid.core.fields import Index, Name, Rule, checked_fields, integer, number, shown
from pipegrid.plans.plan import Plan, from_json, load_json, require_plan, to_json


class TimelineError(ValueError):
    """Rows, spans or flows that do not fit together.

    Examples:
        >>> Span(row=0, start=2.0, end=1.0, kind="F")
        Traceback (most recent call last):
            ...
        pipegrid.timeline.recording.TimelineError: F on row 0 starts at 2.0 and ends before, at 1.0
    """


Time: TypeAlias = Annotated[float, Rule(number(least=-math.inf).convert, "a finite number")]
"""A point in time: seconds of a clock, or multiples of the unit of costs."""


@frozen(field_transformer=checked_fields(TimelineError))
class Recorded:
    """An action of a position, as it ran; times in seconds.

    Attributes:
        index: of the action in `Plan.actions`.
        start: when it started; for a message or a ``COLLECTIVE``, when it was posted.
        end: when it ended; for a message or a ``COLLECTIVE``, when it was complete.
        posted: when the host was free again.
        memory: bytes that the action left allocated, negative where it freed more.

    Examples:
        >>> Recorded(index=0, start=0.0, end=0.010, memory=1024).end
        0.01
    """

    index: Index
    start: Time
    end: Time
    posted: Time | None = None
    memory: Annotated[int, integer()] | None = None


@frozen(field_transformer=checked_fields(TimelineError))
class Aside:
    """An activity of a rank outside its plan; times in seconds.

    Attributes:
        name: such as loading data, or the optimizer's step.
        start: when it started.
        end: when it ended.

    Examples:
        >>> Aside("data", start=0.0, end=0.2).name
        'data'
    """

    name: Name
    start: Time
    end: Time


@frozen(field_transformer=checked_fields(TimelineError))
class Track:
    """The recorded actions of one rank.

    Attributes:
        rank: the global rank.
        position: of the rank.
        actions: each with its index in the plan.
        asides: its activities outside the plan.

    Examples:
        >>> Track(rank=0, position=0, actions=[Recorded(0, 0.0, 0.010)], asides=[Aside("data", 0.010, 0.012)]).rank
        0
    """

    rank: Index
    position: Index
    actions: tuple[Recorded, ...] = field(converter=tuple[Recorded, ...])
    asides: tuple[Aside, ...] = field(converter=tuple[Aside, ...], default=())


def _tracks(value: Iterable[Track]) -> tuple[Track, ...]:
    return tuple(sorted(value, key=lambda track: (track.position, track.rank)))


@frozen
class Recording:
    """A run of a plan.

    Attributes:
        plan: that ran.
        tracks: one for each rank that was recorded, times from one clock common to all.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> track = Track(rank=0, position=0, actions=[Recorded(index=0, start=0.0, end=1.0)])
        >>> Recording(gpipe(1, 1), [track]).plan.num_positions
        1
    """

    plan: Plan
    tracks: tuple[Track, ...] = field(converter=_tracks)

    def __attrs_post_init__(self) -> None:
        require_plan(self.plan, error=TimelineError)
        count = [sum(1 for _ in self.plan.actions(p)) for p in range(self.plan.num_positions)]
        for track in self.tracks:
            last, what = max((entry.index for entry in track.actions), default=-1), f"rank {track.rank} recorded"
            if track.position >= len(count):
                rule = f"the plan has positions 0..{len(count) - 1}"
                raise TimelineError(f"{what} position {track.position}; {rule}")
            if last >= count[track.position]:
                rule = f"which has {count[track.position]}, numbered from 0"
                raise TimelineError(f"{what} action {last} of position {track.position}, {rule}")


def recording_to_json(recording: Recording) -> str:
    """``recording`` as a JSON object: ``plan`` as by `to_json`, and ``tracks``, a line for each.

    An action is ``[index, start, end, posted, memory]``, an aside ``[name, start, end]``; seconds and bytes.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> recording = Recording(gpipe(1, 1), [Track(0, 0, [Recorded(0, 0.0, 1.0)])])
        >>> recording_from_json(recording_to_json(recording)) == recording
        True
    """
    rows = []
    for track in recording.tracks:
        actions, asides = list(map(astuple, track.actions)), list(map(astuple, track.asides))
        rows.append({"rank": track.rank, "position": track.position, "actions": actions, "asides": asides})
    tracks = map(json.dumps, rows)
    return f'{{"plan": {to_json(recording.plan).strip()},\n"tracks": [\n' + ",\n".join(tracks) + "\n]}\n"


def recording_from_json(text: str) -> Recording:
    """Read a recording from the JSON of `recording_to_json`.

    Raises:
        PlanSyntaxError: text that is not JSON.
        PlanError: a plan that is wrong, by the path in it.
        TimelineError: a track that is wrong, by its path.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> text = recording_to_json(Recording(gpipe(1, 1), [Track(0, 0, [Recorded(0, 0.0, 1.0)])]))
        >>> recording_from_json(text).tracks[0].actions[0].end
        1.0
    """
    data = load_json(text)
    if not isinstance(data, dict) or set(data) != {"plan", "tracks"} or not isinstance(data["tracks"], list):
        raise TimelineError(f"the document is {shown(data)}; it must be an object with 'plan' and 'tracks', a list")
    plan = from_json(json.dumps(data["plan"]))
    return Recording(plan, [_track(track, f"tracks[{index}]") for index, track in enumerate(data["tracks"])])


def _track(data: Any, path: str) -> Track:
    try:
        actions, asides = [Recorded(*one) for one in data["actions"]], [Aside(*one) for one in data["asides"]]
        return Track(data["rank"], data["position"], actions, asides)
    except (TypeError, KeyError, TimelineError) as error:
        raise TimelineError(f"{path} is {shown(data)}, and no track of a recording: {error}") from None
