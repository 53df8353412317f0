"""Costs out of a recorded step: what computes, actions and hops took on ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import cycle, product
from statistics import mean, median
from typing import Any

from pipegrid.core.edge import Direction, Edge
from pipegrid.core.fields import checked
from pipegrid.plans.plan import MESSAGE_KINDS, Action, ActionKind
from pipegrid.plans.simulate import Costs, CostsError
from pipegrid.plans.simulate.costs import Share
from pipegrid.plans.verify import dataflow_of
from pipegrid.timeline.recording import Recorded, Recording, Track

_F, _B, _I, _W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W
_TIMED = (_F, _B, _I, _W, ActionKind.REDUCE)


def recorded_costs(recording: Recording, *, input_share: float = 0.5) -> Costs:
    """Costs of a step as ranks recorded it: seconds, and bytes where the recorder measured memory.

    Per stage and kind, the mean over microbatches and ranks; per edge, what a message took where its receiver waited
    for it; ``overhead``, the host's time for an action. A collective takes from the arrival of its last rank on: the
    waiting of the others is in the simulation. Ranks of other hosts need clocks with one zero (see `Recorder`). Gathers
    and reductions of sharded stages are not measured: they run beside the host, whose times these are. Those of pairs
    count for ``hidden`` alone: what their pairs took less than both take apart.

    Args:
        recording: of one step.
        input_share: of a backward that was recorded whole, the part that is ``I``, the rest is ``W``; half of the
            FLOPs of a matrix product's backward are the input's gradient.

    Raises:
        CostsError: the recording is of slices, no rank recorded some stage, or a stage runs in pairs alone.

    Examples:
        >>> from pipegrid.plans import gpipe
        >>> times = [Recorded(0, 0.0, 1.0), Recorded(1, 1.0, 3.0)]  # the forward and the backward
        >>> recording = Recording(gpipe(1, 1), [Track(0, 0, times)])
        >>> recorded_costs(recording).F
        (1.0,)
    """
    if recording.plan.num_slices > 1:
        what = f"the recording is of microbatches cut into {recording.plan.num_slices} slices"
        raise CostsError(f"{what}; record whole ones")
    held = {stage for track in recording.tracks for stage in recording.plan.stages_at[track.position]}
    if missing := sorted(set(range(recording.plan.num_stages)) - held):
        raise CostsError(f"no rank recorded stage {missing[0]}; gather the track of a rank of every position")
    share: float = checked(input_share, Share, "input_share", CostsError)
    return Costs(**_fields(recording, share))


def _fields(recording: Recording, input_share: float) -> dict[str, Any]:
    """The fields of `Costs` that ``recording`` measures."""
    plan = recording.plan
    took: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    grown: dict[int, list[int]] = defaultdict(list)
    for track in recording.tracks:
        actions, paired = list(plan.actions(track.position)), _paired(recording, track)
        for entry, action in ((one, actions[one.index]) for one in track.actions if one.index not in paired):
            took[action.kind, action.stage].append(entry.end - entry.start)
            if action.kind is _F and entry.memory is not None:
                grown[action.stage].append(entry.memory)
    stages = range(plan.num_stages)
    found: dict[str, Any] = {kind.value: [_mean(took[kind, stage]) for stage in stages] for kind in _TIMED}
    for stage, whole in enumerate(found["B"]):
        if not took[_I, stage]:
            found["I"][stage], found["W"][stage] = whole * input_share, whole * (1.0 - input_share)
        if not took[_B, stage]:
            found["B"][stage] = found["I"][stage] + found["W"][stage]
    if any(plan.pairs):
        found["hidden"] = _hidden(recording, found)
    found["overhead"] = _overhead(recording)
    calls = _collectives(recording)
    found["COLLECTIVE"] = [_mean(calls[stage]) for stage in stages]
    hops = _hops(recording, found["overhead"])
    usual = [seconds for each in hops.values() for seconds in each]
    found["latency"] = {edge: max(0.0, _mean(hops[edge] or usual)) for edge in plan.graph.stage_edges} or 0.0
    if all(grown[stage] for stage in stages):
        found["activation"] = [max(0.0, float(median(grown[stage]))) for stage in stages]
    return found


def _mean(seconds: Sequence[float]) -> float:
    return mean(seconds) if seconds else 0.0


def _paired(recording: Recording, track: Track) -> set[int]:
    """The numbers of the computes of a track that are of pairs."""
    return {number for first in recording.plan.pairs[track.position] for number in (first, first + 1)}


def _hidden(recording: Recording, apart: dict[str, list[float]]) -> list[float]:
    """Per stage, what its pairs save, of which each is the half of both of its stages."""
    saved: dict[int, list[float]] = defaultdict(list)
    for track in recording.tracks:
        actions = list(recording.plan.actions(track.position))
        entries = {entry.index: entry for entry in track.actions}
        for first in sorted(recording.plan.pairs[track.position] & entries.keys()):
            pair, spans = actions[first : first + 2], (entries[first], entries[first + 1])
            took = [apart[action.kind.value][action.stage] for action in pair]
            if not all(took):
                alone = pair[took.index(0.0)]
                raise CostsError(f"stage {alone.stage} runs {alone.kind} in pairs alone; record a plan without pairs")
            whole = max(span.end for span in spans) - min(span.start for span in spans)
            for action in pair:
                saved[action.stage].append(sum(took) - whole)
    return [max(0.0, _mean(saved[stage])) for stage in range(recording.plan.num_stages)]


def _entries(recording: Recording, track: Track) -> Iterator[tuple[Action, Recorded, float | None]]:
    """The actions of a track in the plan's order, and when the host was free for each; None before the first."""
    actions, free = list(recording.plan.actions(track.position)), None
    for entry in sorted(track.actions, key=lambda entry: entry.index):
        action = actions[entry.index]
        yield action, entry, free
        free = _free(entry, action)


