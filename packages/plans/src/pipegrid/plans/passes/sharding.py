"""Gathers and frees of the parameters of sharded stages, and reductions of their gradients, as actions of a plan.

A position has room for a *window* of gathered stages. Its computes need stages in a known order, so which one to free
for the next is the question that Belady answered for pages: the one whose next use is farthest away (Belady 1966, "A
study of replacement algorithms for a virtual-storage computer"); no choice gathers fewer times. A stage is freed right
after its last use before that, and the next one is gathered in its place at once, ahead of its first compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pipegrid.core.fields import checked, instance
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Action, ActionKind, Plan, Step, actions_of

Reduce: TypeAlias = Literal["step", "microbatch"]
Shard: TypeAlias = Reduce | Mapping[str, Reduce]
"""The time at which the gradients of sharded modules are reduced; a mapping names the modules that are sharded."""

_ByModule = Annotated[Any, instance(Mapping, "a dict from a module's name to 'step' or 'microbatch'")]

UNSHARD, RESHARD, REDUCE_GRAD = ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD
_LAST_HALVES = (ActionKind.B, ActionKind.W)


def sharded_stages(plan: Plan, shard: Shard) -> dict[int, Reduce]:
    """Per sharded stage, when its gradients are reduced."""
    order = plan.graph.order
    by_module = dict.fromkeys(order, shard) if isinstance(shard, str) else checked(shard, _ByModule, "shard", PlanError)
    for name, reduce in by_module.items():
        checked(reduce, Reduce, "shard" if isinstance(shard, str) else f"shard[{name!r}]", PlanError)
        if name not in order:
            raise PlanError(f"shard names module {name!r}; the plan has {', '.join(map(repr, order))}")
    modules = [plan.graph.module_of(stage)[0] for stage in range(plan.num_stages)]
    return {stage: by_module[name] for stage, name in enumerate(modules) if name in by_module}


def with_gathers(
    steps: Sequence[Step], reduce: Mapping[int, Reduce], *, forward_only: Sequence[int], window: int
) -> list[Step]:
    """The steps of a position with ``UNSHARD``, ``RESHARD`` and ``REDUCE_GRAD``, each right before a compute.

    ``reduce``: the sharded stages, and when their gradients are reduced. ``window``: the most stages gathered at once.
    """
    computes = [actions_of(step) for step in steps if actions_of(step)[0].kind.is_compute]
    uses = [(number, action) for number, step in enumerate(computes) for action in step if action.stage in reduce]
    if not uses:
        return list(steps)
    after: list[list[Action]] = [[] for _ in range(len(computes) + 1)]  # after so many computes
    last = {action.stage: number for number, action in uses}
    for number, action in uses:
        stage, trains = action.stage, action.stage not in forward_only and action.kind in _LAST_HALVES
        each = reduce[stage] == "microbatch" and not action.slice  # slice 0 has the last backward
        if trains and (each or last[stage] == number):
            after[number + 1].append(Action(REDUCE_GRAD, stage))
    for number, freed, gathered in _swaps([(number, action.stage) for number, action in uses], window):
        after[number] += [Action(RESHARD, stage) for stage in freed] + [Action(UNSHARD, stage) for stage in gathered]
    placed = list[Step](after[0])
    count = 0
    for step in steps:
        is_compute = actions_of(step)[0].kind.is_compute
        if is_compute and count:
            placed += after[count]
        placed.append(step)
        count += is_compute
    return placed + (after[count] if count else [])


def _swaps(uses: Sequence[tuple[int, int]], window: int) -> list[tuple[int, list[int], list[int]]]:
    """(computes before it, stages to free, stages to gather) of each change; ``uses``: (compute or pair, stage)."""
    coming: dict[int, list[int]] = {}
    for number, stage in reversed(uses):
        coming.setdefault(stage, []).append(number)
    gathered: dict[int, int] = {}  # per gathered stage, its last use so far
    swaps: list[tuple[int, list[int], list[int]]] = []
    done = 0  # the place of the latest swap
    for number, stage in uses:
        if stage not in gathered:
            freed: list[int] = []
            place = 0
            if len(gathered) == window:
                free = [held for held, used in gathered.items() if used < number]  # not by the other half of a pair
                if not free:
                    what = f"a pair computes two stages, and {window} may be gathered at once"
                    raise PlanError(f"{what}; prefetch one more")
                victim = max(free, key=lambda held: coming[held][-1] if coming[held] else math.inf)
                freed, place = [victim], gathered.pop(victim) + 1
            done = max(done, place)
            swaps.append((done, freed, [stage]))
        gathered[stage] = number
        coming[stage].pop()
    # Stages that no compute needs any more are freed at once, where no swap has freed them for another.
    swaps += [(number + 1, [stage], []) for stage, number in gathered.items()]
    return sorted(swaps, key=lambda swap: swap[0])
