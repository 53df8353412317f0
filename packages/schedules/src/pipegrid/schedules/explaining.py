"""Why an action is refused: the words of the position-by-position checks."""

from __future__ import annotations

from pipegrid.schedules.actions import COMPUTES, Action, ActionKind
from pipegrid.schedules.errors import Fault
from pipegrid.schedules.marks import Marks
from pipegrid.schedules.plan import Plan
from pipegrid.schedules.rules import Rule, Rules
from pipegrid.transport.edge import Direction


def why_no_rule(plan: Plan, position: int, step: int, action: Action) -> Fault:
    """The fault of an action that no rule at this position knows."""

    def fault(rule: str, message: str) -> Fault:
        return Fault(rule, f"{action}: {message}", position, step)

    edge = action.edge
    if edge is not None and edge not in plan.graph.stage_edges:
        known = ", ".join(map(str, plan.graph.stage_edges)) or "none"
        return fault("unknown-edge", f"there is no edge {edge}; the graph has {known}")
    if action.stage >= plan.num_stages:
        return fault("unknown-stage", f"the plan has {plan.num_stages} stages, 0..{plan.num_stages - 1}")
    places = list(plan.placement[action.stage])
    if action.kind is not ActionKind.COLLECTIVE and position not in places:
        return fault("misplaced", f"stage {action.stage} lies on position {' and '.join(map(str, places))}")
    if action.kind in COMPUTES:
        return fault("unneeded", f"stage {action.stage} is forward_only and has no backward")
    if action.direction is Direction.BACKWARD and edge not in plan.gradient_edges:
        return fault("unneeded", f"no gradient travels along edge {edge}; one of its stages is forward_only")
    if action.kind is ActionKind.COLLECTIVE:
        carrier = plan.collective_edges.get(edge) if edge is not None else None
        if carrier is None:
            return fault("unneeded", f"no group carries edge {edge}; what travels along it is sent, or stays")
        return fault("misplaced", f"this position is not in the group {carrier!r} of the edge")
    if edge is not None and plan.placement[edge.source] == plan.placement[edge.destination]:
        return fault("unneeded", f"both ends of edge {edge} lie on the same positions, which keep what they make")
    if edge is not None and edge in plan.collective_edges:
        return fault("unneeded", f"what travels along edge {edge} uses the group {plan.collective_edges[edge]!r}")
    return fault("unneeded", "the other end is this position alone, which keeps what it makes")


def why_refused(marks: Marks, position: int, step: int, action: Action, rule: Rule) -> Fault:
    """The fault of an action that breaks its rule."""
    microbatch, count = action.microbatch or 0, marks.plan.num_microbatches
    if microbatch >= count:
        return unknown_microbatch(action, count, position, step)
    if rule.done[microbatch]:
        return Fault("duplicate", f"{action} has been done before, and may be done once", position, step)
    unmet = next(names for flags, names in zip(rule.needs, rule.need_names, strict=True) if not flags[microbatch])
    tokens = [name.format(microbatch) for name in unmet]
    later = [at for token in tokens if (at := marks.step_of(position, token)) is not None]
    where = f"which comes at step {later[0]}" if later else "which this position never does"
    late = bool(later) and action.kind in COMPUTES and "RECV" in tokens[0]
    return Fault(
        "late-receive" if late else "dependency",
        f"{action} needs {' or '.join(tokens)} before it, {where}",
        position,
        step,
    )


def unknown_microbatch(action: Action, count: int, position: int, step: int) -> Fault:
    """The fault of a microbatch that the plan does not have."""
    message = f"{action}: there is no microbatch {action.microbatch}; the plan has {count}, 0..{count - 1}"
    return Fault("unknown-microbatch", message, position, step)


def missing(position: int, rules: Rules) -> list[Fault]:
    """What a position never does, one fault for each kind of action."""
    faults = []
    for key, rule in rules.table.items():
        kind = key[0]
        if kind is ActionKind.B:
            continue  # B and I set one flag between them; it is looked at once, for I
        lacking = [m for m, done in enumerate(rule.done) if not done] if rule.done.count(0) else []
        names = rule.name
        if kind is ActionKind.I:
            names = (*rules.table[ActionKind.B, key[1]].name, *names)
        elif kind is ActionKind.W:
            lacking = [m for m in lacking if rule.needs[0][m]]  # without an I the whole backward is missing
        if lacking:
            faults.append(_missing(position, names, lacking))
    faults += [
        _missing(position, rule.name, [m for m, done in enumerate(rule.done) if not done])
        for rule in rules.collectives.values()
        if rule.done.count(0)
    ]
    return faults + [
        Fault("missing", f"{min(stages)}REDUCE@{name}: to be done here, and never done", position)
        for name, stages in rules.tied.items()
        if name not in rules.reduced
    ]


def _missing(position: int, names: tuple[str, ...], microbatches: list[int]) -> Fault:
    listed = ", ".join(" or ".join(name.format(m) for name in names) for m in microbatches[:8])
    more = f" and {len(microbatches) - 8} more" if len(microbatches) > 8 else ""
    return Fault("missing", f"{listed}{more}: to be done here, and never done", position)
