"""The parts of a plan: steps, groups, lanes, the graph of a chain.

A *step* is one action, or a batch (a tuple) of messages and collectives that are issued together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, TypeAlias

from attrs import field, frozen

from pipegrid.bridges.graph import ModuleGraph, ModuleGraphError
from pipegrid.schedules.errors import PlanError, PlanFieldError
from pipegrid.schedules.plan.actions import ALONE, Action, GroupName
from pipegrid.topology.fields import Count, Index, checked, checked_fields, shown
from pipegrid.transport.edge import Direction, Edge

Step: TypeAlias = Action | tuple[Action, ...]
"""One action, or a batch of at least two communications that are issued together."""


def ascending(value: Any) -> Any:
    """The items of ``value`` in ascending order; a value without such an order is left to the check of its field."""
    try:
        return tuple(sorted(value))
    except TypeError:
        return value


@frozen(order=True, field_transformer=checked_fields(PlanError))
class Group:
    """Positions whose ranks communicate collectively, under a name that is unique in the plan.

    ``edges``: the edges between stages whose data travels by a ``COLLECTIVE`` of this group, both ways, in place
    of messages. ``tied``: the stages that share a parameter, whose gradients this group reduces.
    """

    name: GroupName
    positions: tuple[Index, ...] = field(converter=ascending)
    edges: tuple[Edge, ...] = field(converter=ascending, default=())
    tied: tuple[Index, ...] = field(converter=ascending, default=())

    def __attrs_post_init__(self) -> None:
        if not self.positions or len(set(self.positions)) != len(self.positions):
            raise PlanFieldError(
                f"group {self.name!r} has positions {list(self.positions)}; name one or more, each once",
                path="positions",
            )


def _direction_key(direction: Direction) -> str:
    return direction.value


@frozen(order=True, cache_hash=True, field_transformer=checked_fields(PlanError))
class Lane:
    """One direction of traffic from one position to another, first in, first out.

    All edges that lead between the two positions in that direction share it.
    """

    source: Index
    destination: Index
    direction: Direction = field(order=_direction_key)

    def __str__(self) -> str:
        return f"{self.direction.value}{self.source}>{self.destination}"


def chain(num_stages: int) -> ModuleGraph:
    """The graph of one module named ``model`` with ``num_stages`` stages in a row.

    Raises:
        ModuleGraphError: ``num_stages`` is not an integer of at least 1.
    """
    return ModuleGraph({"model": checked(num_stages, Count, "num_stages", ModuleGraphError)})


def actions_of(step: Step) -> tuple[Action, ...]:
    """The actions of a step: one, or those of the batch."""
    return (step,) if isinstance(step, Action) else step


def as_positions(value: Iterable[Iterable[Action | Iterable[Action]]]) -> tuple[tuple[Step, ...], ...]:
    """Per position its steps.

    Raises:
        PlanError: something else, or as `as_step`.
    """
    try:
        return tuple(tuple([step if type(step) is Action else as_step(step) for step in steps]) for steps in value)
    except TypeError:
        raise PlanFieldError(
            f"positions is {shown(value)}; it must be a list with the steps of each position", path="positions"
        ) from None


def as_step(step: Action | Iterable[Action]) -> Step:
    """An action or a batch as a step; a batch of one is that action.

    Raises:
        PlanError: something else, an empty batch, or a batch with a compute, a sharding action or a copy to the host.
    """
    if type(step) is tuple:
        batch = step
    else:
        batch = (step,) if isinstance(step, Action) or not isinstance(step, Iterable) else tuple(step)
    for action in batch:
        if type(action) is not Action:
            raise PlanError(f"step {shown(step)} is neither an Action nor a batch of Actions")
        if action.kind in ALONE and len(batch) > 1:
            raise PlanError(f"{action} is in a batch; only messages and collectives are batched")
    if not batch:
        raise PlanError("a batch is empty; leave it out")
    return batch[0] if len(batch) == 1 else batch


def as_placement(value: Iterable[int | Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Per stage its positions, ascending; a single position may be given as an integer.

    Raises:
        PlanError: something else.
    """
    stages: Any = value
    with contextlib.suppress(TypeError):  # left to the check
        stages = [(places,) if isinstance(places, int) else ascending(places) for places in value]
    placement: tuple[tuple[int, ...], ...] = checked(stages, tuple[tuple[Index, ...], ...], "placement", PlanError)
    return placement


def step_text(step: Step) -> str:
    """A step as text: an action's token, or the tokens of a batch in brackets."""
    return str(step) if isinstance(step, Action) else f"[{' '.join(map(str, step))}]"
