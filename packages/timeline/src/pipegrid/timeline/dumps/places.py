"""The places of ranks in a plan: the messages of their dumps, found among those of the plan."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Action, Plan
from pipegrid.timeline.dumps.read import Dump
from pipegrid.timeline.kinds import BEHIND, STUCK
from pipegrid.timeline.sources import timeline
from pipegrid.timeline.timeline import Timeline

_SHOWN = 4


@frozen
class Place:
    """The actions at which a rank may be, of its position; several where a dump does not reach back far enough.

    ``actions``: their numbers at the position, in `Plan.actions`. ``under_way``: the first of them is launched and has
    not ended; otherwise it is the next to launch.
    """

    rank: int
    position: int
    actions: tuple[int, ...]
    texts: tuple[str, ...]
    under_way: bool

    def __str__(self) -> str:
        found = " or ".join(self.texts[:_SHOWN]) + (" or ..." if len(self.texts) > _SHOWN else "")
        return (
            f"rank {self.rank} (position {self.position}) {'stands at' if self.under_way else 'should come to'} {found}"
        )


def places_in(plan: Plan, dumps: Sequence[Dump]) -> tuple[Place, ...]:
    """The place of each rank with messages.

    A rank's position is its place in the group of its messages that has a rank for each position, or itself.

    Raises:
        PlanError: the plan has no messages, or no step of it has those of a dump, in their order.
    """
    if not plan.has_communication:
        raise PlanError("a plan of computes has no messages to find; lower adds them")
    return tuple(
        _place(plan, dump)
        for dump in dumps
        if any(entry.peer is not None for entry in dump.entries) or not dump.entries
    )


def _place(plan: Plan, dump: Dump) -> Place:
    own = [entry for entry in dump.entries if entry.peer is not None]
    ranks = next(
        (one.members for one in own if len(one.members) == plan.num_positions), tuple(range(plan.num_positions))
    )
    if dump.rank not in ranks:
        raise PlanError(
            f"{dump.file}: rank {dump.rank} is in no group of {plan.num_positions} ranks, a rank for each position"
        )
    position = ranks.index(dump.rank)
    actions = list(plan.actions(position))
    messages = [number for number, action in enumerate(actions) if action.kind.is_message]
    sent = [_end(plan, actions[number], position) for number in messages]
    ended = next((number for number, entry in enumerate(own) if not entry.ended), len(own))
    wanted = [(entry.kind == "send", ranks.index(entry.peer)) for entry in own if entry.peer in ranks]
    offsets = range(len(messages))
    if own and own[0].number == 0 and dump.entries[0].number == 0:
        offsets = range(1)  # nothing was launched before
    starts = [k for k in offsets if all(sent[(k + i) % len(sent)] == one for i, one in enumerate(wanted))]
    if not starts:
        text = " ".join(map(str, own[:_SHOWN]))
        raise PlanError(f"{dump.file}: position {position} has no messages in this order: {text} ...")
    numbers = tuple(dict.fromkeys(messages[(k + ended) % len(messages)] for k in starts))
    return Place(dump.rank, position, numbers, tuple(str(actions[n]) for n in numbers), ended < len(own))


def _end(plan: Plan, action: Action, position: int) -> tuple[bool, int]:
    """Whether a message is sent, and the position at its other end."""
    assert action.peer is not None
    others = [place for place in plan.placement[action.peer] if place != position]
    return action.kind.is_send, others[0]


def places_timeline(plan: Plan, places: Sequence[Place]) -> Timeline:
    """The plan as it is simulated, with the place of each rank, and behind that the actions it never reaches.

    The first compute from there on is marked, with the name of the action. A position with several ranks has the
    farthest of them back; one of which several actions are possible is not marked.
    """
    drawn = timeline(plan)
    spans = list(drawn.spans)
    at = 0
    for position in range(plan.num_positions):
        actions = list(plan.actions(position))
        found = [one for one in places if one.position == position and len(one.actions) == 1]
        if found:
            place = min(found, key=lambda one: one.actions)
            later = [n for n in range(place.actions[0], len(actions)) if actions[n].kind.is_compute]
            for number in later:
                first = number == later[0]
                label = place.texts[0] if first else str(actions[number])
                spans[at + number] = evolve(spans[at + number], kind=STUCK if first else BEHIND, label=label)
        at += len(actions)
    return evolve(drawn, spans=spans, title="where the ranks stand")
