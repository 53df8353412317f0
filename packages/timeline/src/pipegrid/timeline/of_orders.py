"""Orders as a timeline: what runs beside what, and where ranks get stuck, the cycle that holds them.

There is no clock in orders. The picture takes a compute as two units of time, and a message as one, once both of its
ends have started.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias

from pipegrid.core.order import OrderModel
from pipegrid.plans.errors import PlanError
from pipegrid.plans.orders.orders import Launch, Orders
from pipegrid.plans.orders.programs import ProgramTrack
from pipegrid.plans.orders.prove import model_named, play_orders
from pipegrid.plans.plan.actions import parse_action
from pipegrid.timeline.kinds import BEHIND, STUCK
from pipegrid.timeline.timeline import Flow, Span, Timeline

_COMPUTE, _MESSAGE = 2.0, 1.0


def order_timeline(
    orders: Orders, order: OrderModel | str, *, buffered: bool = False, drains: bool = False, title: str = ""
) -> Timeline:
    """A row for the compute stream and for each line of every rank, under an order model; arguments as `prove_order`.

    In a deadlock, spans under way last to the end of the picture, those behind them follow, and the flows lead along
    the cycle, from each wait to the span that it waits for.

    Raises:
        PlanError: what is wrong with the orders apart from a cycle.

    Examples:
        >>> from pipegrid.plans import gpipe, lower, orders_of_plan
        >>> order_timeline(orders_of_plan(lower(gpipe(2, 1))), "nccl2").rows[0]
        'rank 0: compute'
    """
    model = model_named(order)
    played = play_orders(orders, model, buffered=buffered, drains=drains)
    starts, ends = _times(played.tracks)
    tracks = [(number, track) for number, track in enumerate(played.tracks) if track.name != "host" and track.launches]
    last = max(ends.values(), default=0.0)
    rows: list[str] = []
    spans: list[Span] = []
    places: dict[tuple[int, int], int] = {}  # track and step: the number of the span
    for row, (number, track) in enumerate(tracks):
        rows.append(f"rank {track.rank}: {track.line}")
        behind = 0.0
        for step, launch in enumerate(track.launches):
            one, launched = (number, step), played.orders.ranks[track.rank][launch]
            start, end = starts.get(one, last + behind), ends.get(one, last + behind + _MESSAGE)
            kind = _kind(launched) if one in ends else BEHIND if behind else STUCK
            behind += 0.0 if one in ends else _MESSAGE
            places[one] = len(spans)
            spans.append(Span(row, start, end, kind, label=launched.text))
    waits = [[(one.position, one.step) for one in pair] for cycle in played.cycles for pair in cycle]
    flows = [Flow(places[one], places[other]) for one, other in waits if {one, other} <= places.keys()]
    return Timeline(rows, spans, flows, title=title or f"under {model.name}")


_Step: TypeAlias = tuple[int, int]
"""The number of a track, and of a step of its program."""


def _times(tracks: Sequence[ProgramTrack]) -> tuple[dict[_Step, float], dict[_Step, float]]:
    """Start and end times of the steps of all tracks, as far as they have them.

    Each event is set by one track, at a time that follows from the events it waited for: the outcome is the same
    whichever track runs first.
    """
    set_at: dict[int, float] = {}
    sleepers: dict[int, list[int]] = {}
    at, clocks = [0] * len(tracks), [0.0] * len(tracks)
    starts: dict[_Step, float] = {}
    ends: dict[_Step, float] = {}
    ready = list(range(len(tracks)))
    while ready:
        number = ready.pop()
        track = tracks[number]
        while at[number] < len(track.program.operations):
            operation = track.program.operations[at[number]]
            one = number, bisect_right(track.program.ends, at[number])
            if operation < 0 and ~operation not in set_at:
                sleepers.setdefault(~operation, []).append(number)
                break
            if operation < 0:
                clocks[number] = max(clocks[number], set_at[~operation])
            else:
                starts.setdefault(one, clocks[number])
                if at[number] + 1 == track.program.ends[one[1]]:
                    clocks[number] += {"host": 0.0, "compute": _COMPUTE}.get(track.name, _MESSAGE)
                set_at[operation] = clocks[number]
                ready += sleepers.pop(operation, [])
            at[number] += 1
            if at[number] == track.program.ends[one[1]]:
                ends[one] = clocks[number]
    return starts, ends


def _kind(launch: Launch) -> str:
    """The kind of a compute that is an action; what else a launch is, in a word."""
    try:
        return parse_action(launch.text).kind.name if launch.is_compute else "message"
    except PlanError:
        return "compute"
