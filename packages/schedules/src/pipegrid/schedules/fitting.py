"""Whether a plan can be run here: its position for this rank's stages, and nothing that the runtime lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from pipegrid.schedules.actions import Action, ActionKind
from pipegrid.schedules.stage_work import PlanMismatchError

if TYPE_CHECKING:
    from pipegrid.schedules.plan import Plan


def position_of(plan: Plan, stages: Iterable[int]) -> int:
    """The position of ``plan`` that holds exactly ``stages``.

    Raises:
        PlanMismatchError: there is none; the message lists what each position holds.
    """
    wanted = frozenset(stages)
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
        PlanMismatchError: computes alone, spread stages, stages on the same ranks but other grids, a ``COLLECTIVE``,
            a ``REDUCE`` without its reducer.
    """
    stages = plan.stages_at[position]
    if plan.lanes and not plan.has_communication:
        raise PlanMismatchError(
            f"the plan has computes alone, but its {plan.num_positions} positions feed each other: nothing would be "
            "sent. Add the messages with lower(plan), and verify the result"
        )
    for stage in stages:
        if len(plan.placement[stage]) > 1:
            raise PlanMismatchError(
                f"stage {stage} lies on positions {plan.placement[stage]}: the runtime does not run stages "
                "that are spread over several positions yet; place its module on ranks of its own"
            )
    _require_equal_grids(plan, stages, getattr(communicator, "module_to_grid_map", {}))
    for action in plan.actions(position):
        if action.kind is ActionKind.COLLECTIVE:
            raise PlanMismatchError(
                f"position {position} has {action}: the runtime moves data by messages; lower the plan without "
                "collectives"
            )
        if action.kind is ActionKind.REDUCE and reducer_name(action) not in reducers:
            name = reducer_name(action)
            raise PlanMismatchError(
                f"position {position} has {action}, but there is no reducer for {name!r}; pass "
                f"reducers={{{name!r}: function}}"
            )


def _require_equal_grids(plan: Plan, stages: Iterable[int], grids: Any) -> None:
    """What is handed over on one rank is handed over as it is, so both ends must be laid out alike."""
    held = set(stages)
    for edge in sorted(plan.graph.stage_edges):
        if not {edge.source, edge.destination} <= held:
            continue
        source, destination = (plan.graph.module_of(stage)[0] for stage in (edge.source, edge.destination))
        if source != destination and grids and _shape(grids[source]) != _shape(grids[destination]):
            raise PlanMismatchError(
                f"edge {edge} joins {source!r} and {destination!r} on the same ranks but on different grids, "
                f"{_shape(grids[source])} and {_shape(grids[destination])}: the runtime hands a tensor over as it "
                "is. Give them equal grids, or ranks of their own"
            )


def _shape(grid: Any) -> dict[str, int]:
    """What matters of a grid for handing a tensor over on one rank."""
    return dict(zip(grid.dim_names, grid.shape, strict=True))
