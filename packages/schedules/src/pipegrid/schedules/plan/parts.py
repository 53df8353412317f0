"""The parts of a plan: steps, groups and lanes, and what people may write for them.

A *step* is one action, or a batch (a tuple) of communications that are issued together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

from attrs import field, frozen

from pipegrid.schedules.arguments import Refusal, require, require_integer, require_items, shown
from pipegrid.schedules.errors import PlanError, PlanFieldError
from pipegrid.schedules.plan.actions import GROUP_NAME, Action
from pipegrid.transport.edge import Direction, Edge

Step: TypeAlias = Action | tuple[Action, ...]
"""One action, or a batch of at least two communications that are issued together."""


def refusal_at(name: str, expected: str) -> Refusal:
    """What refuses the field ``name`` of a plan, or of a part of one."""
    return partial(PlanFieldError, path=(name,), expected=expected)


# attrs wants a named function as a converter, so each field has its own.
def _ascending(name: str, value: Any, expected: str) -> tuple[int, ...]:
    return tuple(sorted(require_items(name, value, int, f"give {expected}", error=refusal_at(name, expected))))


def _as_positions(value: Iterable[int]) -> tuple[int, ...]:
    return _ascending("positions", value, "a list of positions, which are integers")


def _as_tied(value: Iterable[int]) -> tuple[int, ...]:
    return _ascending("tied", value, "a list of stages, which are integers")


def as_forward_only(value: Iterable[int]) -> tuple[int, ...]:
    """Stages, ascending."""
    return _ascending("forward_only", value, "a list of stages, which are integers")


def _as_edges(value: Iterable[Edge]) -> tuple[Edge, ...]:
    expected = "a list of Edge(source, destination)"
    return tuple(sorted(require_items("edges", value, Edge, f"give {expected}", error=refusal_at("edges", expected))))


@frozen(order=True)
class Group:
    """Positions whose ranks communicate collectively, under a name that is unique in the plan.

    ``edges``: the edges between stages along which data travels by a ``COLLECTIVE`` in this group, both ways, in
    place of messages. ``tied``: stages that share a parameter, whose gradients this group reduces.
    """

    name: str
    positions: tuple[int, ...] = field(converter=_as_positions)
    edges: tuple[Edge, ...] = field(converter=_as_edges, default=())
    tied: tuple[int, ...] = field(converter=_as_tied, default=())

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not GROUP_NAME.fullmatch(self.name):
            raise PlanFieldError(
                f"{shown(self.name)} is not a group name; use letters, digits and any of _ . : - (no spaces)",
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

    def __attrs_post_init__(self) -> None:
        for name, position in (("source", self.source), ("destination", self.destination)):
            require_integer(name, position, "a lane leads from position to position", least=0, error=PlanError)
        require("direction", self.direction, Direction, "give Direction.FORWARD or Direction.BACKWARD", error=PlanError)

    def __str__(self) -> str:
        return f"{self.direction.value}{self.source}>{self.destination}"


def actions_of(step: Step) -> tuple[Action, ...]:
    """The actions of a step: one, or those of the batch.

    Raises:
        PlanError: it is neither.
    """
    if isinstance(step, Action):
        return (step,)
    require("step", step, tuple, "give an Action, or a tuple of them", error=PlanError)
    return step


def as_steps(value: Iterable[Iterable[Action | Iterable[Action]]]) -> tuple[tuple[Step, ...], ...]:
    """Per position its steps.

    Raises:
        PlanFieldError: no such list.
        PlanError: a step that is none.
    """
    expected = "for each position a list of its steps"
    refusal = refusal_at("positions", expected)
    rows = require_items("positions", value, Iterable, f"give {expected}", error=refusal)
    for position, steps in enumerate(rows):
        if type(steps) is not tuple and type(steps) is not list and not isinstance(steps, Iterator):
            require_items(f"positions[{position}]", steps, object, f"give {expected}", error=refusal)
    return tuple(tuple([step if type(step) is Action else _as_step(step) for step in steps]) for steps in rows)


def _as_step(step: Action | Iterable[Action]) -> Step:
    if isinstance(step, Action):
        return step
    batch = require_items("step", step, Action, "give an Action, or a batch of Actions", error=PlanError)
    if not batch:
        raise PlanError("a batch is empty; leave it out")
    if len(batch) == 1:
        alone: Action = batch[0]
        return alone
    for action in batch:
        if action.kind.is_compute:
            raise PlanError(f"{action} is in a batch; only communications are batched, computes stand alone")
    return batch


def as_placement(value: Iterable[int | Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Per stage its positions, ascending, where a stage on one position may be given as that.

    Raises:
        PlanFieldError: no such list.
    """
    expected = "for each stage its position, or a list of its positions"
    refusal = refusal_at("placement", expected)
    rows = require_items("placement", value, (int, Iterable), f"give {expected}", error=refusal)
    return tuple(
        tuple(
            sorted(
                require_items(
                    f"placement[{stage}]",
                    (places,) if isinstance(places, int) else places,
                    int,
                    f"give {expected}",
                    error=refusal,
                )
            )
        )
        for stage, places in enumerate(rows)
    )


def as_groups(value: Iterable[Group]) -> tuple[Group, ...]:
    """The groups, in order."""
    expected = "a list of Groups"
    return require_items("groups", value, Group, f"give {expected}", error=refusal_at("groups", expected))


def as_creation(value: Iterable[Iterable[Lane | str]] | None) -> tuple[tuple[Lane | str, ...], ...] | None:
    """Per position what it creates, in order; None is left for the plan to decide."""
    if value is None:
        return None
    expected = "for each position a list of Lanes and names of groups"
    refusal = refusal_at("creation", expected)
    rows = require_items("creation", value, Iterable, f"give {expected}", error=refusal)
    return tuple(
        require_items(f"creation[{position}]", names, (Lane, str), f"give {expected}", error=refusal)
        for position, names in enumerate(rows)
    )
