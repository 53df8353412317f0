"""Verification between positions: both ends of a lane, and all of a group or shared stage, agree on an order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipegrid.plans.errors import Fault
from pipegrid.plans.plan import step_text
from pipegrid.plans.verify.explain import step_of
from pipegrid.plans.verify.position import PositionVerifier
from pipegrid.plans.verify.table import EventIds


def check_lanes(ids: EventIds, verifiers: Sequence[PositionVerifier]) -> list[Fault]:
    """On each lane, receives are in the order of the sends."""
    faults = []
    for verifier in verifiers:
        for lane, sent in verifier.sent.items():
            received = verifiers[lane.destination].received[lane]
            if sent == received or set(sent) != set(received):
                continue  # a message with one end only is reported where the other is missing
            number = next(i for i, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b)
            ends = []
            for sends, position, order in ((True, lane.source, sent), (False, lane.destination, received)):
                action = ids.message(order[number], sends=sends)
                ends.append(f"position {position}, step {step_of(action, verifiers[position].steps)}: {action}")
            faults.append(
                Fault(
                    "order",
                    f"lane {lane}: message {number} is sent by {ends[0]}, and received as another by {ends[1]}; "
                    "lanes are first in, first out",
                )
            )
    return faults


def check_calls(ids: EventIds, verifiers: Sequence[PositionVerifier]) -> list[Fault]:
    """The members of a group do its collectives in one order, and the positions of a shared stage its computes."""
    faults = []
    together: list[tuple[str | int, tuple[int, ...]]] = [*ids.dataflow.groups.items(), *ids.dataflow.shared]
    for key, positions in together:
        first, *others = positions
        for other in others:
            different = _different(key, verifiers[first], verifiers[other])
            if different is None:
                continue
            number, ways = different
            faults.append(
                Fault("group", f"group {key!r}: collective {number} differs between members: {ways}")
                if isinstance(key, str)
                else Fault(
                    "order",
                    f"stage {key} lies on positions {list(positions)}, whose ranks may communicate inside it, and its "
                    f"compute {number} differs between them: {ways}; put its computes in one order on all of them",
                )
            )
    return faults


def _different(key: str | int, one: PositionVerifier, other: PositionVerifier) -> tuple[int, str] | None:
    """The first call in which two positions differ: its number, and the step of each."""
    ours, theirs = ([call.same for call in verifier.calls[key]] for verifier in (one, other))
    if ours == theirs:
        return None
    shorter = min(len(ours), len(theirs))
    number = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    ways = [
        f"position {verifier.position}, step {verifier.calls[key][number].step}: "
        + step_text(verifier.steps[verifier.calls[key][number].step])
        if number < len(verifier.calls[key])
        else f"position {verifier.position} has no more"
        for verifier in (one, other)
    ]
    return number, "; ".join(ways)


def check_exchanges(verifiers: Sequence[PositionVerifier]) -> Iterator[Fault]:
    """With one communicator for each pair of positions, the batches of the two match one to one, in order."""
    for verifier in verifiers:
        for partner, mine in verifier.exchanges.items():
            other = verifiers[partner]
            theirs = other.exchanges[verifier.position]
            if verifier.position > partner or mine.contents == theirs.contents:
                continue
            pairs = enumerate(zip(mine.contents, theirs.contents, strict=False))
            shorter = min(len(mine.contents), len(theirs.contents))
            number = next((i for i, (ours, others) in pairs if ours != others), shorter)
            ends = [
                f"position {one.position}, step {own.steps[number]}: {step_text(one.steps[own.steps[number]])}"
                if number < len(own.steps)
                else f"position {one.position}, which has no more"
                for one, own in ((verifier, mine), (other, theirs))
            ]
            yield Fault(
                "order",
                f"positions {verifier.position} and {partner} share a lane, and their exchange {number} does not "
                f"match: {ends[0]} against {ends[1]}",
            )
