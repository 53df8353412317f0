"""Pairs in plans that have been found: a forward and a backward beside it, joined where a step gets shorter.

A pair saves what its two computes hide of each other, and costs what one of them waits for the inputs of the other. All
couples are tried at once; where that is longer, each half of them, in the order of their dates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from attrs import evolve

from pipegrid.plans.errors import PlanError
from pipegrid.plans.network.network import Objective
from pipegrid.plans.network.problem import Problem
from pipegrid.plans.plan import ActionKind, Plan, Step
from pipegrid.plans.simulate import Costs, simulate
from pipegrid.search.found import Found, candidate, rank_of, value_of

_Couple: TypeAlias = tuple[float, int, int]
"""The start of the first of two computes that follow each other, its position, and its number there."""

_KINDS = {(ActionKind.F, ActionKind.B), (ActionKind.F, ActionKind.I)}


def hides(costs: Costs) -> bool:
    """Whether pairs save anything."""
    return any(costs.hidden) if isinstance(costs.hidden, tuple) else bool(costs.hidden)


def without_hidden(costs: Costs, num_stages: int) -> Costs:
    """Costs of which no plan with pairs is shorter: each compute less all that it may save in a pair.

    A pair takes no less than its two computes at these costs, and may give its results no sooner.
    """
    halves = [saved / 2 for saved in costs.per_stage("hidden", num_stages)]
    less: dict[str, Any] = {
        name: [max(0.0, whole - half) for whole, half in zip(costs.per_stage(name, num_stages), halves, strict=True)]
        for name in ("F", "I", *(("B",) if costs.B is not None else ()))
    }
    return evolve(costs, hidden=0.0, **less)


def paired(found: Found, problem: Problem, objective: Objective) -> Found:
    """``found`` with the pairs that make it shorter; as it is where none does."""
    if any(found.plan.pairs) or not hides(problem.costs):
        return found
    dates = simulate(found.plan, problem.costs).start
    ways = [sorted(_couples(found.plan, dates, forward_first=first)) for first in (True, False)]
    joined = [_joined(found, problem, objective, couples) for couples in ways]
    return min(found, *joined, key=lambda one: rank_of(one, objective))


def _couples(plan: Plan, dates: Sequence[Sequence[float]], *, forward_first: bool) -> Iterable[_Couple]:
    """The computes of each position that may be pairs, none in two of them."""
    for position in range(plan.num_positions):
        actions = list(plan.actions(position))
        at = 0
        while at + 1 < len(actions):
            pair = actions[at : at + 2] if forward_first else actions[at : at + 2][::-1]
            apart = (pair[0].stage, pair[0].microbatch) != (pair[1].stage, pair[1].microbatch)
            alone = all(len(plan.placement[action.stage]) == 1 for action in pair)
            if (pair[0].kind, pair[1].kind) in _KINDS and apart and alone:
                yield dates[position][at], position, at
                at += 1
            at += 1


def _joined(found: Found, problem: Problem, objective: Objective, couples: Sequence[_Couple]) -> Found:
    """The best that is found where groups of couples are joined that make no step longer."""
    best, chosen = found, list[_Couple]()
    waiting = [list(couples)] if couples else []
    while waiting:
        group = waiting.pop()
        tried = _with(found, problem, [*chosen, *group])
        if tried is not None and value_of(tried, objective) <= value_of(best, objective):
            best, chosen = tried, [*chosen, *group]
        elif len(group) > 1:
            middle = len(group) // 2
            waiting += [group[middle:], group[:middle]]
    return best


def _with(found: Found, problem: Problem, couples: Iterable[_Couple]) -> Found | None:
    """``found`` with these couples as pairs; None where it gets stuck or does not keep to the cap."""
    firsts = defaultdict[int, set[int]](set)
    for _, position, at in couples:
        firsts[position].add(at)
    rows: list[list[Step]] = [[] for _ in found.plan.positions]
    for position, row in enumerate(rows):
        own, actions = firsts[position], list(found.plan.actions(position))
        for at, action in enumerate(actions):
            if at in own:
                other = actions[at + 1]
                row.append((action, other) if action.kind is ActionKind.F else (other, action))
            elif at - 1 not in own:
                row.append(action)
    try:
        return candidate(f"{found.origin}, pairs", evolve(found.plan, positions=rows), problem)
    except PlanError:  # a pair waits for what waits for it
        return None
