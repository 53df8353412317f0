"""What can only be checked between positions: both ends of a lane, and all of a group, agree on an order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from attrs import Factory, define

from pipegrid.schedules.errors import Fault
from pipegrid.schedules.plan import step_text
from pipegrid.schedules.verify.deadlock import Program
from pipegrid.schedules.verify.event_ids import EventIds
from pipegrid.schedules.verify.explain import who_sets
from pipegrid.schedules.verify.position import PositionVerifier


def check_lanes(marks: EventIds, checks: Sequence[PositionVerifier]) -> list[Fault]:
    """On each lane, receives are in the order of the sends."""
    faults = []
    for check in checks:
        for lane, sent in check.sent.items():
            received = checks[lane.destination].received[lane]
            if sent == received or set(sent) != set(received):
                continue  # a message with one end only is reported where the other is missing
            number = next(i for i, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b)
            faults.append(
                Fault(
                    "order",
                    f"lane {lane}: message {number} is sent by {who_sets(sent[number], marks, checks)}, and received "
                    f"as another by {who_sets(received[number] + marks.received, marks, checks)}; lanes are first in, "
                    "first out",
                )
            )
    return faults


def check_groups(marks: EventIds, checks: Sequence[PositionVerifier]) -> list[Fault]:
    """The members of a group do its collectives in one order."""
    faults = []
    for group in marks.plan.groups:
        calls = {position: checks[position].calls[group.name] for position in group.positions}
        first, *others = calls
        ours = [call.same for call in calls[first]]
        for other in others:
            theirs = [call.same for call in calls[other]]
            if ours == theirs:
                continue
            shorter = min(len(ours), len(theirs))
            number = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
            ways = [
                f"position {position}, step {calls[position][number].step}: "
                + step_text(checks[position].steps[calls[position][number].step])
                if number < len(calls[position])
                else f"position {position} has no more"
                for position in (first, other)
            ]
            faults.append(
                Fault("group", f"group {group.name!r}: collective {number} differs between members: {'; '.join(ways)}")
            )
    return faults


@define(eq=False)
class SharedLane:
    """What one position exchanges with another: per batch, the marks of its messages, and its step.

    A batch of one message has that one in place of a list. ``base``: the mark of the first exchange; ``most``: how
    many there may be.
    """

    base: int
    most: int
    position: int
    contents: list[int | list[int]] = Factory(list)
    steps: list[int] = Factory(list)


class Shared(NamedTuple):
    """What is different where the lanes between two positions are one communicator."""

    faults: list[Fault]
    programs: list[Program]
    exchanges: list[SharedLane]


def share_lanes(marks: EventIds, checks: Sequence[PositionVerifier]) -> Shared:
    """With one communicator for each pair of positions, their batches match one to one, in order.

    Takes the checks of a rendezvous; in its programs a batch's marks for messages become one for each partner.
    """
    exchanges = _number_exchanges(marks, max(len(check.program.steps) for check in checks))
    programs = [_share(marks, check, exchanges) for check in checks]
    faults = []
    for (position, partner), mine in exchanges.items():
        theirs = exchanges[partner, position]
        if position > partner or mine.contents == theirs.contents:
            continue
        pairs = enumerate(zip(mine.contents, theirs.contents, strict=False))
        shorter = min(len(mine.contents), len(theirs.contents))
        number = next((i for i, (ours, others) in pairs if ours != others), shorter)
        ends = [who_sets(own.base + number, marks, checks, list(exchanges.values())) for own in (mine, theirs)]
        faults.append(
            Fault(
                "order",
                f"positions {position} and {partner} share a lane, and their exchange {number} does not match: "
                f"{ends[0]} against {ends[1]}",
            )
        )
    return Shared(faults, programs, list(exchanges.values()))


def _number_exchanges(marks: EventIds, most: int) -> dict[tuple[int, int], SharedLane]:
    """EventIds for what each position exchanges with each other one, batch by batch, ``most`` at most."""
    pairs = {(route.lane.source, route.lane.destination) for route in marks.routes}
    pairs |= {(receiver, sender) for sender, receiver in pairs}
    first = len(marks)
    return {pair: SharedLane(first + number * most, most, pair[0]) for number, pair in enumerate(sorted(pairs))}


def _share(marks: EventIds, check: PositionVerifier, exchanges: dict[tuple[int, int], SharedLane]) -> Program:
    count, received, num_messages = marks.plan.num_microbatches, marks.received, 2 * marks.received
    partners, program, operations = marks.partners, check.program, check.program.operations
    ways = {other: (own, exchanges[other, here]) for (here, other), own in exchanges.items() if here == check.position}
    shared: list[int] = []
    starts: list[int] = []
    for (start, end), step in zip(pairwise([*program.starts, len(operations)]), program.steps, strict=True):
        starts.append(len(shared))
        waits: list[int] = []
        messages: dict[int, int | list[int]] = {}  # per partner; mostly there is but one
        for operation in operations[start:end]:
            if 0 <= operation < num_messages:
                partner = partners[operation // count]
                message = operation if operation < received else operation - received
                if partner in messages:
                    first = messages[partner]
                    messages[partner] = sorted([message, *(first if isinstance(first, list) else [first])])
                else:
                    messages[partner] = message
            elif operation >= num_messages:
                shared.append(operation)
            elif ~operation >= num_messages:
                waits.append(operation)
        for partner, content in messages.items():
            mine, theirs = ways[partner]
            number = len(mine.contents)
            mine.contents.append(content)
            mine.steps.append(step)
            shared.append(mine.base + number)
            waits.append(~(theirs.base + number))
        shared += waits
    return Program(shared, starts, program.steps)
