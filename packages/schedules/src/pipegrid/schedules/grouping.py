"""The groups that `lower` adds to a plan: those that carry an edge, and those that share a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from pipegrid.schedules.arguments import require, require_items
from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.plan.actions import Action, ActionKind
from pipegrid.schedules.plan.plan import Group, Plan, Step
from pipegrid.transport.edge import Edge


def with_collectives(plan: Plan, collectives: Mapping[Edge, str]) -> tuple[Group, ...]:
    """The plan's groups, with those that carry ``collectives``: the positions of an edge's two stages.

    Raises:
        PlanError: an edge that the graph does not have, or a group with other positions than its edge.
    """
    require("collectives", collectives, Mapping, "give a dict from an Edge to its group's name", error=PlanError)
    groups = {group.name: group for group in plan.groups}
    for edge, name in collectives.items():
        if edge not in plan.graph.stage_edges:
            known = ", ".join(map(str, plan.graph.stage_edges)) or "none"
            raise PlanError(f"collectives names edge {edge}; the graph has {known}")
        places = {*plan.placement[edge.source], *plan.placement[edge.destination]}
        group = groups.setdefault(name, Group(name, places))
        if set(group.positions) != places:
            raise PlanError(
                f"edge {edge} lies on positions {sorted(places)} and its group {name!r} has {list(group.positions)}; "
                "give it a group of exactly its own positions"
            )
        groups[name] = evolve(group, edges={*group.edges, edge})
    return tuple(groups.values())


def tied_groups(plan: Plan, tied: Mapping[str, Sequence[int]]) -> tuple[Group, ...]:
    """One group for each shared parameter: the positions of its stages.

    Raises:
        PlanError: a stage that the plan does not have.
    """
    require("tied", tied, Mapping, "give a dict from a group's name to the stages that share it", error=PlanError)
    for name, stages in tied.items():
        remedy = "give the list of stages that share the parameter"
        for stage in require_items(f"tied[{name!r}]", stages, int, remedy, error=PlanError):
            if not 0 <= stage < plan.num_stages:
                raise PlanError(f"tied {name!r} names stage {stage}; the plan has stages 0..{plan.num_stages - 1}")
    return tuple(
        Group(name, {place for stage in stages for place in plan.placement[stage]}, tied=stages)
        for name, stages in tied.items()
    )


def reductions(position: int, plan: Plan, groups: Sequence[Group]) -> list[Step]:
    """The ``REDUCE`` of each shared parameter that ``position`` holds, in one order for all positions."""
    return [
        Action(ActionKind.REDUCE, min(held), group=group.name)
        for group in groups
        if (held := [stage for stage in group.tied if position in plan.placement[stage]])
    ]
