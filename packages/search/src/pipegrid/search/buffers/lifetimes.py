"""From when to when the memory of a message is taken: from its post, until nothing reads it any more.

An activation is read until the backward of its stage (its ``B``, or the ``W`` behind ``I``). The output of a stage may
be a view of it, so it is also held by the stages of the same position that take that output. An output that left by
message was read once its gradient has come back, before that backward. Where a trained stage gives an output for which
no gradient comes back, nothing in the plan says when its send is done: such a message has no end, and no slot.

A stage without a backward keeps no graph. What it returns is copied where it is sent, or taken on the same position, if
it shares memory (`pipegrid.schedules`), so that its input is read until then.

A gradient is read until the backward that it is for. Slices of a microbatch keep keys and values for each other, so
that what one has received is held until the last backward of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from pipegrid.core.edge import Direction
from pipegrid.plans.plan import ActionKind, Plan, actions_of
from pipegrid.plans.plan.dataflow import FORWARD, Dataflow
from pipegrid.search.buffers.messages import ReceivedMessage, outputs_taken, received_at

LAST = (ActionKind.B, ActionKind.W)
"""The kinds of which one is the last to read what has come to a stage."""


class Lifetime(NamedTuple):
    """The step in which a message is received, and the last one in which it is read; None where that has no end."""

    received: int
    last: int | None


def lifetimes(plan: Plan, flows: Dataflow, position: int) -> dict[ReceivedMessage, Lifetime]:
    """The lifetime of each message that ``position`` receives, in the order of the plan."""
    slices = plan.num_slices
    backward: dict[tuple[int, int], int] = {}  # by stage and microbatch, the last step
    given: dict[tuple[int, int], int] = {}  # the last step of its forward, and of what takes its outputs from here
    for step, one in enumerate(plan.positions[position]):
        for action in actions_of(one):
            if action.microbatch is None:
                continue
            if action.kind in LAST:
                backward[action.stage, action.microbatch] = step
            for stage, microbatch in outputs_taken(plan, flows, position, action):
                given[stage, microbatch] = step

    @cache
    def done(stage: int, microbatch: int) -> int | None:
        """The last step in which the forward and backward of a stage, or what has its output, read its inputs."""
        if stage in plan.forward_only:
            return given[stage, microbatch]
        last = backward[stage, microbatch]
        for flow, piece in flows.leaving(stage, FORWARD, microbatch * slices):
            if flow.edge not in plan.gradient_edges:
                return None
            if flow.group is None and (position, position) in flow.links:
                for user in flow.users(piece, position):
                    other = done(flow.consumer, user // slices)
                    if other is None:
                        return None
                    last = max(last, other)
        return last

    found: dict[ReceivedMessage, Lifetime] = {}
    for message, step, flow, piece in received_at(plan, flows, position):
        if flow.direction is Direction.BACKWARD:
            ends: list[int | None] = [backward[flow.consumer, piece // slices]]
        else:
            ends = [done(flow.consumer, user // slices) for user in flow.users(piece, position)]
        known = [end for end in ends if end is not None]
        found[message] = Lifetime(step, max(known) if len(known) == len(ends) else None)
    return found


def posts(
    received: Mapping[ReceivedMessage, int], lane_of: Mapping[ReceivedMessage, tuple[object, int]]
) -> dict[ReceivedMessage, int]:
    """The step in which each receive is posted; -1 is before the first.

    Args:
        received: the step of each receive, in the order of the plan.
        lane_of: the lane of each message, whose receives are posted in order, and how many of it are posted before
            their turn: at the start of a step the first ones, and at the turn of each the next.
    """
    lanes: dict[object, list[ReceivedMessage]] = {}
    for message in received:
        lanes.setdefault(lane_of[message][0], []).append(message)
    found = {}
    for messages in lanes.values():
        for number, message in enumerate(messages):
            ahead = lane_of[message][1]
            if not ahead:
                found[message] = received[message]
            else:
                found[message] = received[messages[number - ahead]] if number >= ahead else -1
    return {message: found[message] for message in received}