def _overhead(recording: Recording) -> float:
    """Mean host seconds of an action beside its compute: from the end of the last action to the end of a posting."""
    found = [
        max(0.0, entry.posted - free)
        for track in recording.tracks
        for action, entry, free in _entries(recording, track)
        if free is not None and entry.posted is not None and action.kind.is_message
    ]
    return _mean(found)


def _free(entry: Recorded, action: Action) -> float:
    """The time at which the host went on; a message without the end of its posting takes no time."""
    if entry.posted is not None:
        return entry.posted
    return entry.start if action.kind.is_message else entry.end


def _collectives(recording: Recording) -> dict[int, list[float]]:
    """Seconds of each ``COLLECTIVE``, by stage, from the arrival of its last rank until all of them go on."""
    calls: dict[tuple[Edge | None, Direction | None, int | None], list[tuple[int, float, float]]] = defaultdict(list)
    for track in recording.tracks:
        for action, entry, _ in _entries(recording, track):
            if action.kind is ActionKind.COLLECTIVE:
                key = action.edge, action.direction, action.microbatch
                calls[key].append((action.stage, entry.start, _free(entry, action)))
    found: dict[int, list[float]] = defaultdict(list)
    for ranks in calls.values():
        seconds = max(free for _, _, free in ranks) - max(start for _, start, _ in ranks)
        for stage in {stage for stage, _, _ in ranks}:
            found[stage].append(seconds)
    return found


def _hops(recording: Recording, overhead: float) -> dict[Edge, list[float]]:
    """Seconds from a send's posting to the compute that waited for it, less ``overhead``, by edge.

    Of several ranks that hold a position, the k-th sender's message is the k-th receiver's, round and round.
    """
    plan = recording.plan
    posted: dict[Action, list[float]] = defaultdict(list)
    waited: dict[Action, list[tuple[float, float]]] = defaultdict(list)
    for track in recording.tracks:
        paired = _paired(recording, track)  # these wait for the inputs of both
        for action, entry, free in _entries(recording, track):
            if action.kind.is_send:
                posted[action].append(_free(entry, action))
            elif action.kind.is_compute and entry.index not in paired:
                waited[action].append((0.0 if free is None else free, entry.start))
    found: dict[Edge, list[float]] = {edge: [] for edge in plan.graph.stage_edges}
    for flow, microbatch in product(dataflow_of(plan).between_positions, range(plan.num_microbatches)):
        send, _ = MESSAGE_KINDS[flow.direction]
        sent = posted.get(Action(send, flow.producer, microbatch, flow.edge), ())
        for kind in (_F,) if flow.direction is Direction.FORWARD else (_B, _I):
            starts = waited.get(Action(kind, flow.consumer, microbatch), ())
            for (idle_since, start), left in zip(starts, cycle(sent), strict=False):
                if idle_since < left:
                    found[flow.edge].append(start - left - overhead)
    return found
