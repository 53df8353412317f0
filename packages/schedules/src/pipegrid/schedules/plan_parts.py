"""The parts of a plan: steps, groups and lanes, and what people may write for them.

A *step* is one action, or a batch (a tuple) of communications that are issued together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from attrs import field, frozen

from pipegrid.schedules.actions import GROUP_NAME, Action
from pipegrid.schedules.errors import PlanError, PlanFieldError
from pipegrid.transport.edge import Direction, Edge

Step: TypeAlias = Action | tuple[Action, ...]
"""One action, or a batch of at least two communications that are issued together."""


def ascending(value: Iterable[int]) -> tuple[int, ...]:
    """Numbers of stages or of positions, in order."""
    return tuple(sorted(value))


def _ascending_edges(value: Iterable[Edge]) -> tuple[Edge, ...]:
    return tuple(sorted(value))


@frozen(order=True)
class Group:
    """Positions whose ranks communicate collectively, under a name that is unique in the plan.

    ``edges``: the edges between stages along which data travels by a ``COLLECTIVE`` in this group, both ways, in
    place of messages. ``tied``: stages that share a parameter, whose gradients this group reduces.
    """

    name: str
    positions: tuple[int, ...] = field(converter=ascending)
    edges: tuple[Edge, ...] = field(converter=_ascending_edges, default=())
    tied: tuple[int, ...] = field(converter=ascending, default=())

    def __attrs_post_init__(self) -> None:
        if not GROUP_NAME.fullmatch(self.name):
            raise PlanFieldError(
                f"{self.name!r} is not a group name; use letters, digits and any of _ . : - (no spaces)",
                path=("name",),
                expected="a group name: letters, digits and any of _ . : -",
            )
        if not self.positions or len(set(self.positions)) != len(self.positions):
            raise PlanFieldError(
                f"group {self.name!r} has positions {list(self.positions)}; name each once",
                path=("positions",),
                expected="one or more positions, each once",
            )


def _direction_key(direction: Direction) -> str:
    return direction.value


@frozen(order=True, cache_hash=True)  # whoever proves or runs a plan looks things up by it
class Lane:
    """One direction of traffic from one position to another, first in, first out.

    All edges that lead between the two positions in that direction share it.
    """

    source: int
    destination: int
    direction: Direction = field(order=_direction_key)

    def __str__(self) -> str:
        return f"{self.direction.value}{self.source}>{self.destination}"


def actions_of(step: Step) -> tuple[Action, ...]:
    """The actions of a step: one, or those of the batch."""
    return (step,) if isinstance(step, Action) else step


def as_steps(value: Iterable[Iterable[Action | Iterable[Action]]]) -> tuple[tuple[Step, ...], ...]:
    """Per position its steps."""
    return tuple(tuple([step if type(step) is Action else _as_step(step) for step in steps]) for steps in value)


def _as_step(step: Action | Iterable[Action]) -> Step:
    if isinstance(step, Action):
        return step
    if isinstance(step, str) or not isinstance(step, Iterable):
        raise PlanError(f"step {step!r} is not an Action or a batch of Actions")
    batch = tuple(step)
    if not batch:
        raise PlanError("a batch is empty; leave it out")
    for action in batch:
        if not isinstance(action, Action):
            raise PlanError(f"{action!r} in a batch is not an Action")
    if len(batch) == 1:
        return batch[0]
    for action in batch:
        if action.kind.is_compute:
            raise PlanError(f"{action} is in a batch; only communications are batched, computes stand alone")
    return batch


def as_placement(value: Iterable[int | Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Per stage its positions, ascending, where a stage on one position may be given as that."""
    return tuple((positions,) if isinstance(positions, int) else tuple(sorted(positions)) for positions in value)


def as_groups(value: Iterable[Group]) -> tuple[Group, ...]:
    """The groups, in order."""
    return tuple(value)


def as_creation(value: Iterable[Iterable[Lane | str]] | None) -> tuple[tuple[Lane | str, ...], ...] | None:
    """Per position what it creates, in order; None is left for the plan to decide."""
    return None if value is None else tuple(tuple(names) for names in value)
