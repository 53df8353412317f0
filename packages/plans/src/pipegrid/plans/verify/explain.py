"""The texts of faults: why an action is wrong, what is missing, which actions wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from pipegrid.core.edge import Direction
from pipegrid.plans.errors import PlanFault
from pipegrid.plans.orders.play import Stall
from pipegrid.plans.plan import COMPUTES, Action, ActionKind, Plan, Routes, Step, actions_of, step_text
from pipegrid.plans.plan.parts import is_pair
from pipegrid.plans.verify.table import ActionRule, PositionTable


def why_no_rule(plan: Plan, position: int, step: int, action: Action) -> PlanFault:
    """The fault of an action that has no rule at this position."""

    def fault(rule: str, message: str) -> PlanFault:
        return PlanFault(rule, f"{action}: {message}", position, step)

    edge = action.edge
    if edge is not None and edge not in plan.graph.stage_edges:
        known = ", ".join(map(str, plan.graph.stage_edges)) or "none"
        return fault("unknown-edge", f"there is no edge {edge}; the graph has {known}")
    if action.stage >= plan.num_stages:
        return fault("unknown-stage", f"the plan has {plan.num_stages} stages, 0..{plan.num_stages - 1}")
    if plan.routes is not None and action.microbatch is not None and action.kind is not ActionKind.COLLECTIVE:
        return fault(*_why_not_routed(plan, plan.routes, action, position))
    places = list(plan.living(plan.placement[action.stage]))
    if action.kind is not ActionKind.COLLECTIVE and position not in places:
        return fault("misplaced", f"stage {action.stage} lies on position {' and '.join(map(str, places))}")
    if action.kind in COMPUTES:
        return fault("unneeded", f"stage {action.stage} is forward_only and has no backward")
    if action.direction is Direction.BACKWARD and edge not in plan.gradient_edges:
        return fault("unneeded", f"no gradient travels along edge {edge}; one of its stages is forward_only")
    if action.kind is ActionKind.COLLECTIVE:
        carrier = plan.collective_edges.get(edge) if edge is not None else None
        if carrier is None:
            return fault("unneeded", f"no group carries edge {edge}; its data is sent, or stays on its position")
        return fault("misplaced", f"this position is not in the group {carrier!r} of the edge")
    if edge is not None and plan.placement[edge.source] == plan.placement[edge.destination]:
        return fault("unneeded", f"both ends of edge {edge} lie on the same positions, which keep their own results")
    if edge is not None and edge in plan.collective_edges:
        return fault("unneeded", f"the data of edge {edge} moves by the group {plan.collective_edges[edge]!r}")
    return fault("unneeded", "the other end is this position alone, which keeps its own result")


def _why_not_routed(plan: Plan, routes: Routes, action: Action, position: int) -> tuple[str, str]:
    """The rule that an action breaks in a plan with routes, and the text."""
    unit, stage, edge = action.microbatch, action.stage, action.edge
    assert unit is not None
    if unit >= routes.num_units:
        text = f"there is no unit {unit}; the routes have {routes.num_units}, 0..{routes.num_units - 1}"
        return "unknown-microbatch", text
    name, (module, _) = routes.name(unit), plan.graph.module_of(stage)
    if routes.skips_module(unit, module) and not routes.served(routes.call(unit, module), module):
        return "unneeded", f"unit {name} skips module {module!r}"
    if unit not in routes.calls(module):
        call = routes.name(routes.call(unit, module))
        return "unneeded", f"unit {name} is served by the call of {module!r} for unit {call}"
    if edge is None or position not in plan.living(plan.placement[stage]):
        actors = plan.actors(plan.placement[stage], routes.of(unit, stage))
        if position not in actors:
            return "misplaced", f"stage {stage} of unit {name} is computed by actor {' and '.join(map(str, actors))}"
    if action.kind in COMPUTES or edge not in plan.gradient_edges:
        return "unneeded", f"stage {stage} has no backward along here; one of its stages is forward_only"
    return "unneeded", f"the data of unit {name} along edge {edge} does not leave or come to this actor"


def why_refused(
    table: PositionTable, flags: bytearray, steps: Sequence[Step], step: int, action: Action, rule: ActionRule
) -> PlanFault:
    """The fault of an action that breaks its rule, with the ``flags`` that are set before it."""
    plan, position = table.plan, table.position
    piece = 0 if table.routed else plan.piece_of(action)
    if piece >= plan.num_pieces:
        return unknown_microbatch(action, plan.num_microbatches, position, step)
    if flags[rule.done + piece]:
        return PlanFault("duplicate", f"{action} has been done before, and may be done once", position, step)
    unmet = next(needed for needed in rule.needs if not flags[needed + piece])
    makers = table.makers_of(unmet + piece)
    later, text = _needs(action, makers, steps)
    late = later and action.kind in COMPUTES and makers[0].kind.is_receive
    return PlanFault("late-receive" if late else "dependency", text, position, step)


def out_of_sequence(table: PositionTable, done: int, steps: Sequence[Step], step: int, action: Action) -> PlanFault:
    """The fault of a slice that runs before the one that it needs; ``done``: the flags of the action's results."""
    plan, forward = table.plan, action.kind is ActionKind.F
    piece = plan.piece_of(action) + (-1 if forward else 1)
    makers = table.makers_of(done + piece)
    why = "it reads the keys and values" if forward else "the gradients of its keys and values come from that"
    return PlanFault("dependency", f"{_needs(action, makers, steps)[1]}: {why}", table.position, step)


