"""Whether the parts of a plan fit each other: sizes, placement, groups. What its steps do is for `verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.schedules.arguments import is_integer, shown
from pipegrid.schedules.errors import PlanFieldError

if TYPE_CHECKING:
    from pipegrid.schedules.plan.plan import Group, Plan
    from pipegrid.transport.edge import Edge


def check_shape(plan: Plan) -> None:
    """Refuse sizes that cannot be, and names of positions, stages and edges that the plan does not have.

    Raises:
        PlanFieldError: names the part.
    """
    if not plan.positions:
        raise PlanFieldError("the plan has no positions", path=("positions",), expected="at least one position")
    count = plan.num_microbatches
    if not is_integer(count, least=1):
        raise PlanFieldError(
            f"num_microbatches is {shown(count)}; a plan has at least 1 microbatch",
            path=("num_microbatches",),
            expected="at least 1 microbatch",
        )
    _check_placement(plan)
    _check_forward_only(plan)
    names: dict[str, int] = {}
    carriers: dict[Edge, str] = {}
    for number, group in enumerate(plan.groups):
        if names.setdefault(group.name, number) != number:
            raise PlanFieldError(
                f"groups are named twice in {[own.name for own in plan.groups]}; every name must be unique",
                path=("groups", number, "name"),
                expected="a name that no other group has",
            )
        _check_members(plan, number, group)
        _check_carried(plan, number, group, carriers)


def check_creation_lists(plan: Plan) -> None:
    """Refuse an order of creation that is not one for each position.

    Raises:
        PlanFieldError: says how many there are.
    """
    if len(plan.creation) != plan.num_positions:
        raise PlanFieldError(
            f"creation has {len(plan.creation)} lists and the plan {plan.num_positions} positions; "
            "give one list per position",
            path=("creation",),
            expected=f"one list for each of {plan.num_positions} positions",
        )


def _check_placement(plan: Plan) -> None:
    num_stages, covered = plan.graph.num_stages, len(plan.placement)
    if covered != num_stages:
        of = f"{num_stages} stage{'s' if num_stages > 1 else ''}"
        raise PlanFieldError(
            f"the placement covers {covered} stages and the graph has {num_stages}; give the position of every stage",
            path=("placement", min(covered, num_stages)),
            expected=f"the position of stage {covered}; the graph has {of}"
            if covered < num_stages
            else f"no more than the positions of {of}, which the graph has",
        )
    for stage, positions in enumerate(plan.placement):
        if not positions or len(set(positions)) != len(positions):
            raise PlanFieldError(
                f"stage {stage} is placed on {list(positions)}; name each of its positions once",
                path=("placement", stage),
                expected="one or more positions, each once",
            )
        for position in positions:
            if not 0 <= position < plan.num_positions:
                known = f"0..{plan.num_positions - 1}"
                raise PlanFieldError(
                    f"stage {stage} is placed on position {position}; the plan has positions {known}",
                    path=("placement", stage, position),
                    expected=f"a position in {known}",
                )


def _check_forward_only(plan: Plan) -> None:
    last = plan.graph.num_stages - 1
    for stage in plan.forward_only:
        if not 0 <= stage <= last:
            raise PlanFieldError(
                f"forward_only names stage {stage}; the graph has stages 0..{last}",
                path=("forward_only", stage),
                expected=f"a stage in 0..{last}",
            )
    for stage in range(last + 1):
        after = [edge.destination for edge in plan.graph.stage_edges if edge.source == stage]
        if stage not in plan.forward_only and after and all(s in plan.forward_only for s in after):
            fed = ", ".join(map(str, after))
            raise PlanFieldError(
                f"stage {stage} is trained, but all stages that it feeds ({fed}) are "
                "forward_only, so no gradient comes back to it; make it forward_only too, or one of them not",
                path=("forward_only", after[0]),
                expected=f"stage {stage} beside it: of all that it feeds ({fed}), no gradient comes back to it",
            )


def _check_members(plan: Plan, number: int, group: Group) -> None:
    """The positions of a group exist, and are those of its stages."""
    for position in group.positions:
        if not 0 <= position < plan.num_positions:
            known = f"0..{plan.num_positions - 1}"
            raise PlanFieldError(
                f"group {group.name!r} names position {position}; the plan has positions {known}",
                path=("groups", number, "positions", position),
                expected=f"a position in {known}",
            )
    for stage in group.tied:
        if not 0 <= stage < plan.num_stages:
            known = f"0..{plan.num_stages - 1}"
            raise PlanFieldError(
                f"group {group.name!r} ties stage {stage}; the plan has stages {known}",
                path=("groups", number, "tied", stage),
                expected=f"a stage in {known}",
            )
        if stage in plan.forward_only:
            raise PlanFieldError(
                f"group {group.name!r} ties stage {stage}, which has no backward to reduce",
                path=("groups", number, "tied", stage),
                expected=f"a stage that is trained; {stage} is forward_only and has no backward to reduce",
            )
    holders = {place for stage in group.tied for place in plan.placement[stage]}
    strangers = sorted(set(group.positions) - holders)
    if group.tied and strangers:
        raise PlanFieldError(
            f"group {group.name!r} has positions {list(group.positions)} and ties stages of {sorted(holders)} "
            "alone; a position without a tied stage has nothing to reduce",
            path=("groups", number, "positions", strangers[0]),
            expected=f"only the positions of the tied stages, {sorted(holders)}",
        )


def _check_carried(plan: Plan, number: int, group: Group, carriers: dict[Edge, str]) -> None:
    """The edges of a group exist and are carried by no other, and all positions of its stages are members."""
    for edge in group.edges:
        known = ", ".join(map(str, plan.graph.stage_edges)) or "none"
        if edge not in plan.graph.stage_edges:
            raise PlanFieldError(
                f"group {group.name!r} names edge {edge}; the graph has {known}",
                path=("groups", number, "edges", edge),
                expected=f"an edge of the graph, which has {known}",
            )
        if carriers.setdefault(edge, group.name) != group.name:
            raise PlanFieldError(
                f"groups {carriers[edge]!r} and {group.name!r} both carry edge {edge}; choose one",
                path=("groups", number, "edges", edge),
                expected=f"an edge that no other group carries; {carriers[edge]!r} has this one",
            )
    stages = {*group.tied, *(stage for edge in group.edges for stage in (edge.source, edge.destination))}
    needed = sorted({place for stage in stages for place in plan.placement[stage]})
    if not set(needed) <= set(group.positions):
        raise PlanFieldError(
            f"group {group.name!r} has positions {list(group.positions)} and its stages lie on {needed}; "
            "it must have all of these",
            path=("groups", number, "positions"),
            expected=f"all positions of its stages, {needed}",
        )
