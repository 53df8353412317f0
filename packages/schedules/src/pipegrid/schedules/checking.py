"""What can be checked position by position: one pass over all actions."""

from __future__ import annotations

import math
from typing import NamedTuple

from pipegrid.schedules.actions import Action, ActionKind
from pipegrid.schedules.errors import Fault
from pipegrid.schedules.explaining import missing, unknown_microbatch, why_no_rule, why_refused
from pipegrid.schedules.marks import Marks
from pipegrid.schedules.plan import Plan
from pipegrid.schedules.rules import Rules, Traffic
from pipegrid.schedules.waiting import Program

F, I, W = ActionKind.F, ActionKind.I, ActionKind.W


class Call(NamedTuple):
    """One member's part in a collective: what must be the same for all members, and its step."""

    same: str
    step: int


class LocalChecks:
    """Checks every position, and gathers what the checks across positions need.

    ``faults``: what is wrong so far. ``programs``: per position, for `waiting.play`; ``traffic``: per lane,
    messages in order; ``gathered``: per group and member, its collectives in order. ``peaks`` and
    ``input_peaks``: per position, the most microbatches live, until ``B`` or ``W``, and until ``B`` or ``I``.
    """

    def __init__(self, plan: Plan, marks: Marks, *, rendezvous: bool) -> None:
        self.plan = plan
        self.marks = marks
        self.rendezvous = rendezvous
        self.faults: list[Fault] = []
        self.programs = [Program() for _ in plan.positions]
        self.traffic = Traffic()
        self.gathered: dict[str, dict[int, list[Call]]] = {
            group.name: {position: [] for position in group.positions} for group in plan.groups
        }
        self.peaks = [0.0] * plan.num_positions
        self.input_peaks = [0.0] * plan.num_positions
        self.num_actions = 0
        for position in range(plan.num_positions):
            self._check(position, Rules(marks, self.traffic, position, rendezvous=rendezvous))

    def _check(self, position: int, rules: Rules) -> None:
        plan, table, program = self.plan, rules.table, self.programs[position]
        operations, rendezvous = program.operations, self.rendezvous
        count, forward_only = plan.num_microbatches, frozenset(plan.forward_only)
        live = peak = live_inputs = input_peak = num_actions = 0
        # A stage's share of the position, in whole numbers of a unit small enough for all its stages.
        unit = math.lcm(*(plan.stages_beside[stage] for stage in plan.stages_at[position]))
        sizes = {stage: unit // plan.stages_beside[stage] for stage in plan.stages_at[position]}
        for index, step in enumerate(plan.positions[position]):
            actions = (step,) if isinstance(step, Action) else step
            num_actions += len(actions)
            waits: list[int] = []  # a batch tells its partners all at once, and then waits for them
            began = len(operations)
            for action in actions:
                kind, microbatch, edge = action.kind, action.microbatch, action.edge
                rule = table.get((kind, action.stage) if edge is None else (kind, edge.source, edge.destination))
                if rule is None or microbatch is None:
                    self._check_collective(position, index, action, rules, waits)
                    continue
                done, needs, also, messages, sets, awaits, _, _ = rule
                if microbatch >= count or done[microbatch]:
                    self.faults.append(why_refused(self.marks, position, index, action, rule))
                    continue
                for flags in needs:
                    if not flags[microbatch]:
                        self.faults.append(why_refused(self.marks, position, index, action, rule))
                        break
                done[microbatch] = 1
                if edge is not None:
                    for order, number, mine, theirs in messages:
                        order.append(number + microbatch)
                        if rendezvous:
                            operations.append(mine + microbatch)
                            waits.append(~(theirs + microbatch))
                        elif mine == number:
                            operations.append(mine + microbatch)
                    continue
                if also is not None:
                    also[microbatch] = 1
                if awaits:
                    operations += [~(base + microbatch) for base in awaits]
                if sets:
                    operations += [base + microbatch for base in sets]
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
            if len(operations) > began:
                program.starts.append(began)
                program.steps.append(index)
        self.num_actions += num_actions
        self.peaks[position], self.input_peaks[position] = peak / unit, input_peak / unit
        self.faults += missing(position, rules)

    def _fault(self, rule: str, message: str, position: int, step: int | None = None) -> None:
        self.faults.append(Fault(rule, message, position, step))

    def _check_collective(self, position: int, index: int, action: Action, rules: Rules, waits: list[int]) -> None:
        """Check a ``REDUCE`` or ``COLLECTIVE``, or refuse an action that has no rule here."""
        if action.kind not in (ActionKind.REDUCE, ActionKind.COLLECTIVE):
            self.faults.append(why_no_rule(self.plan, position, index, action))
            return
        members = self.gathered.get(action.group or "", {})
        if action.group is not None and position not in members:
            whose = f"it has positions {sorted(members)}" if members else "the plan has no such group"
            self._fault("group", f"{action}: this position is not in the group; {whose}", position, index)
            return
        if action.kind is ActionKind.REDUCE:
            if not self._may_reduce(position, index, action, rules):
                return
            same = "REDUCE"
        elif action.edge is None:
            count = self.plan.num_microbatches
            if action.microbatch is not None and action.microbatch >= count:
                self.faults.append(unknown_microbatch(action, count, position, index))
                return
            same = f"COLLECTIVE{'' if action.microbatch is None else action.microbatch}"
        else:
            if not self._may_collect(position, index, action, rules):
                return
            same = str(action)
        if action.group is not None:
            number = len(members[position])
            mark = self.marks.numbered(action.group, number, position)
            self.marks.place(mark, position, index)
            self.programs[position].operations.append(mark)
            waits += [~self.marks.numbered(action.group, number, other) for other in members if other != position]
            members[position].append(Call(same, index))

    def _may_reduce(self, position: int, index: int, action: Action, rules: Rules) -> bool:
        stage = action.stage
        if stage not in rules.weights:
            self.faults.append(why_no_rule(self.plan, position, index, action))
            return False
        if stage in self.plan.forward_only:
            self._fault("unneeded", f"{action}: stage {stage} has no backward to reduce", position, index)
            return False
        name = action.group or f"{stage}"
        if name in rules.reduced:
            self._fault("duplicate", f"{action} is here a second time", position, index)
            return False
        rules.reduced.add(name)
        for held in {stage, *rules.tied.get(name, ())}:
            left = rules.weights[held].count(0)
            if left:
                self._fault(
                    "dependency",
                    f"{action} comes before the last backward of stage {held}; {left} of "
                    f"{self.plan.num_microbatches} microbatches are not done",
                    position,
                    index,
                )
        return True

    def _may_collect(self, position: int, index: int, action: Action, rules: Rules) -> bool:
        assert action.edge is not None
        assert action.microbatch is not None
        assert action.direction is not None
        rule = rules.collectives.get((action.edge, action.direction))
        if rule is None:
            self.faults.append(why_no_rule(self.plan, position, index, action))
            return False
        group = self.plan.collective_edges[action.edge]
        if action.group != group:
            self._fault("group", f"{action}: edge {action.edge} already uses the group {group!r}", position, index)
            return False
        if action.microbatch >= self.plan.num_microbatches or rule.done[action.microbatch]:
            self.faults.append(why_refused(self.marks, position, index, action, rule))
            return False
        if any(not flags[action.microbatch] for flags in rule.needs):
            self.faults.append(why_refused(self.marks, position, index, action, rule))
        rule.done[action.microbatch] = 1
        return True
