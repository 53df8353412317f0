"""What can be checked position by position: one pass over the position's actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from pipegrid.schedules.errors import Fault
from pipegrid.schedules.plan.actions import Action, ActionKind
from pipegrid.schedules.plan.plan import Lane, Plan, Step, actions_of
from pipegrid.schedules.verify.deadlock import Program
from pipegrid.schedules.verify.event_ids import EventIds
from pipegrid.schedules.verify.explain import missing, unknown_microbatch, why_no_rule, why_refused
from pipegrid.schedules.verify.table import PositionTable

F, I, W = ActionKind.F, ActionKind.I, ActionKind.W


class Call(NamedTuple):
    """One member's part in a collective: what must be the same for all members, and its step."""

    same: str
    step: int


class PositionVerifier:
    """Checks the steps of one position, whatever those of the others, and gathers what checks between positions need.

    ``faults``: what is wrong so far. ``program``: for `waiting.play`; ``sent`` and ``received``: per lane, the
    position's messages in order; ``calls``: per group, its collectives in order. ``peak`` and ``input_peak``: the
    most microbatches live, until ``B`` or ``W``, and until ``B`` or ``I``.
    """

    def __init__(self, rules: PositionTable, steps: Sequence[Step]) -> None:
        self.rules, self.position, self.steps = rules, rules.position, steps
        self.faults: list[Fault] = []
        self.program = Program()
        self.calls: dict[str, list[Call]] = {
            group.name: [] for group in rules.plan.groups if rules.position in group.positions
        }
        self.reduced: set[str] = set()  # names of groups, and numbers of stages reduced without one
        self.flags = bytearray(rules.num_flags)
        orders: list[list[int]] = [[] for _ in rules.lanes]
        self._check(orders)
        self.sent: dict[Lane, list[int]] = {}
        self.received: dict[Lane, list[int]] = {}
        for (lane, sends), order in zip(rules.lanes, orders, strict=True):
            (self.sent if sends else self.received)[lane] = order
        self.faults += missing(self)

    def _check(self, orders: Sequence[list[int]]) -> None:
        rules, program, flags = self.rules, self.program, self.flags
        plan, table, rendezvous, operations = rules.plan, rules.table, rules.rendezvous, program.operations
        count, forward_only = plan.num_microbatches, frozenset(plan.forward_only)
        note = [order.append for order in orders]
        live = peak = live_inputs = input_peak = num_actions = 0
        # A stage's share of the position, in whole numbers of a unit small enough for all its stages.
        unit = math.lcm(*(plan.stages_beside[stage] for stage in rules.stages))
        sizes = {stage: unit // plan.stages_beside[stage] for stage in rules.stages}
        waits: list[int] = []  # a batch tells its partners all at once, and then waits for them
        for index, step in enumerate(self.steps):
            actions = (step,) if isinstance(step, Action) else step
            num_actions += len(actions)
            began = len(operations)
            for action in actions:
                kind, microbatch, edge = action.kind, action.microbatch, action.edge
                rule = table.get((kind, action.stage) if edge is None else (kind, edge.source, edge.destination))
                if rule is None or microbatch is None:
                    self._check_collective(index, action, waits)
                    continue
                _, done, needs, also, messages, sets, awaits = rule
                at = done + microbatch
                if microbatch >= count or flags[at]:
                    self.faults.append(why_refused(self, index, action, rule))
                    continue
                for needed in needs:
                    if not flags[needed + microbatch]:
                        self.faults.append(why_refused(self, index, action, rule))
                        break
                flags[at] = 1
                if edge is not None:
                    for lane, number, mine, theirs in messages:
                        note[lane](number + microbatch)
                        if rendezvous:
                            operations.append(mine + microbatch)
                            waits.append(~(theirs + microbatch))
                        elif mine == number:
                            operations.append(mine + microbatch)
                    continue
                if also is not None:
                    flags[also + microbatch] = 1
                for base in awaits:
                    operations.append(~(base + microbatch))
                for base in sets:
                    operations.append(base + microbatch)
                size = sizes[action.stage]
                if kind is F:
                    live += size
                    live_inputs += size
                    peak = max(peak, live)
                    input_peak = max(input_peak, live_inputs)
                    if forward_only and action.stage in forward_only:
                        live -= size
                        live_inputs -= size
                else:
                    live -= 0 if kind is I else size
                    live_inputs -= 0 if kind is W else size
            if waits:
                operations += waits
                waits.clear()
            if len(operations) > began:
                program.starts.append(began)
                program.steps.append(index)
        self.num_actions = num_actions
        self.peak, self.input_peak = peak / unit, input_peak / unit

    def step_of(self, action: Action) -> int | None:
        """The last step with this action; None if there is none."""
        return self._steps_by_action.get(_identity(action))

    @cached_property
    def _steps_by_action(self) -> dict[tuple[object, ...], int]:
        return {_identity(action): index for index, step in enumerate(self.steps) for action in actions_of(step)}

    def _fault(self, rule: str, message: str, step: int) -> None:
        self.faults.append(Fault(rule, message, self.position, step))

    def _check_collective(self, index: int, action: Action, waits: list[int]) -> None:
        """Check a ``REDUCE`` or ``COLLECTIVE``, or refuse an action that has no rule here."""
        marks, plan, position = self.rules.marks, self.rules.plan, self.position
        if action.kind not in (ActionKind.REDUCE, ActionKind.COLLECTIVE):
            self.faults.append(why_no_rule(plan, position, index, action))
            return
        if action.group is not None and action.group not in self.calls:
            members = _members(plan, action.group)
            whose = f"it has positions {list(members)}" if members else "the plan has no such group"
            self._fault("group", f"{action}: this position is not in the group; {whose}", index)
            return
        if action.kind is ActionKind.REDUCE:
            if not self._may_reduce(index, action):
                return
            same = "REDUCE"
        elif action.edge is None:
            count = plan.num_microbatches
            if action.microbatch is not None and action.microbatch >= count:
                self.faults.append(unknown_microbatch(action, count, position, index))
                return
            same = f"COLLECTIVE{'' if action.microbatch is None else action.microbatch}"
        else:
            if not self._may_collect(index, action):
                return
            same = str(action)
        if action.group is not None:
            calls = self.calls[action.group]
            members = _members(plan, action.group)
            self.program.operations.append(marks.called(action.group, len(calls), position))
            waits += [~marks.called(action.group, len(calls), other) for other in members if other != position]
            calls.append(Call(same, index))

    def _may_reduce(self, index: int, action: Action) -> bool:
        rules, stage = self.rules, action.stage
        if stage not in rules.weights:
            self.faults.append(why_no_rule(rules.plan, self.position, index, action))
            return False
        if stage in rules.plan.forward_only:
            self._fault("unneeded", f"{action}: stage {stage} has no backward to reduce", index)
            return False
        name = action.group or f"{stage}"
        if name in self.reduced:
            self._fault("duplicate", f"{action} is here a second time", index)
            return False
        self.reduced.add(name)
        count = rules.plan.num_microbatches
        for held in {stage, *rules.tied.get(name, ())}:
            left = self.flags.count(0, rules.weights[held], rules.weights[held] + count)
            if left:
                self._fault(
                    "dependency",
                    f"{action} comes before the last backward of stage {held}; {left} of {count} microbatches are "
                    "not done",
                    index,
                )
        return True

    def _may_collect(self, index: int, action: Action) -> bool:
        assert action.edge is not None
        assert action.microbatch is not None
        assert action.direction is not None
        plan = self.rules.plan
        rule = self.rules.collectives.get((action.edge, action.direction))
        if rule is None:
            self.faults.append(why_no_rule(plan, self.position, index, action))
            return False
        group = plan.collective_edges[action.edge]
        if action.group != group:
            self._fault("group", f"{action}: edge {action.edge} already uses the group {group!r}", index)
            return False
        done = rule.done + action.microbatch
        if action.microbatch >= plan.num_microbatches or self.flags[done]:
            self.faults.append(why_refused(self, index, action, rule))
            return False
        if any(not self.flags[needed + action.microbatch] for needed in rule.needs):
            self.faults.append(why_refused(self, index, action, rule))
        self.flags[done] = 1
        return True


def own_faults(plan: Plan, position: int) -> list[Fault]:
    """The faults of one position's steps, whatever those of the others are; `verify` finds more."""
    table = PositionTable(EventIds(plan), position, rendezvous=False)
    return PositionVerifier(table, plan.positions[position]).faults


def _members(plan: Plan, name: str) -> tuple[int, ...]:
    return next((group.positions for group in plan.groups if group.name == name), ())


def _identity(action: Action) -> tuple[object, ...]:
    """What is quicker to hash than the action itself."""
    return action.kind, action.stage, action.microbatch, action.edge, action.group
