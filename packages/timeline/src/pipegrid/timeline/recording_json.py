"""Recordings as JSON: the plan and, per rank, when each action ran. `recording_from_json` reads it back, equal."""

from __future__ import annotations

import json
from typing import Any

from pipegrid.core.fields import shown
from pipegrid.plans.plan import from_json, load_json, to_json
from pipegrid.timeline.recording import Aside, Recorded, Recording, TimelineError, Track


def recording_to_json(recording: Recording) -> str:
    """``recording`` as a JSON object: ``plan`` as by `to_json`, and ``tracks``, a line for each.

    An action is ``[index, start, end, posted, memory]``, an aside ``[name, start, end]``; seconds and bytes.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> recording = Recording(gpipe(1, 1), [Track(0, 0, [Recorded(0, 0.0, 1.0)])])
        >>> recording_from_json(recording_to_json(recording)) == recording
        True
    """
    tracks = [
        json.dumps(
            {
                "rank": track.rank,
                "position": track.position,
                "actions": [[a.index, a.start, a.end, a.posted, a.memory] for a in track.actions],
                "asides": [[aside.name, aside.start, aside.end] for aside in track.asides],
            }
        )
        for track in recording.tracks
    ]
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
        return Track(
            data["rank"],
            data["position"],
            [Recorded(*entry) for entry in data["actions"]],
            [Aside(*entry) for entry in data["asides"]],
        )
    except (TypeError, KeyError, TimelineError) as error:
        raise TimelineError(f"{path} is {shown(data)}, and no track of a recording: {error}") from None
