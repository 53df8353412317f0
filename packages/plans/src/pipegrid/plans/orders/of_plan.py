"""The orders of a lowered plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Literal, TypeAlias

from attrs import evolve

from pipegrid.core.edge import Direction, Edge
from pipegrid.plans.errors import PlanError
from pipegrid.plans.orders.orders import Launch, MessageEnd, Orders
from pipegrid.plans.plan import SHARDING, Action, ActionKind, Lane, Plan, actions_of, step_text
from pipegrid.plans.plan.dataflow import BACKWARD, FORWARD, Dataflow, dataflow_of

_READS = {ActionKind.F: FORWARD, ActionKind.B: BACKWARD, ActionKind.I: BACKWARD}

Groups: TypeAlias = Literal["one", "separate", "shared"] | Mapping[Lane, int]
"""The process group of each lane: one for all, one for each lane, one for each pair of positions, or by number."""
_Way: TypeAlias = tuple[Edge, Direction]


def orders_of_plan(plan: Plan, *, lanes: Groups = "one", batched: bool = True, holds: bool = False) -> Orders:
    """The orders of a lowered plan, with a rank for each position.

    ``lanes``: the group of each lane. One for all is what torch.distributed.pipelining has; pipegrid's communicators
    are ``"separate"``, ``"shared"`` by pairs, or by `fewest_communicators`: there a batch is one call for each of them,
    with its messages in the order of lanes, and where lanes share one it starts when the shapes of its receives have
    come. ``batched``: a lone message is a batch of one. ``holds``: the host waits for each message or batch, as in
    strict mode.

    A collective among positions is a batch of messages, from each member to each, in a group of its own; so is the
    start of a compute of a stage that lies on several positions, which waits for all of them. What the ranks of one
    position do among themselves (``UNSHARD``, ``REDUCE_GRAD``, ...) is no launch here.

    Raises:
        PlanError: a plan of computes alone, whose results other positions need.
    """
    if not plan.has_communication and dataflow_of(plan).between_positions:
        raise PlanError("a plan of computes has no messages; lower adds them")
    launches = partial(_launches, plan, lanes=lanes, batched=batched, holds=holds)
    whole = (True,) * plan.num_positions
    return Orders(tuple(tuple(launches(position)) for position in range(plan.num_positions)), begins=whole, ends=whole)


def _launches(plan: Plan, position: int, *, lanes: Groups, batched: bool, holds: bool) -> Iterator[Launch]:
    dataflow = dataflow_of(plan)
    routes = {
        (flow.edge, flow.direction, piece): flow.routes
        for flow in dataflow.between_positions
        if flow.group is None
        for piece in (flow.pieces if dataflow.routed else (0,))
    }
    comes = [a for a in plan.actions(position) if a.kind.is_receive or a.kind is ActionKind.COLLECTIVE]
    came = {way for action in comes for way in ways_of(action)}
    calls: dict[str, int] = {}
    numbers = lanes if isinstance(lanes, Mapping) else {}
    used = Counter(numbers.values())
    shared = {lane for lane, number in numbers.items() if used[number] > 1}

    def meet(name: str, others: Iterable[int], label: str) -> Iterator[MessageEnd]:
        """The messages of a collective, from each of its members to each."""
        for other in others:
            if other != position:
                yield MessageEnd("send", other, label, name)
                yield MessageEnd("receive", other, label, name)

    for step in plan.positions[position]:
        messages: list[MessageEnd] = []
        first, text = actions_of(step)[0], step_text(step)
        for action in actions_of(step):
            if action.kind.is_message:
                for way in ways_of(action):
                    piece = (action.microbatch or 0) if dataflow.routed else 0
                    messages += _along(action, position, routes[(*way, piece)], lanes)
            elif (name := dataflow.group_of(action, position)) is not None:
                calls[name] = calls.get(name, -1) + 1
                label = label_of(action, f"{name} {calls[name]}")
                messages += meet(f"group {name}", dataflow.groups[name], label)
        if messages:
            messages = messages if lanes in ("one", "separate") else _in_calls(messages)
            headers = frozenset(one.label for one in messages if one.way == "receive" and one.lane in shared)
            yield Launch(text, tuple(messages), batched or len(messages) > 1, holds=holds, headers=headers)
            continue
        together: frozenset[str] = frozenset()
        places = dataflow.together(first.stage, position)
        if places and (first.kind.is_compute or (first.kind in SHARDING and first.kind is not ActionKind.RESHARD)):
            together = frozenset({f"stage {text}"})
            starts = tuple(meet(f"stage {first.stage}", places, f"stage {text}"))
            yield Launch(f"start of {text}", starts, batched=True)
        if first.kind.is_compute:
            needs = [_needed(dataflow, action, position, came) for action in actions_of(step)]
            yield Launch(text, needs=together.union(*needs))


def _needed(dataflow: Dataflow, action: Action, position: int, came: Iterable[_Way]) -> frozenset[str]:
    """The labels of the messages that a compute reads: with routes, a call's message may serve several units."""
    direction = _READS.get(action.kind)
    if not dataflow.routed or direction is None or action.microbatch is None:
        return needs_of(action, came)
    return frozenset(
        _labelled((flow.edge, direction), evolve(action, microbatch=message))
        for flow, message in dataflow.arriving(action.stage, direction, action.microbatch)
        if any(receiver == position for _, receiver in flow.routes)
    )


def _along(action: Action, position: int, route: Iterable[tuple[int, int]], lanes: Groups) -> Iterator[MessageEnd]:
    """The messages of an action at a position, of those that go along its edge from position to position."""
    assert action.direction is not None
    way: Literal["send", "receive"] = "send" if action.kind.is_send else "receive"
    for source, destination in route:
        own, peer = (source, destination) if way == "send" else (destination, source)
        if own == position:
            lane = Lane(source, destination, action.direction)
            yield MessageEnd(way, peer, label_of(action), _group_of(lane, lanes), lane)


def _in_calls(messages: Iterable[MessageEnd]) -> list[MessageEnd]:
    """The messages of a batch by groups in the order of their first ones, and those of a group by lanes."""
    calls: dict[str, list[MessageEnd]] = {}
    for message in messages:
        calls.setdefault(message.group, []).append(message)
    for call in calls.values():
        if call[0].lane is not None:
            call.sort(key=attrgetter("lane"))
    return [message for call in calls.values() for message in call]


def _group_of(lane: Lane, lanes: Groups) -> str:
    if isinstance(lanes, Mapping):
        return f"communicator {lanes[lane]}"
    if lanes == "separate":
        return str(lane)
    first, second = sorted((lane.source, lane.destination))
    return "default" if lanes == "one" else f"{first}-{second}"


def ways_of(action: Action) -> set[_Way]:
    """The edge of an action and the direction along it; empty without an edge."""
    return set() if action.edge is None or action.direction is None else {(action.edge, action.direction)}


def label_of(action: Action, otherwise: str = "") -> str:
    """The content of a message, in words that both of its ends have; ``otherwise``, without an edge."""
    return next((_labelled(way, action) for way in ways_of(action)), otherwise)


def _labelled(way: _Way, action: Action) -> str:
    part = "" if action.slice is None else f".{action.slice}"
    return f"{way[1].name.lower()} {way[0]} {action.microbatch}{part}"


def needs_of(action: Action, came: Iterable[_Way]) -> frozenset[str]:
    """The labels of the messages that a compute reads, of those that come to its rank."""
    reads = _READS.get(action.kind)
    return frozenset(
        _labelled((edge, direction), action)
        for edge, direction in came
        if direction is reads and action.stage == (edge.destination if direction is FORWARD else edge.source)
    )
