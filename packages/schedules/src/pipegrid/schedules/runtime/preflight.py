"""Whether a plan can be run here: its position for this rank's stages, and nothing that the runtime lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from pipegrid.schedules.arguments import require_items, shown
from pipegrid.schedules.errors import PlanError, PlanMismatchError, RuntimeArgumentError
from pipegrid.schedules.plan.actions import Action, ActionKind
from pipegrid.schedules.plan.plan import require_plan
from pipegrid.schedules.runtime.collectives import check_collectives
from pipegrid.schedules.verify import own_faults

if TYPE_CHECKING:
    from pipegrid.schedules.plan.plan import Plan
    from pipegrid.transport.edge import Edge


def position_of(plan: Plan, stages: Iterable[int]) -> int:
    """The position of ``plan`` that holds exactly ``stages``.

    Raises:
        PlanMismatchError: there is none; the message lists what each position holds. Or it is no plan.
    """
    require_plan(plan, error=PlanMismatchError)
    remedy = "give the numbers of this rank's stages"
    wanted = frozenset(require_items("stages", stages, int, remedy, error=PlanMismatchError))
    held = [frozenset(present) for present in plan.stages_at]
    for position, present in enumerate(held):
        if present == wanted:
            return position
    table = ", ".join(f"position {position}: {sorted(present)}" for position, present in enumerate(held))
    raise PlanMismatchError(f"this rank has stages {sorted(wanted)}, but no position of the plan holds these; {table}")


def reducer_name(action: Action) -> int | str:
    """Which reducer a ``REDUCE`` calls: by its group, or by its stage."""
    return action.group if action.group is not None else action.stage


def require_runnable(plan: Plan, position: int, communicator: Any, reducers: Collection[int | str]) -> None:
    """Refuse a plan with something in it, at ``position``, that cannot be run.

    Raises:
        PlanMismatchError: computes alone, a ``REDUCE`` without its reducer, a plan and a communicator that disagree on
            which edges carry gradients, messages but no communicator, a reducer for a group or stage that the plan
            does not reduce, or as `check_collectives`.
        PlanError: the steps of the position do not have what they need, or not in time, whatever the others do.
    """
    if plan.lanes and not plan.has_communication:
        raise PlanMismatchError(
            f"the plan has computes alone, but its {plan.num_positions} positions feed each other: nothing would be "
            "sent. Add the messages with lower(plan), and verify the result"
        )
    check_collectives(plan, position, communicator)
    _require_same_gradients(plan, getattr(communicator, "forward_edges", None))
    for action in plan.actions(position):
        if _reduces(action) and reducer_name(action) not in reducers:
            name = reducer_name(action)
            raise PlanMismatchError(
                f"position {position} has {action}, but there is no reducer for {name!r}; pass "
                f"reducers={{{name!r}: function}}"
            )
    for action in plan.actions(position):
        if communicator is None and action.kind.is_communication and not _reduces(action):
            raise PlanMismatchError(
                f"position {position} has {action}, but communicator is None; pass a PipelineCommunicator, such as "
                "P2PCommunicator(pp_group, config)"
            )
    if reducers:
        reduced = {reducer_name(a) for p in range(plan.num_positions) for a in plan.actions(p) if _reduces(a)}
        unknown = [name for name in reducers if name not in reduced]
        if unknown:
            raise PlanMismatchError(
                f"there are reducers for {unknown}, but the plan has a REDUCE only for {sorted(map(str, reduced))}: "
                "nobody would call them. Give the plan its groups (with_reduce, or lower(plan, tied=...)), or leave "
                "them out"
            )
    faults = own_faults(plan, position)
    if faults:
        raise PlanError(
            f"the plan cannot be run at position {position}; verify(plan) before running it, which finds this as well:",
            faults=faults,
        )


def require_messenger(plan: Plan, position: int, communicator: Any) -> None:
    """Refuse a communicator that cannot send and receive, where the position has messages.

    Raises:
        RuntimeArgumentError: which verb it lacks.
    """
    action = next((action for action in plan.actions(position) if action.kind.is_message), None)
    if action is None:
        return
    for verb in ("isend", "irecv", "batch"):
        if isinstance(communicator, type) or not callable(getattr(communicator, verb, None)):
            raise RuntimeArgumentError(
                f"communicator is {shown(communicator)}, without {verb}(), and position {position} has {action}; pass "
                "a PipelineCommunicator, such as P2PCommunicator(pp_group, config)"
            )


def _reduces(action: Action) -> bool:
    return action.kind is ActionKind.REDUCE


def _require_same_gradients(plan: Plan, without: Collection[Edge] | None) -> None:
    """Refuse a gradient on an edge declared ``without`` backward, and an edge that waits for one which never comes."""
    if without is None or not plan.gradient_edges:
        return
    for edge in plan.graph.stage_edges:
        (source, _), (destination, _) = map(plan.graph.module_of, (edge.source, edge.destination))
        if edge in without and edge in plan.gradient_edges:
            raise PlanMismatchError(
                f"edge {edge} ({source!r} -> {destination!r}) was declared without backward, but the plan sends a "
                f"gradient along it: name {source!r} in the plan's forward_only, if all edges that leave it are "
                "declared so; or declare this one with backward=True, and detach where nothing shall be learnt"
            )
        if source != destination and edge not in without and edge not in plan.gradient_edges:
            raise PlanMismatchError(
                f"edge {edge} ({source!r} -> {destination!r}) was declared with backward, but the plan sends no "
                "gradient along it: declare it EdgeOptions(backward=False)"
            )
