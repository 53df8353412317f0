"""Why an action is refused, and who is waited for: the words of the checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipegrid.schedules.errors import Fault
from pipegrid.schedules.plan import step_text
from pipegrid.schedules.plan.actions import COMPUTES, Action, ActionKind
from pipegrid.schedules.plan.plan import Plan
from pipegrid.schedules.verify.event_ids import EventIds
from pipegrid.schedules.verify.table import Rule
from pipegrid.transport.edge import Direction

if TYPE_CHECKING:
    from pipegrid.schedules.verify.lanes import SharedLane
    from pipegrid.schedules.verify.position import PositionVerifier


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


def why_refused(check: PositionVerifier, step: int, action: Action, rule: Rule) -> Fault:
    """The fault of an action that breaks its rule."""
    rules = check.rules
    microbatch, count, position = action.microbatch or 0, rules.plan.num_microbatches, check.position
    if microbatch >= count:
        return unknown_microbatch(action, count, position, step)
    if check.flags[rule.done + microbatch]:
        return Fault("duplicate", f"{action} has been done before, and may be done once", position, step)
    unmet = next(needed for needed in rule.needs if not check.flags[needed + microbatch])
    makers = [_of(maker, microbatch) for maker in rules.makers[unmet]]
    later = [at for maker in makers if (at := check.step_of(maker)) is not None]
    where = f"which comes at step {later[0]}" if later else "which this position never does"
    late = bool(later) and action.kind in COMPUTES and makers[0].kind.is_receive
    return Fault(
        "late-receive" if late else "dependency",
        f"{action} needs {' or '.join(map(str, makers))} before it, {where}",
        position,
        step,
    )


def _of(action: Action, microbatch: int) -> Action:
    """The same action for another microbatch."""
    return Action(action.kind, action.stage, microbatch, action.edge, action.group)


def unknown_microbatch(action: Action, count: int, position: int, step: int) -> Fault:
    """The fault of a microbatch that the plan does not have."""
    message = f"{action}: there is no microbatch {action.microbatch}; the plan has {count}, 0..{count - 1}"
    return Fault("unknown-microbatch", message, position, step)


def missing(check: PositionVerifier) -> list[Fault]:
    """What a position never does, one fault for each kind of action."""
    rules, flags, count = check.rules, check.flags, check.rules.plan.num_microbatches
    faults = []
    for rule in (*rules.table.values(), *rules.collectives.values()):
        kind, done = rule.action.kind, rule.done
        if kind is ActionKind.B or not flags.count(0, done, done + count):
            continue  # B and I set one flag between them; it is looked at once, for I
        lacking = [microbatch for microbatch in range(count) if not flags[done + microbatch]]
        if kind is ActionKind.W:  # without an I the whole backward is missing
            lacking = [microbatch for microbatch in lacking if flags[rule.needs[0] + microbatch]]
        if lacking:
            faults.append(_missing(check.position, rules.makers.get(done, (rule.action,)), lacking))
    remedy = "" if rules.plan.has_communication else "; lower adds it to a plan of computes"
    return faults + [
        Fault("missing", f"{min(stages)}REDUCE@{name}: to be done here, and never done{remedy}", check.position)
        for name, stages in rules.tied.items()
        if name not in check.reduced
    ]


def _missing(position: int, actions: tuple[Action, ...], microbatches: list[int]) -> Fault:
    listed = ", ".join(" or ".join(str(_of(action, m)) for action in actions) for m in microbatches[:8])
    more = f" and {len(microbatches) - 8} more" if len(microbatches) > 8 else ""
    return Fault("missing", f"{listed}{more}: to be done here, and never done", position)


def who_sets(
    mark: int, marks: EventIds, checks: Sequence[PositionVerifier], exchanges: Sequence[SharedLane] = ()
) -> str:
    """Who sets the mark, in which step, by which action."""
    received, count = marks.received, marks.plan.num_microbatches
    if mark >= marks.num_fixed:
        own = next((own for own in exchanges if own.base <= mark < own.base + own.most), None)
        if own is not None:
            position, step = own.position, own.steps[mark - own.base]
        else:
            group, number, position = marks.call(mark)
            step = checks[position].calls[group][number].step
        return f"position {position}, step {step}: {step_text(checks[position].steps[step])}"
    if mark >= 2 * received:
        maker, microbatch = divmod(mark - 2 * received, count)
        position, stage, forward = marks.makers[maker]
        kinds = (ActionKind.F,) if forward else (ActionKind.B, ActionKind.I)
        actions = [Action(kind, stage, microbatch) for kind in kinds]
    else:
        sends = mark < received
        number, microbatch = divmod(mark if sends else mark - received, count)
        route = marks.routes[number]
        position = route.lane.source if sends else route.lane.destination
        actions = [route.end(microbatch, sends=sends)]
    for action in actions:
        at = checks[position].step_of(action)
        if at is not None:
            return f"position {position}, step {at}: {action}"
    return f"position {position}: {actions[0]}"
