"""Lowering: sends, receives, collectives and reductions, added to a plan of computes."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, product
from typing import Annotated, Any, Literal, TypeAlias

from attrs import evolve, frozen

from pipegrid.core.edge import Direction, Edge
from pipegrid.core.fields import Amount, Count, Index, Rule, checked, checked_arguments, instance
from pipegrid.plans.errors import PlanError
from pipegrid.plans.passes.sharding import Shard, sharded_stages, with_gathers
from pipegrid.plans.plan import COMPUTES, MESSAGE_KINDS, Action, ActionKind, Group, Plan, Step, require_plan
from pipegrid.plans.plan.actions import for_microbatches, for_piece
from pipegrid.plans.plan.dataflow import Dataflow, EdgeFlow, dataflow_of, replicas_of
from pipegrid.plans.simulate import Costs
from pipegrid.plans.simulate.engine import Times, collector_paused, play
from pipegrid.plans.verify import verify

_Dates: TypeAlias = tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]
Receives: TypeAlias = Literal["late", "early"]


def _by_edge(value: Any) -> Mapping[Edge, str]:
    if not isinstance(value, Mapping) or not all(isinstance(edge, Edge) for edge in value):
        raise ValueError
    return value


_Collectives = Annotated[Mapping[Edge, str], Rule(_by_edge, "a dict from an Edge to its group's name")]
_Duration = Annotated[Callable[[Action], float], instance(Callable, "a function from an action to its duration")]
_Ties = Annotated[
    Mapping[str, Sequence[int]], instance(Mapping, "a dict from a group's name to the stages that share it")
]
F, W = ActionKind.F, ActionKind.W
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def unit_duration(action: Action) -> float:
    """One for ``F``, ``I`` and ``W``; two for ``B``, which is both halves."""
    return 2.0 if action.kind is ActionKind.B else 1.0


@checked_arguments(PlanError)
def lower(
    plan: Plan,
    *,
    receives: Receives = "late",
    collectives: _Collectives | None = None,
    tied: _Ties | None = None,
    shard: Shard | None = None,
    prefetch: Index = 1,
    ahead: Count | None = None,
    duration: _Duration = unit_duration,
    proved: bool = False,
) -> Plan:
    """Add the communication to a plan of computes, so that it cannot deadlock even if sends block.

    Every activation and gradient that crosses positions becomes a ``SEND`` right after the compute that makes
    it (where several positions make it, after the last of them), and a ``RECV`` no later than the compute
    that needs it. What two neighbours exchange between the same two computes of both is one batch
    (``[SEND_F RECV_B]`` against ``[RECV_F SEND_B]``), so the result also holds with shared lanes.

    ``receives``: ``"late"`` posts a receive where its sender would otherwise start to wait, which batches
    most; ``"early"`` before the first compute that starts after the one that makes the message, which hides
    latency and buffers more. ``collectives`` names, for an edge, the group whose ``COLLECTIVE`` moves its data in place
    of messages; the group is the positions of both stages. ``tied`` names groups of stages that share a parameter: each
    gets a ``REDUCE`` at the end of its positions. Both are added to the groups that the plan has, which are treated
    alike. Where replicas differ (``plan.routes``), each trained stage gets a ``REDUCE`` over its replicas, after the
    last backward of it on any of them.

    ``shard`` places ``UNSHARD``, ``RESHARD`` and ``REDUCE_GRAD`` of stages whose parameters are sharded over their
    replicas (FSDP2): ``"step"`` reduces the gradients of a stage once, after its last backward, ``"microbatch"`` after
    each; a dict names the modules that are sharded, ``{"language": "step"}``. ``prefetch`` stages are gathered ahead of
    the one that computes, so a position has at most ``prefetch + 1`` of its stages gathered.

    ``ahead`` bounds the queue of a frozen module on positions of its own: at most so many of its messages are received,
    and not used yet, at any time (None: as many as it makes). ``duration`` estimates how long a compute takes; it moves
    receives, and cannot make the result wrong. ``proved``: the computes need no proof of their own: a generator made
    them, and the result will be verified.

    Why it cannot deadlock: the computes get one order for the whole plan (by the date at which each starts in a
    simulation), in which a compute of a stage on several positions is one event of all of them; and each transfer gets
    a place in it, between the computes that make the data and those that need it. Every position does its own in this
    order, so of all events that are not done, the first finds all its parties free. A batch only posts its
    transfers earlier, and lists them in this order, so it may as well block one by one. A pair is one event.

    Raises:
        PlanError: the plan communicates or offloads already, its computes are wrong (every fault is listed, as by
            `verify`), or ``collectives`` or ``tied`` name a part that the plan does not have.

    Examples:
        >>> [str(step) for step in lower(gpipe(2, 1)).positions[0]]
        ['0F0', '0SEND_F0>1', '0RECV_B0<1', '0B0']
    """
    require_plan(plan)
    if any(action.kind not in COMPUTES for position in range(plan.num_positions) for action in plan.actions(position)):
        raise PlanError("the plan communicates or offloads already; lower takes a plan of computes alone")
    groups = with_collectives(plan, collectives or {}) + tied_groups(plan, tied or {})
    with collector_paused():
        if groups != plan.groups:
            plan = evolve(plan, groups=groups)
        if not proved:
            ties = any(group.tied for group in groups)
            # Each REDUCE is added below.
            verify(evolve(plan, groups=[evolve(group, tied=()) for group in groups]) if ties else plan)
        computes = [list(plan.actions(position)) for position in range(plan.num_positions)]
        line = _line(plan, computes, duration, ahead)
        steps = _steps(plan, computes, line, receives)
        if shard is not None:
            reduce = sharded_stages(plan, shard)
            steps = [with_gathers(own, reduce, forward_only=plan.forward_only, window=prefetch + 1) for own in steps]
        positions = [own + reductions(position, plan, plan.groups) for position, own in enumerate(steps)]
        return evolve(plan, positions=positions)


@frozen
class _Line:
    """All computes in one order, by start; a compute of a shared stage has one place for all its positions.

    ``at``: per position, the place of each of its computes; ``start`` and ``end``: their dates; ``made``: per position,
    stage and direction, the place of the compute of each microbatch. Here and below, what is said of a microbatch holds
    of a slice where the plan has slices, and its number is that of the piece.
    """

    at: list[list[int]]
    start: Sequence[Sequence[float]]
    end: Sequence[Sequence[float]]
    made: dict[tuple[int, int, Direction], list[int]]

    def last(self, flow: EdgeFlow) -> Sequence[int]:
        """Per piece of ``flow``, the place of the last compute that makes its data."""
        return self._each(max, flow, flow.sources, flow.producer, flow.makers)

    def first(self, flow: EdgeFlow) -> Sequence[int]:
        """Per piece of ``flow``, the place of the first compute that needs its data."""
        return self._each(min, flow, flow.destinations, flow.consumer, flow.users)

    def _each(
        self,
        pick: Callable[..., int],
        flow: EdgeFlow,
        positions: Sequence[int],
        stage: int,
        pieces: Callable[[int, int], Sequence[int]],
    ) -> Sequence[int]:
        places = [self.made[position, stage, flow.direction] for position in positions]
        if flow.pieces == range(len(places[0])):  # those of the whole plan
            return places[0] if len(places) == 1 else list(map(pick, *places))
        at = list(zip(places, positions, strict=True))
        return [pick([own[one] for own, p in at for one in pieces(piece, p)]) for piece in flow.pieces]


def _line(
    plan: Plan, computes: Sequence[Sequence[Action]], duration: Callable[[Action], float], ahead: int | None
) -> _Line:
    durations = None if duration is unit_duration else [[_checked(duration, a) for a in own] for own in computes]
    starts, ends, order = play(plan, Costs(), durations)
    start: Sequence[Sequence[float]] = starts
    end: Sequence[Sequence[float]] = ends
    if ahead is not None:
        if plan.routes is not None:
            raise PlanError(f"ahead is {ahead} beside routes; queues are bounded where all replicas act alike")
        start, end = _held_back(plan, computes, starts, ends, ahead)
    dates: list[float] = []
    parties: list[tuple[int, ...]] = []  # per event, the positions whose next compute it is
    for runs in order:
        position, first, last = runs[0]
        if last > first:
            dates += start[position][first:last]
            parties += [tuple([run.position for run in runs])] * (last - first)
    at: list[list[int]] = [[] for _ in computes]
    # Events of one date stay in the order in which they were found: causes first.
    for place, event in enumerate(sorted(range(len(dates)), key=dates.__getitem__)):
        for position in parties[event]:
            at[position].append(place)
    for places, pairs in zip(at, plan.pairs, strict=True):
        for first in pairs:  # one event
            places[first + 1] = places[first]
    made: dict[tuple[int, int, Direction], list[int]] = {}
    for position, own in enumerate(computes):
        for stage, way in product(plan.stages_at[position], (FORWARD, BACKWARD)):
            made[position, stage, way] = [0] * plan.num_pieces
        for action, place in zip(own, at[position], strict=True):
            if action.kind is not W:
                way = FORWARD if action.kind is F else BACKWARD
                made[position, action.stage, way][plan.piece_of(action)] = place
    return _Line(at, start, end, made)


def _held_back(plan: Plan, computes: Sequence[Sequence[Action]], start: Times, end: Times, ahead: int) -> _Dates:
    """The dates, where a frozen stage alone on its positions starts no sooner than its queue has room.

    That is when a consumer starts the microbatch ``ahead`` before, so results still come before those who need them.
    """
    starts, ends = list(map(list, start)), list(map(list, end))
    for stage in sorted(plan.forward_only, reverse=True):  # consumers first
        consumers = [edge.destination for edge in plan.graph.stage_edges if edge.source == stage]
        if not consumers or any(len(plan.stages_at[place]) > 1 for place in plan.placement[stage]):
            continue
        used = []  # per consumer and microbatch, when it starts its forward
        for consumer in consumers:
            place, dates = plan.placement[consumer][0], [math.inf] * plan.num_microbatches
            for action, date in zip(computes[place], starts[place], strict=True):
                if action.kind is F and action.stage == consumer:
                    dates[action.microbatch or 0] = min(date, dates[action.microbatch or 0])
            used.append(dates)
        needed = [min(dates) for dates in zip(*used, strict=True)]
        for place in plan.placement[stage]:
            order = [action.microbatch or 0 for action in computes[place]]
            limits = list(accumulate((needed[microbatch] for microbatch in reversed(order)), min))[::-1]
            latest = 0.0
            for index, (microbatch, limit) in enumerate(zip(order, limits, strict=True)):
                room = max(dates[microbatch - ahead] for dates in used) if microbatch >= ahead else 0.0
                latest = max(starts[place][index], min(max(latest, room), limit))
                ends[place][index] += latest - starts[place][index]
                starts[place][index] = latest
    return starts, ends


def _checked(duration: Callable[[Action], float], action: Action) -> float:
    return float(checked(duration(action), Amount, f"duration({action})", PlanError))


_Event: TypeAlias = tuple[int, int, int, int]  # plain tuples, which the garbage collector does not visit
"""A transfer of one microbatch: its place in the line, that of its last maker, the number of its flow, microbatch."""


def _late_places(line: _Line, flow: EdgeFlow, made: Sequence[int]) -> list[int]:
    """Per piece, the last place at which no sender and no receiver waits longer than it has to.

    That is before the sender's next compute, and any of the receiver's that would still run when the sender can go on.
    """
    senders = [(line.at[position], line.start[position], len(line.at[position])) for position in flow.senders]
    receivers = [(line.at[position], line.end[position], len(line.at[position])) for position in flow.receivers]
    places = []
    for maker, place in zip(made, line.first(flow), strict=True):
        resumes = math.inf
        for at, start, count in senders:
            index = bisect_right(at, maker)
            if index < count:
                place = min(place, at[index])  # noqa: PLW2901 -- it starts at the latest and comes down
                resumes = min(resumes, start[index])
        for at, end, count in receivers:
            index = bisect_right(at, maker)
            while index < count and at[index] < place:
                if end[index] > resumes:
                    place = at[index]  # noqa: PLW2901
                    break
                index += 1
        places.append(place)
    return places


class _Writer:
    """Writes one position's steps: its computes, and between them the batches of its transfers."""

    def __init__(self, computes: Sequence[Action]) -> None:
        self._computes = computes
        self._done = 0
        self._steps: list[Step] = []
        self._batch: tuple[Action, ...] = ()  # the one that may still grow
        self._partners: frozenset[int] = frozenset()

    def exchange(self, before: int, actions: tuple[Action, ...], partners: frozenset[int]) -> None:
        """Append ``actions``, after ``before`` computes, to the open batch unless it talks to one of ``partners``.

        Two exchanges with one partner stay apart, because that partner does them at different times; so the
        batches of any two positions match one to one.
        """
        if before == self._done and self._batch and self._partners.isdisjoint(partners):
            self._batch += actions
            self._partners |= partners
            return
        self._close(before)
        self._batch, self._partners = actions, partners

    def collective(self, before: int, action: Action) -> None:
        """Issue a collective with ``before`` computes before it; it is never part of a batch."""
        self._close(before)
        self._steps.append(action)

    def _close(self, before: int) -> None:
        if self._batch:
            self._steps.append(self._batch[0] if len(self._batch) == 1 else self._batch)
            self._batch = ()
        if before > self._done:
            self._steps += self._computes[self._done : before]
            self._done = before

    def finish(self) -> list[Step]:
        """All steps, once the last transfer is written."""
        self._close(len(self._computes))
        return self._steps


