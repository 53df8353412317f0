"""What can only be checked between positions: both ends of a lane, and all of a group, agree on an order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pipegrid.schedules.checking import Call
from pipegrid.schedules.errors import Fault
from pipegrid.schedules.marks import Marks
from pipegrid.schedules.plan import Plan
from pipegrid.schedules.plan_text import step_text
from pipegrid.schedules.rules import Traffic
from pipegrid.schedules.waiting import Program


def check_lanes(marks: Marks, traffic: Traffic) -> list[Fault]:
    """On each lane, receives are in the order of the sends."""
    faults = []
    for lane, sent in traffic.sent.items():
        received = traffic.received.get(lane, [])
        if sent == received or set(sent) != set(received):
            continue  # a message with one end only is reported where the other is missing
        number = next(i for i, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b)
        faults.append(
            Fault(
                "order",
                f"lane {lane}: message {number} is sent by {marks.text(sent[number])}, and received as "
                f"another by {marks.text(received[number] + marks.received)}; lanes are first in, first out",
            )
        )
    return faults


def check_groups(gathered: Mapping[str, Mapping[int, Sequence[Call]]], plan: Plan) -> list[Fault]:
    """The members of a group do its collectives in one order."""
    faults = []
    for name, calls in gathered.items():
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
                + step_text(plan.positions[position][calls[position][number].step])
                if number < len(calls[position])
                else f"position {position} has no more"
                for position in (first, other)
            ]
            faults.append(
                Fault("group", f"group {name!r}: collective {number} differs between members: {'; '.join(ways)}")
            )
    return faults


def share_lanes(marks: Marks, programs: Sequence[Program]) -> list[Fault]:
    """With one communicator for each pair of positions, their batches match one to one, in order.

    Takes the programs of a rendezvous, and replaces a batch's marks for messages by one for each partner.
    """
    exchanges = marks.number_exchanges(max(len(program.steps) for program in programs))
    count, received, num_messages, partners = (
        marks.plan.num_microbatches,
        marks.received,
        2 * marks.received,
        marks.partners,
    )
    for position, program in enumerate(programs):
        ways = {
            other: (own, exchanges[other, position]) for (here, other), own in exchanges.items() if here == position
        }
        shared: list[int] = []
        starts: list[int] = []
        operations = program.operations
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
        program.operations, program.starts = shared, starts
    faults = []
    for (position, partner), mine in exchanges.items():
        theirs = exchanges[partner, position]
        if position > partner or mine.contents == theirs.contents:
            continue
        pairs = enumerate(zip(mine.contents, theirs.contents, strict=False))
        shorter = min(len(mine.contents), len(theirs.contents))
        number = next((i for i, (ours, others) in pairs if ours != others), shorter)
        faults.append(
            Fault(
                "order",
                f"positions {position} and {partner} share a lane, and their exchange {number} does not match: "
                f"{marks.text(mine.base + number)} against {marks.text(theirs.base + number)}",
            )
        )
    return faults
