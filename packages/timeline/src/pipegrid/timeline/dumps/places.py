"""The places of ranks in a plan: the messages of their dumps, found among those of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from attrs import evolve, frozen

from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Action, Plan
from pipegrid.plans.simulate import simulate
from pipegrid.timeline.dumps.read import Dump
from pipegrid.timeline.kinds import BEHIND, STUCK
from pipegrid.timeline.sources import timeline
from pipegrid.timeline.timeline import Timeline

_SHOWN = 4


@frozen
class RankPlace:
    """The actions at which a rank may be, of its position; several where a dump does not reach back far enough.

    ``actions``: their numbers at the position, in `Plan.actions`. ``under_way``: the first of them is launched and has
    not ended; otherwise it is the next to launch. ``ranks``: of this pipeline, by position. ``next``: the number of the
    first message that is not launched; None where several are possible.
    """

    rank: int
    position: int
    actions: tuple[int, ...]
    texts: tuple[str, ...]
    under_way: bool
    ranks: tuple[int, ...]
    next: int | None

    def __str__(self) -> str:
        found = " or ".join(self.texts[:_SHOWN]) + (" or ..." if len(self.texts) > _SHOWN else "")
        does = "stands at" if self.under_way else "should come to"
        return f"rank {self.rank} (position {self.position}) {does} {found}"


def places_in(plan: Plan, dumps: Sequence[Dump]) -> tuple[RankPlace, ...]:
    """The place of each rank with messages.

    A rank's position is its place in the group of its messages that has a rank for each position, or itself.

    Raises:
        PlanError: the plan has no messages, or no step of it has those of a dump, in their order.
    """
    if not plan.has_communication:
        raise PlanError("a plan of computes has no messages to find; lower adds them")
    count = plan.num_positions
    messages = (entry for dump in dumps for entry in dump.entries if entry.peer is not None)
    pipelines = {entry.members for entry in messages if len(entry.members) == count} or {tuple(range(count))}
    silent = {rank: ranks for ranks in pipelines for rank in ranks}
    return tuple(
        _place(plan, dump, silent.get(dump.rank, tuple(range(count))))
        for dump in dumps
        if any(entry.peer is not None for entry in dump.entries) or (not dump.entries and dump.rank in silent)
    )


def _place(plan: Plan, dump: Dump, ranks: tuple[int, ...]) -> RankPlace:
    own = [entry for entry in dump.entries if entry.peer is not None]
    ranks = next((one.members for one in own if len(one.members) == plan.num_positions), ranks)
    if dump.rank not in ranks:
        what = f"rank {dump.rank} is in no group of {plan.num_positions} ranks, a rank for each position"
        raise PlanError(f"{dump.file}: {what}")
    position = ranks.index(dump.rank)
    actions = list(plan.actions(position))
    messages = [number for number, action in enumerate(actions) if action.kind.is_message]
    sent = []  # whether a message is sent, and the position at its other end
    for action in (actions[number] for number in messages):
        assert action.peer is not None
        other = next(place for place in plan.placement[action.peer] if place != position)
        sent.append((action.kind.is_send, other))
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
    following = {messages[(k + len(own)) % len(messages)] for k in starts}
    later = following.pop() if len(following) == 1 else None
    return RankPlace(
        dump.rank, position, numbers, tuple(str(actions[n]) for n in numbers), ended < len(own), ranks, later
    )


def first_to_come(plan: Plan, places: Sequence[RankPlace], roots: Sequence[int]) -> RankPlace | None:
    """Of the messages that the ``roots`` should have launched, the first by the dates of a simulation.

    Of a root whose own dump does not tell, these are the other ends of what its neighbours stand at.
    """
    start = simulate(plan).start
    missing = [one for rank in roots for one in _missing(plan, places, rank)]
    return min(missing, key=lambda one: start[one.position][one.actions[0]], default=None)


def _missing(plan: Plan, places: Sequence[RankPlace], rank: int) -> Iterator[RankPlace]:
    own = next((one for one in places if one.rank == rank), None)
    found = [] if own is None or own.next is None else [(own.position, own.next, own.ranks)]
    for place in () if found else (one for one in places if rank in one.ranks and one.under_way):
        position, action = place.ranks.index(rank), list(plan.actions(place.position))[place.actions[0]]
        if len(place.actions) == 1 and position in plan.placement[action.peer or 0]:
            found.append((position, _other_end(plan, action, position), place.ranks))
    for position, number, ranks in found:
        text = str(list(plan.actions(position))[number])
        yield RankPlace(rank, position, (number,), (text,), False, ranks, number)


def _other_end(plan: Plan, action: Action, position: int) -> int:
    """The number of the message at the other end of ``action``, which is on the position."""
    travels = attrgetter("edge", "direction", "microbatch", "slice")
    return next(
        number
        for number, one in enumerate(plan.actions(position))
        if one.kind.is_message and one.kind.is_send != action.kind.is_send and travels(one) == travels(action)
    )


def places_timeline(plan: Plan, places: Sequence[RankPlace]) -> Timeline:
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
                kind, label = (STUCK, place.texts[0]) if number == later[0] else (BEHIND, str(actions[number]))
                spans[at + number] = evolve(spans[at + number], kind=kind, label=label)
        at += len(actions)
    return evolve(drawn, spans=spans, title="where the ranks stand")
