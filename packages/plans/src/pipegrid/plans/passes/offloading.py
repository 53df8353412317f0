"""Activations that leave the device between a forward and its backward, so that a plan fits a memory limit.

A position with no room for a forward frees the activations whose backward is farthest away, of those whose copy has had
a compute to hide behind (Belady 1966: no choice moves fewer). They go out right after their forward, and come back as
early as there is room, at most a few computes before their backward.

Source: Wan et al. 2025, "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization".
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve, field

from pipegrid.core.fields import Amount, Index, checked, checked_arguments
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import OFFLOADING, Action, ActionKind, Plan, Step, actions_of, require_plan
from pipegrid.plans.simulate import with_slack

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W
OFFLOAD, RELEASE, RELOAD = ActionKind.OFFLOAD, ActionKind.RELEASE, ActionKind.RELOAD


@checked_arguments(PlanError)
def offload(plan: Plan, memory_limit: Amount, *, sizes: Sequence[float] | None = None, prefetch: Index = 2) -> Plan:
    """``plan`` with ``OFFLOAD``, ``RELEASE`` and ``RELOAD``, so that no position holds more than ``memory_limit``.

    The order of computes stays, so messages are those of ``plan`` and nothing new can deadlock. Positions that keep to
    the limit stay as they are.

    Args:
        plan: lowered, or computes alone.
        memory_limit: of live activations on each position, in the unit of ``sizes``.
        sizes: per stage, the memory of a microbatch (``costs.activation``); by default its share of a position, so that
            the limit is in microbatches, as that of `verify`.
        prefetch: computes before a backward at which its ``RELOAD`` may come, at most.

    Raises:
        PlanError: a limit that does not hold one microbatch of each stage that is between two computes; a plan that
            offloads already, or with slices, of which later ones read what earlier ones keep.

    Examples:
        >>> verify(offload(one_f_one_b(4, 8), memory_limit=3)).peak_live
        (3.0, 3.0, 2.0, 1.0)
    """
    require_plan(plan)
    if plan.num_slices > 1:
        raise PlanError(f"the plan has {plan.num_slices} slices; offload a plan of whole microbatches")
    if any(action.kind in OFFLOADING for position in range(plan.num_positions) for action in plan.actions(position)):
        raise PlanError("the plan offloads already; give the plan without OFFLOAD, RELEASE and RELOAD")
    if sizes is None:
        sizes = [1 / beside for beside in plan.stages_beside]
    sizes = checked(sizes, tuple[Amount, ...], "sizes", PlanError)
    if len(sizes) != plan.num_stages:
        raise PlanError(f"sizes has {len(sizes)} numbers and the plan {plan.num_stages} stages; give one for each")
    positions = [
        _PositionStays(position, plan, sizes, with_slack(memory_limit), prefetch).steps(steps)
        for position, steps in enumerate(plan.positions)
    ]
    return evolve(plan, positions=positions)


@define
class _Stay:
    """The activations of a forward while they are on the device: from compute ``first`` to compute ``last``.

    ``starts`` and ``ends``: whether that is by their ``F`` and by their ``B`` or ``W``, not by copies. ``used``: the
    first half of their backward.
    """

    action: Action
    size: float
    first: int
    last: int
    used: int
    starts: bool = True
    ends: bool = True


@define
class _PositionStays:
    """One position's computes, and the stays of their activations."""

    number: int
    plan: Plan
    sizes: Sequence[float]
    limit: float
    prefetch: int
    stays: list[_Stay] = field(factory=list)

    def steps(self, steps: Sequence[Step]) -> Sequence[Step]:
        """The steps with copies."""
        computes = [actions_of(step) for step in steps if actions_of(step)[0].kind.is_compute]  # a pair is one
        live = self._live(computes)
        if max(live, default=0.0) <= self.limit:
            return steps
        self._shorten(len(computes))
        before, after = self._copies(len(computes))
        placed: list[Step] = []
        count = 0
        for step in steps:
            is_compute = actions_of(step)[0].kind.is_compute
            if is_compute:
                placed += before[count]
            placed.append(step)
            if is_compute:
                placed += after[count]
                count += 1
        return placed

    def _live(self, computes: Sequence[Sequence[Action]]) -> list[float]:
        """Make the stays; memory during each compute."""
        open_stays: dict[tuple[int, int | None], _Stay] = {}
        for index, action in ((index, action) for index, step in enumerate(computes) for action in step):
            key, size = (action.stage, action.microbatch), self.sizes[action.stage]
            if action.kind is F:
                stay = open_stays[key] = _Stay(action, size, index, index, -1)
                self.stays.append(stay)
            elif key in open_stays:
                stay = open_stays[key]
                stay.last = index
                stay.used = index if action.kind is not W else stay.used
        return [self._held(index) for index in range(len(computes))]

    def _held(self, index: int) -> float:
        return sum(stay.size for stay in self.stays if stay.first <= index <= stay.last)

    def _shorten(self, count: int) -> None:
        """Cut stays in two, compute by compute, wherever the memory is over the limit.

        Where copies come back early, one fewer stays than there is room for: the next to come back has the rest.
        """
        room = max(stay.size for stay in self.stays) if self.prefetch else 0.0
        for index in range(count):
            while (held := self._held(index)) > self.limit - room:
                idle = [stay for stay in self.stays if stay.first < index <= stay.last and stay.used > index]
                over = held > self.limit
                if over and not idle:
                    raise PlanError(
                        f"memory_limit {self.limit:g} does not hold what position {self.number} computes with; "
                        f"the least that works there is {held}"
                    )
                hidden = [stay for stay in idle if stay.first < index - 1] or (idle if over else [])
                if not hidden:
                    break
                self._cut(max(hidden, key=lambda stay: stay.used), index)

    def _cut(self, stay: _Stay, index: int) -> None:
        """End a stay before compute ``index``; another begins where there is room for it, near its use."""
        back = _Stay(stay.action, stay.size, stay.used, stay.last, stay.used, False, stay.ends)
        stay.last, stay.ends = index - 1, False
        self.stays.append(back)

    def _copies(self, count: int) -> tuple[list[list[Action]], list[list[Action]]]:
        """The actions before and after each compute."""
        live = [self._held(index) for index in range(count)]
        before: list[list[Action]] = [[] for _ in range(count)]
        after: list[list[Action]] = [[] for _ in range(count)]
        freed = {(stay.action.stage, stay.action.microbatch): stay.last for stay in self.stays if not stay.ends}
        for stay in sorted((stay for stay in self.stays if not stay.starts), key=lambda stay: stay.first):
            at, out = stay.first, freed[stay.action.stage, stay.action.microbatch]
            least = max(out + 2, stay.first - self.prefetch)
            while at > least and live[at - 1] + stay.size <= self.limit:
                at -= 1
                live[at] += stay.size
            before[at].append(evolve(stay.action, kind=RELOAD))
        for stay in self.stays:
            if not stay.ends:
                after[stay.first].append(evolve(stay.action, kind=OFFLOAD))
                before[stay.last + 1].insert(0, evolve(stay.action, kind=RELEASE))
        return before, after
