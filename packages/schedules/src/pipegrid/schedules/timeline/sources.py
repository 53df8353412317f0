"""The timeline of a plan, a simulation or a recording."""

from __future__ import annotations

from collections.abc import Sequence

from pipegrid.schedules.plan import Action, ActionKind, Plan, message_routes
from pipegrid.schedules.simulate import Simulation, simulate
from pipegrid.schedules.timeline.recording import Recording
from pipegrid.schedules.timeline.timeline import Counter, Flow, Span, Timeline, TimelineError, amount
from pipegrid.topology.fields import shown
from pipegrid.transport.edge import Direction, Edge

LIVE = "live microbatches"


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

    Raises:
        TimelineError: another kind of source, or a name too many or too few.
        PlanError: a plan that deadlocks in simulation.
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
    return Timeline(
        drawn.rows if rows is None else rows,
        drawn.spans,
        drawn.flows,
        drawn.counters,
        drawn.notes,
        drawn.title if title is None else title,
        drawn.unit,
    )


def position_name(plan: Plan, position: int) -> str:
    """A position by what it holds: ``stages 0, 7 (position 0)``, or ``images, language.0 (position 0)``."""
    stages = plan.stages_at[position]
    if len(plan.graph.modules) == 1:
        held = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
    else:
        held = ", ".join(_stage_name(plan, stage) for stage in stages)
    return f"{held} (position {position})" if stages else f"position {position}"


def _stage_name(plan: Plan, stage: int) -> str:
    module, index = plan.graph.module_of(stage)
    return module if plan.graph.depth(module) == 1 else f"{module}.{index}"


def _title(plan: Plan) -> str:
    positions, microbatches = plan.num_positions, plan.num_microbatches
    return (
        f"{positions} position{'s' if positions > 1 else ''}, "
        f"{microbatches} microbatch{'es' if microbatches > 1 else ''}"
    )


def _span(row: int, start: float, end: float, action: Action) -> Span:
    return Span(row, start, end, action.kind.value, action.stage, action.microbatch)


def _of_simulation(simulation: Simulation, unit: str) -> Timeline:
    plan = simulation.plan
    spans: list[Span] = []
    where: list[list[tuple[int, Action]]] = []
    for position, (starts, ends) in enumerate(zip(simulation.start, simulation.end, strict=True)):
        where.append([])
        for start, end, action in zip(starts, ends, plan.actions(position), strict=True):
            where[-1].append((len(spans), action))
            spans.append(_span(position, start, end, action))
    bubbles, peaks = simulation.bubbles(), simulation.peaks()
    return Timeline(
        rows=[position_name(plan, position) for position in range(plan.num_positions)],
        spans=spans,
        flows=_flows(plan, [(position, actions) for position, actions in enumerate(where)]),
        counters=[Counter(p, LIVE, simulation.live(p)) for p in range(plan.num_positions)],
        notes=[f"bubble {100 * bubble:.1f}%, peak {amount(peak)}" for bubble, peak in zip(bubbles, peaks, strict=True)],
        title=_title(plan),
        unit=unit,
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
            spans.append(_span(row, entry.start, entry.end, action))
        where.append((track.position, found))
        spans += [Span(row, aside.start, aside.end, aside.name, label=aside.name) for aside in track.asides]
    drawn = Timeline(
        rows=[
            position_name(plan, track.position).replace(f"position {track.position}", f"rank {track.rank}")
            for track in recording.tracks
        ],
        spans=spans,
        flows=_flows(plan, where),
        title=f"{_title(plan)}, measured",
        unit="s",
    )
    whole = drawn.makespan
    notes = [f"bubble {100 * (1 - busy / whole):.1f}%" if whole > 0 else "" for busy in drawn.busy]
    return Timeline(drawn.rows, drawn.spans, drawn.flows, (), notes, drawn.title, drawn.unit)


def _flows(plan: Plan, rows: Sequence[tuple[int, Sequence[tuple[int, Action]]]]) -> list[Flow]:
    """Arrows from each send to its receive; in a plan of computes alone, from maker to user.

    ``rows`` holds (position, (index of the span, action) ...). Where a position has several rows (replicas),
    the k-th row of the sender meets the k-th of the receiver, round and round.
    """
    touches = _touches(plan)
    starts: dict[tuple[Edge, Direction, int, int], list[int]] = {}
    finishes: dict[tuple[Edge, Direction, int, int], list[int]] = {}
    for position, actions in rows:
        for index, action in actions:
            if action.microbatch is None:
                continue
            key = (action.kind, action.stage, action.edge)
            for edge, direction, begins in touches.get(key, ()):
                book = starts if begins else finishes
                book.setdefault((edge, direction, action.microbatch, position), []).append(index)
    flows = []
    for (edge, direction, microbatch, position), sources in starts.items():
        for upstream, downstream in message_routes(plan, edge):
            ends = (upstream, downstream) if direction is Direction.FORWARD else (downstream, upstream)
            if ends[0] == position:
                found = finishes.get((edge, direction, microbatch, ends[1]), [])
                flows += [Flow(sources[k % len(sources)], index) for k, index in enumerate(found)]
    return flows


_Kind = tuple[ActionKind, int, Edge | None]
_Touch = tuple[Edge, Direction, bool]


def _touches(plan: Plan) -> dict[_Kind, list[_Touch]]:
    """Per kind, stage and edge of an action: the messages that begin (True) or end (False) with it."""
    found: dict[_Kind, list[_Touch]] = {}

    def add(kind: ActionKind, stage: int, edge: Edge, direction: Direction, *, begins: bool) -> None:
        key = (kind, stage, edge if plan.communicates else None)
        found.setdefault(key, []).append((edge, direction, begins))

    forward, backward = Direction.FORWARD, Direction.BACKWARD
    for edge in plan.graph.stage_edges:
        if plan.communicates:
            add(ActionKind.SEND_F, edge.source, edge, forward, begins=True)
            add(ActionKind.RECV_F, edge.destination, edge, forward, begins=False)
            add(ActionKind.SEND_B, edge.destination, edge, backward, begins=True)
            add(ActionKind.RECV_B, edge.source, edge, backward, begins=False)
            continue
        add(ActionKind.F, edge.source, edge, forward, begins=True)
        add(ActionKind.F, edge.destination, edge, forward, begins=False)
        if edge in plan.gradient_edges:
            for kind in (ActionKind.B, ActionKind.I):
                add(kind, edge.destination, edge, backward, begins=True)
                add(kind, edge.source, edge, backward, begins=False)
    return found