@frozen
class _Party:
    """A position's part in a flow; ``actions``: per piece, its ends of the messages."""

    writer: _Writer
    at: list[int]
    partners: frozenset[int]
    actions: Mapping[int, tuple[Action, ...]] | Sequence[tuple[Action, ...]]


def _steps(plan: Plan, computes: Sequence[Sequence[Action]], line: _Line, receives: Receives) -> list[list[Step]]:
    """Per position its computes, and between them its communication."""
    dataflow = dataflow_of(plan)
    flows = dataflow.between_positions
    writers = [_Writer(own) for own in computes]
    count = plan.num_microbatches, plan.num_slices
    parties = [[_party(flow, place, writers[place], line, count) for place in flow.parties] for flow in flows]
    events: list[_Event] = []
    for number, flow in enumerate(flows):
        made = line.last(flow)
        at = _late_places(line, flow, made) if receives == "late" else [place + 1 for place in made]
        events += [(place, last, number, piece) for place, last, piece in zip(at, made, flow.pieces, strict=True)]
    members, alone = [flow.parties for flow in flows], [flow.group is not None for flow in flows]
    for action, places, last in _averages(plan, dataflow, computes, line):
        events.append((last + 1, last, len(parties), 0))
        parties.append([_Party(writers[place], line.at[place], frozenset(), [(action,)]) for place in places])
        members.append(places)
        alone.append(True)
    events.sort()
    for (_, *befores), transfers in _exchanges(events, members, parties, alone):
        number, first = transfers[0]
        for slot, (before, party) in enumerate(zip(befores, parties[number], strict=False)):
            if alone[number]:
                party.writer.collective(before, party.actions[first][0])
                continue
            actions = party.actions[first]
            for other, microbatch in transfers[1:]:
                actions += parties[other][slot].actions[microbatch]
            party.writer.exchange(before, actions, party.partners)
    return [_with_pairs(writer.finish(), own) for writer, own in zip(writers, plan.positions, strict=True)]