def _needs(action: Action, makers: Sequence[Action], steps: Sequence[Step]) -> tuple[bool, str]:
    """Whether one of ``makers`` comes later on the position, and the text that ``action`` needs it before."""
    later = [at for maker in makers if (at := step_of(maker, steps)) is not None]
    where = f"which comes at step {later[0]}" if later else "which this position never does"
    return bool(later), f"{action} needs {' or '.join(map(str, makers))} before it, {where}"


def step_of(action: Action, steps: Sequence[Step]) -> int | None:
    """The last step that contains ``action``; None if there is none."""
    return next((index for index in reversed(range(len(steps))) if action in actions_of(steps[index])), None)


def unknown_microbatch(action: Action, count: int, position: int, step: int) -> PlanFault:
    """The fault of a microbatch that the plan does not have."""
    message = f"{action}: there is no microbatch {action.microbatch}; the plan has {count}, 0..{count - 1}"
    return PlanFault("unknown-microbatch", message, position, step)


def deadlock(cycle: Sequence[tuple[Stall, Stall]], positions: Sequence[Sequence[Step]], *, in_order: bool) -> PlanFault:
    """The fault of positions that wait for each other in a cycle, action by action."""

    def place(wait: Stall) -> str:
        step = positions[wait.position][wait.step]
        text = _part_text(step, wait.part) if in_order else step_text(step)
        return f"position {wait.position}, step {wait.step}: {text}"

    steps = [positions[wait.position][wait.step] for waits in cycle for wait in waits]
    remedy = "move one of these actions, or issue those that wait as one batch"
    if in_order and any(not isinstance(step, Action) and not is_pair(step) for step in steps):
        remedy = "write their batches in one order, or move one of these actions"
    lines = [f"\n      {place(wait)} waits for {place(setter)}" for wait, setter in cycle]
    text = f"{len(cycle)} positions wait for each other in a cycle; {remedy}{''.join(lines)}"
    return PlanFault("cycle", text, cycle[0][0].position, cycle[0][0].step)


def _part_text(step: Step, part: int) -> str:
    """A part of a batch whose messages block in order (those of one flow), and the batch."""
    flow = attrgetter("edge", "direction", "microbatch", "slice", "group")
    parts = [list(own) for _, own in groupby(actions_of(step), flow)]
    if len(parts) == 1 or is_pair(step):
        return step_text(step)
    return f"{' '.join(map(str, parts[part]))} of {step_text(step)}"
