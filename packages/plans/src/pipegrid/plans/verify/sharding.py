"""Verification of gathered parameters: there for each compute, reduced after the last backward, freed at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipegrid.plans.errors import PlanFault
from pipegrid.plans.plan import COMPUTES, SHARDING, Action, ActionKind, Plan, Step, actions_of

UNSHARD, RESHARD = ActionKind.UNSHARD, ActionKind.RESHARD


def check_sharding(plan: Plan, window: int | None) -> list[tuple[list[PlanFault], int]]:
    """Per position the faults of its ``UNSHARD``, ``RESHARD``, ``REDUCE_GRAD``, and the most stages gathered at once.

    A stage with one of them anywhere is sharded. On each of its positions, every compute and every ``REDUCE_GRAD``
    finds it gathered; a ``REDUCE_GRAD`` follows its last backward, before a ``REDUCE`` of a parameter that it ties; and
    it is freed at the end. At most ``window`` stages of a position are gathered at once.
    """
    alone = [step for steps in plan.positions for step in steps if isinstance(step, Action)]
    sharded = {action.stage for action in alone if action.kind in SHARDING}
    return [_ShardedPosition(plan, place, sharded).check(steps, window) for place, steps in enumerate(plan.positions)]


class _ShardedPosition:
    """The state of one position's stages, action by action."""

    def __init__(self, plan: Plan, position: int, sharded: set[int]) -> None:
        self.plan, self.position, self.sharded = plan, position, sharded
        self.gathered: set[int] = set()
        self.freed: dict[int, int] = {}  # per stage, the step of its last RESHARD
        self.unreduced: set[int] = set()
        self.tied = {group.name: group.tied for group in plan.groups}

    def check(self, steps: Sequence[Step], window: int | None) -> tuple[list[PlanFault], int]:
        faults: list[PlanFault] = []
        peak = 0
        for index, step in enumerate(steps):
            for action in actions_of(step):
                faults += [PlanFault(rule, text, self.position, index) for rule, text in self._faults(action, index)]
                if action.kind is UNSHARD and len(self.gathered) > peak:
                    peak = len(self.gathered)
                    if window is not None and peak > window:
                        text = f"{action}: {peak} stages are gathered at once; the window is {window}"
                        faults.append(PlanFault("memory", text, self.position, index))
        for stage in sorted(self.unreduced):
            text = f"{stage}REDUCE_GRAD after the last backward of stage {stage}: to be done here, and never done"
            faults.append(PlanFault("missing", text, self.position))
        for stage in sorted(self.gathered):
            text = f"{stage}RESHARD: to be done at the end, as an optimizer updates the shards, and never done"
            faults.append(PlanFault("missing", text, self.position))
        return faults, peak

    def _faults(self, action: Action, index: int) -> Iterator[tuple[str, str]]:
        kind, stage = action.kind, action.stage
        if kind is ActionKind.REDUCE and action.group is not None:
            late = sorted(self.unreduced.intersection(self.tied.get(action.group, ())))
            if late:
                text = f"{action} sums gradients of stage {late[0]}, which needs {late[0]}REDUCE_GRAD first"
                yield "dependency", text
        if stage not in self.sharded or (kind not in COMPUTES and kind not in SHARDING):
            return
        if kind is UNSHARD:
            if stage in self.gathered:
                yield "duplicate", f"{action}: stage {stage} is gathered already"
            self.gathered.add(stage)
            return
        if stage not in self.gathered:
            where = f"step {self.freed[stage]} has freed it" if stage in self.freed else "nothing has gathered it"
            yield "dependency", f"{action} needs {stage}UNSHARD before it; {where}"
        if kind is RESHARD:
            self.gathered.discard(stage)
            self.freed[stage] = index
        elif kind is ActionKind.REDUCE_GRAD:
            if stage not in self.unreduced:
                yield "unneeded", f"{action}: no backward of stage {stage} comes before it that is not reduced yet"
            self.unreduced.discard(stage)
        elif kind is not ActionKind.F:
            self.unreduced.add(stage)
