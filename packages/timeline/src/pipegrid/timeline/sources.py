"""The timeline of a plan, a simulation or a recording."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from attrs import evolve

from pipegrid.core.edge import Direction, Edge
from pipegrid.core.fields import shown
from pipegrid.plans.plan import MESSAGE_KINDS, Action, ActionKind, Plan
from pipegrid.plans.simulate import Costs, Simulation, simulate
from pipegrid.plans.simulate.engine import collector_paused
from pipegrid.plans.verify import dataflow_of
from pipegrid.timeline.recording import Recording, TimelineError
from pipegrid.timeline.timeline import Counter, Flow, Span, Timeline, amount

LIVE, ACTIVATIONS = "live microbatches", "activations"
GATHERED = "gathered parameters and gradients"


@collector_paused()
def timeline(
    source: Plan | Simulation | Recording | Timeline,
    *,
    rows: Sequence[str] | None = None,
    title: str | None = None,
    unit: str = "",
) -> Timeline:
    """The timeline of ``source``; a plan is simulated with unit costs.

    ``rows`` names the rows (positions, or the recorded ranks), by default after their stages. ``unit`` is the unit of
    a simulation's costs, ``"s"`` for seconds (always, in a recording). A `Timeline` passes through, with ``rows`` and
    ``title`` replaced.

    Examples:
        >>> from pipegrid.plans import one_f_one_b
        >>> timeline(one_f_one_b(2, 4)).rows
        ('stage 0 (position 0)', 'stage 1 (position 1)')
    """
    if isinstance(source, Plan):
        source = simulate(source)
    if isinstance(source, Simulation):
        drawn = _of_simulation(source, unit)
    elif isinstance(source, Recording):
        drawn = _of_recording(source)
    else:
        if not isinstance(source, Timeline):
            raise TimelineError(f"source is {shown(source)}; give a Plan, a Simulation, a Recording or a Timeline")
        drawn = source
    if rows is not None and len(rows) != len(drawn.rows):
        raise TimelineError(f"{len(rows)} names for {len(drawn.rows)} rows; give one for each, or none")
    return evolve(drawn, rows=drawn.rows if rows is None else rows, title=drawn.title if title is None else title)


def position_name(plan: Plan, position: int) -> str:
    """A position by what it holds: ``stages 0, 7 (position 0)``, or ``images, language.0 (position 0)``.

    Where replicas differ, an actor: ``stage 1, replica 2 (position 9)``.

    Examples:
        >>> from pipegrid.plans import interleaved_1f1b
        >>> position_name(interleaved_1f1b(2, 4), 0)
        'stages 0, 2 (position 0)'
    """
    stages = plan.stages_at[position]
    if len(plan.graph.modules) == 1:
        held = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
    else:
        named = map(plan.graph.module_of, stages)
        held = ", ".join(name if plan.graph.depth(name) == 1 else f"{name}.{index}" for name, index in named)
    if plan.num_replicas > 1:
        held = f"{held if stages else 'nothing'}, replica {position // plan.positions_each}"
    elif not stages:
        return f"position {position}"
    return f"{held} (position {position})"


def _title(plan: Plan) -> str:
    count, microbatches = plan.num_positions, plan.num_microbatches
    if plan.num_replicas > 1:
        return f"{plan.num_replicas} replicas of {plan.positions_each} positions, {microbatches} units"
    slices = f" of {plan.num_slices} slices" if plan.num_slices > 1 else ""
    positions = f"{count} position{'s' if count > 1 else ''}"
    return f"{positions}, {microbatches} microbatch{'es' if microbatches > 1 else ''}{slices}"


def _replicas(plan: Plan, positions: Iterable[int]) -> list[int]:
    """The replica of each position where replicas act apart; otherwise nothing."""
    return [position // plan.positions_each for position in positions] if plan.num_replicas > 1 else []


def _span(
    plan: Plan, position: int, row: int, start: float, end: float, action: Action, memory: int | None = None
) -> Span:
    """The span of an action; a unit by its microbatch, and by its home where that is another replica."""
    microbatch, home = action.microbatch, None
    if plan.routes is not None and microbatch is not None:
        home, microbatch = plan.routes.home(microbatch), plan.routes.microbatch(microbatch)
    kind, home = action.kind.value, None if home == position // plan.positions_each else home
    return Span(row, start, end, kind, action.stage, microbatch, slice=action.slice, memory=memory, home=home)


def _of_simulation(simulation: Simulation, unit: str) -> Timeline:
    plan = simulation.plan
    spans: list[Span] = []
    where: list[list[tuple[int, Action]]] = [[] for _ in simulation.start]
    for position, (starts, ends) in enumerate(zip(simulation.start, simulation.end, strict=True)):
        for start, end, action in zip(starts, ends, plan.actions(position), strict=True):
            where[position].append((len(spans), action))
            spans.append(_span(plan, position, position, start, end, action))
    bubbles, peaks = simulation.bubbles(), simulation.peaks()
    held = LIVE if simulation.costs.activation is None else ACTIVATIONS
    positions = range(plan.num_positions)
    counters = [Counter(position, held, simulation.live(position)) for position in positions]
    gathered = ((position, simulation.gathered(position)) for position in positions)
    counters += [Counter(position, GATHERED, points) for position, points in gathered if any(dict(points).values())]
    return Timeline(
        rows=[position_name(plan, position) for position in positions],
        spans=spans,
        flows=_flows(plan, list(enumerate(where)), simulation.costs),
        counters=counters,
        notes=[f"bubble {100 * bubble:.1f}%, peak {amount(peak)}" for bubble, peak in zip(bubbles, peaks, strict=True)],
        title=_title(plan),
        unit=unit,
        replicas=_replicas(plan, positions),
    )


def _of_recording(recording: Recording) -> Timeline:
    plan = recording.plan
    actions = [list(plan.actions(position)) for position in range(plan.num_positions)]
    spans: list[Span] = []
    where: list[tuple[int, list[tuple[int, Action]]]] = []
    for row, track in enumerate(recording.tracks):
        found = []
        for entry in track.actions:
            action = actions[track.position][entry.index]
            found.append((len(spans), action))
            spans.append(_span(plan, track.position, row, entry.start, entry.end, action, entry.memory))
        where.append((track.position, found))
        spans += [Span(row, aside.start, aside.end, aside.name, label=aside.name) for aside in track.asides]
    ranks = [(track.rank, track.position) for track in recording.tracks]
    drawn = Timeline(
        rows=[position_name(plan, at).replace(f"position {at}", f"rank {rank}") for rank, at in ranks],
        spans=spans,
        flows=_flows(plan, where),
        title=f"{_title(plan)}, measured",
        unit="s",
        replicas=_replicas(plan, [position for _, position in ranks]),
    )
    whole = drawn.makespan
    notes = [f"bubble {100 * (1 - busy / whole):.1f}%" if whole > 0 else "" for busy in drawn.busy]
    return evolve(drawn, notes=notes)


def _flows(
    plan: Plan, rows: Sequence[tuple[int, Sequence[tuple[int, Action]]]], costs: Costs | None = None
) -> list[Flow]:
    """Arrows from each send to its receive; in a plan of computes alone, from producer to consumer.

    ``rows`` holds (position, (index of the span, action) ...). Where a position has several rows (replicas),
    the k-th row of the sender sends to the k-th of the receiver, cyclically. ``costs`` has the bytes of the messages.
    """
    messages = {} if costs is None else costs.per_edge("message", plan.graph.stage_edges)
    shares = (1.0,) if costs is None else costs.per_slice("slice_lengths", plan.num_slices)
    spans: dict[tuple[int, ActionKind, int, Edge | None, int], list[int]] = defaultdict(list)
    for position, actions in rows:
        for index, action in actions:
            if action.microbatch is not None:
                spans[position, action.kind, action.stage, action.edge, plan.piece_of(action)].append(index)
    flows = []
    for flow in dataflow_of(plan).between_positions:
        edge, computes = None, _COMPUTES[flow.direction]
        first, last = computes, computes
        if plan.has_communication:
            edge, (send, receive) = flow.edge, MESSAGE_KINDS[flow.direction]
            first, last = (send,), (receive,)
        for sender, receiver in flow.routes:
            for piece in flow.pieces:
                made: tuple[int, ...] = (piece,)
                used = made
                if not plan.has_communication:
                    made, used = flow.makers(piece, sender), flow.users(piece, receiver)
                sides = (first, made, sender, flow.producer), (last, used, receiver, flow.consumer)
                begins, ends = (
                    [i for kind in kinds for one in pieces for i in spans.get((place, kind, stage, edge, one), ())]
                    for kinds, pieces, place, stage in sides
                )
                size = messages.get(flow.edge, 0.0) * shares[piece % len(shares)] or None
                flows += [Flow(begins[k % len(begins)], index, size) for k, index in enumerate(ends) if begins]
    return flows


_COMPUTES = {Direction.FORWARD: (ActionKind.F,), Direction.BACKWARD: (ActionKind.B, ActionKind.I)}
"""The kinds of compute that make and need the data of a flow, by direction."""