def _with_pairs(steps: list[Step], planned: Sequence[Step]) -> list[Step]:
    """``steps`` with the pairs of ``planned``, whose computes follow each other."""
    pairs: dict[Step, Step] = {pair[0]: pair for pair in planned if not isinstance(pair, Action)}
    seconds = {pair[1] for pair in planned if not isinstance(pair, Action)}
    return [pairs.get(step, step) for step in steps if step not in seconds] if pairs else steps


def _averages(
    plan: Plan, dataflow: Dataflow, computes: Sequence[Sequence[Action]], line: _Line
) -> Iterable[tuple[Action, tuple[int, ...], int]]:
    """The ``REDUCE`` of each trained stage where replicas differ, after its last backward on any: members and place."""
    for stage in range(plan.num_stages if plan.num_replicas > 1 else 0):
        if stage in plan.forward_only:
            continue
        for place in plan.placement[stage]:
            members = dataflow.groups[replicas_of(place)]
            done = (each for member in members for each in zip(computes[member], line.at[member], strict=True))
            ends = [at for action, at in done if action.stage == stage]
            yield Action(ActionKind.REDUCE, stage), members, max(ends, default=0)


def _exchanges(
    events: Sequence[_Event],
    members: Sequence[tuple[int, ...]],
    parties: Sequence[Sequence[_Party]],
    alone: Sequence[bool],
) -> Iterable[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """Per exchange its flow, then the number of computes of each party before it; and its transfers (flow, microbatch).

    All that the same positions exchange between the same computes goes together, at the place of the first; a
    collective is alone. They come in the order of their places, so those of each position in the order of its computes.
    """
    numbers: dict[tuple[int, ...], int] = {}
    same = [numbers.setdefault(places, number) for number, places in enumerate(members)]
    ats = [[party.at for party in own] for own in parties]
    exchanges: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for place, _, number, microbatch in events:
        # Keys that begin with equal parties are of one length, so no two transfers of others have equal keys.
        befores = [bisect_left(at, place) for at in ats[number]]
        key = (same[number], *befores, number, microbatch) if alone[number] else (same[number], *befores)
        exchange = exchanges.get(key)
        if exchange is None:
            exchanges[key] = [(number, microbatch)]
        else:
            exchange.append((number, microbatch))
    return exchanges.items()


def _party(flow: EdgeFlow, position: int, writer: _Writer, line: _Line, count: tuple[int, int]) -> _Party:
    send, receive = MESSAGE_KINDS[flow.direction]
    ends = [] if flow.group is None else [Action(ActionKind.COLLECTIVE, flow.producer, 0, flow.edge, flow.group)]
    ends += [Action(send, flow.producer, 0, flow.edge)] if position in flow.senders else []
    ends += [Action(receive, flow.consumer, 0, flow.edge)] if position in flow.receivers else []
    actions: Mapping[int, tuple[Action, ...]] | Sequence[tuple[Action, ...]]
    if flow.pieces == range(math.prod(count)):
        actions = list(zip(*[for_microbatches(end, *count) for end in ends], strict=True))
    else:
        actions = {piece: tuple([for_piece(end, piece, count[1]) for end in ends]) for piece in flow.pieces}
    return _Party(writer, line.at[position], frozenset(flow.parties) - {position}, actions)


@checked_arguments(PlanError)
def with_reduce(plan: Plan, tied: _Ties) -> Plan:
    """``plan`` with a ``REDUCE`` of each tied parameter, after the last backward of all its stages.

    The same as the argument ``tied`` of `lower`, for a lowered plan. The ``REDUCE`` is the last step of each position
    with one of the stages: the sum waits for the slowest of them in any order.

    Args:
        plan: lowered.
        tied: the stages with a copy, by name.

    Examples:
        >>> with_reduce(lower(gpipe(2, 1)), {"embedding": (0, 1)}).groups
        (Group(name='embedding', positions=(0, 1), edges=(), tied=(0, 1)),)
    """
    require_plan(plan)
    added = tied_groups(plan, tied)
    positions = tuple((*steps, *reductions(position, plan, added)) for position, steps in enumerate(plan.positions))
    return evolve(plan, positions=positions, groups=plan.groups + added)


def with_collectives(plan: Plan, collectives: Mapping[Edge, str]) -> tuple[Group, ...]:
    """The plan's groups, with those that carry ``collectives``: the positions of an edge's two stages."""
    groups = {group.name: group for group in plan.groups}
    for edge, name in collectives.items():
        if edge not in plan.graph.stage_edges:
            known = ", ".join(map(str, plan.graph.stage_edges)) or "none"
            raise PlanError(f"collectives names edge {edge}; the graph has {known}")
        places = {*plan.placement[edge.source], *plan.placement[edge.destination]}
        group = groups.setdefault(name, Group(name, places))
        groups[name] = evolve(group, edges={*group.edges, edge})
    return tuple(groups.values())


def tied_groups(plan: Plan, tied: Mapping[str, Sequence[int]]) -> tuple[Group, ...]:
    """One group for each shared parameter: the positions of its stages."""
    groups = []
    for name, stages in tied.items():
        for stage in checked(stages, tuple[Index, ...], f"tied[{name!r}]", PlanError):
            if stage >= plan.num_stages:
                raise PlanError(f"tied {name!r} names stage {stage}; the plan has stages 0..{plan.num_stages - 1}")
        groups.append(Group(name, {place for stage in stages for place in plan.placement[stage]}, tied=stages))
    return tuple(groups)


def reductions(position: int, plan: Plan, groups: Sequence[Group]) -> list[Step]:
    """The ``REDUCE`` of each shared parameter that ``position`` holds, in one order for all positions."""
    return [
        Action(ActionKind.REDUCE, min(held), group=group.name)
        for group in groups
        if (held := [stage for stage in group.tied if stage in plan.stages_at[position]])
    ]
