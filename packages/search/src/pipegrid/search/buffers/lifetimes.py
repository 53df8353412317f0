"""From when to when the memory of a message is taken: from its post, until nothing reads it any more.

An activation is read until the backward of its stage (its ``B``, or the ``W`` behind ``I``). The output of a stage may
be a view of it, so it is also held by the stages of the same position that take that output. An output that left by
message was read once its gradient has come back, before that backward. Where a trained stage gives an output for which
no gradient comes back, nothing in the plan says when its send is done: such a message has no end, and no slot.

A stage without a backward keeps no graph. What it returns is copied where it is sent, or taken on the same position, if
it shares memory (`pipegrid.schedules`), so that its input is read until then.

A gradient is read until the backward that it is for. Slices of a microbatch keep keys and values for each other, so
that what one has received is held until the last backward of all of them.

A value that skips stages is such an activation: the slot of the one receive is the copy that its position keeps, until
the backward of the stage that it came to, and of all that take it from there. What a stage without a backward gives to
a later stage of its own position is a copy from that forward on, as long as the later stage reads it.

What is sent is copied into its slot when its send starts, and read by the transfer: until a compute starts that could
not without it (`causality`), or to the end of the step, in which all that was sent leaves. Activations on the host are
read until the backward that waits for their `RELOAD`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from pipegrid.core.edge import Direction
from pipegrid.plans.plan import ActionKind, Plan, actions_of
from pipegrid.plans.plan.dataflow import FORWARD, Dataflow
from pipegrid.search.buffers.causality import arrivals_known
from pipegrid.search.buffers.messages import Buffered, BufferKind, copies_at, outputs_taken, received_at, sent_at

LAST = (ActionKind.B, ActionKind.W)
"""The kinds of which one is the last to read what has come to a stage."""


class Lifetime(NamedTuple):
    """The step that first has a message, and the last one in which it is read; None where that has no end."""

    first: int
    last: int | None


def lifetimes(
    plan: Plan, flows: Dataflow, position: int, kinds: Sequence[BufferKind] = ("receives",)
) -> dict[Buffered, Lifetime]:
    """The lifetime of each message that ``position`` receives, or of what else it has; each kind in plan order."""
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

    found: dict[Buffered, Lifetime] = {}
    arrived = [*received_at(plan, flows, position)] if "receives" in kinds else []
    copied = [*copies_at(plan, flows, position)] if "copies" in kinds else []
    for message, step, flow, piece in (*arrived, *copied):
        if flow.direction is Direction.BACKWARD:
            ends: list[int | None] = [backward[flow.consumer, piece // slices]]
        else:
            ends = [done(flow.consumer, user // slices) for user in flow.users(piece, position)]
        known = [end for end in ends if end is not None]
        found[message] = Lifetime(step, max(known) if len(known) == len(ends) else None)
    if "sends" in kinds:
        end = len(plan.positions[position])
        shown = arrivals_known(plan, flows, position)
        for message, step, _, _ in sent_at(plan, flows, position):
            last = shown[message]
            found[message] = Lifetime(step, end if last is None else last)
    # Activations on the host: from their OFFLOAD to the first half of their backward.
    started: dict[tuple[int, int], tuple[Buffered, int]] = {}
    for step, one in enumerate(plan.positions[position]) if "offload" in kinds else ():
        for action in actions_of(one):
            if action.kind is ActionKind.OFFLOAD:
                started[action.stage, plan.piece_of(action)] = Buffered(action, position), step
            elif action.kind in (ActionKind.B, ActionKind.I) and (action.stage, plan.piece_of(action)) in started:
                message, first = started.pop((action.stage, plan.piece_of(action)))
                found[message] = Lifetime(first, step)
    return found


def posts(received: Mapping[Buffered, int], lane_of: Mapping[Buffered, tuple[object, int]]) -> dict[Buffered, int]:
    """The step in which each receive is posted; -1 is before the first.

    Args:
        received: the step of each receive, in the order of the plan.
        lane_of: the lane of each message, whose receives are posted in order, and how many of it are posted before
            their turn: at the start of a step the first ones, and at the turn of each the next.
    """
    lanes: dict[object, list[int]] = {}  # the steps of its receives so far
    found = {}
    for message, step in received.items():
        lane, ahead = lane_of[message]
        steps = lanes.setdefault(lane, [])
        steps.append(step)
        found[message] = steps[-1 - ahead] if len(steps) > ahead else -1
    return found
