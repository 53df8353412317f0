"""A plan: what every position of a pipeline does, in order, as plain data.

A *position* is the class of ranks that hold the same set of stages; all its ranks act alike. A *step* is one
action, or a batch (a tuple) of communications that are issued together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from attrs import field, frozen

from pipegrid.bridges.graph import ModuleGraph, ModuleGraphError
from pipegrid.schedules.arguments import Refusal, is_integer, require, require_integer, require_items, shown
from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.plan.actions import Action
from pipegrid.schedules.plan.checks import check_creation_lists, check_shape
from pipegrid.schedules.plan.parts import (
    Group,
    Lane,
    Step,
    actions_of,
    as_creation,
    as_forward_only,
    as_groups,
    as_placement,
    as_steps,
    refusal_at,
)
from pipegrid.transport.edge import Direction, Edge

__all__ = [
    "Group",
    "Lane",
    "Plan",
    "Step",
    "actions_of",
    "chain",
    "compute_plan",
    "default_creation",
    "message_routes",
    "require_graph",
    "require_plan",
    "require_position",
]


def chain(num_stages: int) -> ModuleGraph:
    """The graph of one module named ``model`` with ``num_stages`` stages in a row.

    Raises:
        ModuleGraphError: no integer of at least 1.
    """
    return ModuleGraph({"model": require_integer("num_stages", num_stages, error=ModuleGraphError)})


def require_graph(graph: object, *, error: Refusal = PlanError) -> None:
    """Refuse what is no graph of modules."""
    require("graph", graph, ModuleGraph, "give a ModuleGraph, or chain(number of stages)", error=error)


def _count_steps(positions: tuple[tuple[Step, ...], ...]) -> str:
    return f"<{len(positions)} positions, {sum(map(len, positions))} steps>"


@frozen(slots=False, kw_only=True)
class Plan:
    """What each position does, in order.

    ``positions``: per position, its steps. ``graph``: the modules and so the stages and their edges.
    ``placement``: per stage, the position that holds it (or the positions, where a module is colocated with
    several stages of another). ``num_microbatches``: how many microbatches a step of training has.
    ``forward_only``: the stages that run no backward, because nothing before or in them is trained (all of
    them in an evaluation); no gradient travels along an edge with such an end. ``groups``: the groups that
    ``REDUCE`` and ``COLLECTIVE`` actions name. ``creation``: per position, the groups (by name) and lanes
    that it creates before the first step, in order; by default all in one order that is the same everywhere.

    Whether the plan is *right* is for `verify` to say: here only its shape is checked.

    Raises:
        PlanFieldError: positions, placement, groups and creation do not fit each other; ``path`` says which.
    """

    positions: tuple[tuple[Step, ...], ...] = field(converter=as_steps, repr=_count_steps)
    graph: ModuleGraph
    placement: tuple[tuple[int, ...], ...] = field(converter=as_placement)
    num_microbatches: int
    forward_only: tuple[int, ...] = field(converter=as_forward_only, default=())
    groups: tuple[Group, ...] = field(converter=as_groups, default=())
    creation: tuple[tuple[Lane | str, ...], ...] = field(converter=as_creation, default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        require_graph(self.graph, error=refusal_at("graph", "a ModuleGraph"))
        check_shape(self)
        if self.creation is None:
            object.__setattr__(self, "creation", default_creation(self))
        check_creation_lists(self)

    @property
    def num_positions(self) -> int:
        """Positions of the plan."""
        return len(self.positions)

    @property
    def num_stages(self) -> int:
        """Stages of the graph."""
        return len(self.placement)

    @cached_property
    def stages_at(self) -> tuple[tuple[int, ...], ...]:
        """Per position, the stages it holds, ascending."""
        stages: list[list[int]] = [[] for _ in self.positions]
        for stage, positions in enumerate(self.placement):
            for position in positions:
                stages[position].append(stage)
        return tuple(tuple(held) for held in stages)

    @property
    def num_chunks(self) -> int:
        """The most stages that one position holds."""
        return max(len(held) for held in self.stages_at)

    @cached_property
    def stages_beside(self) -> tuple[int, ...]:
        """Per stage, how many stages its position holds, itself included; of several positions, the most.

        Stages that lie together are taken to share a position evenly: each is 1/n of one.
        """
        return tuple(max(len(self.stages_at[place]) for place in places) for places in self.placement)

    @cached_property
    def has_communication(self) -> bool:
        """Whether any action is a communication; a plan of computes alone has none."""
        return any(
            not isinstance(step, Action) or step.kind.is_communication for steps in self.positions for step in steps
        )

    def actions(self, position: int) -> Iterator[Action]:
        """The actions of ``position`` in order, batches opened.

        Raises:
            PlanError: there is no such position.
        """
        require_position(position, self)
        for step in self.positions[position]:
            if isinstance(step, Action):
                yield step
            else:
                yield from step

    @property
    def communicates(self) -> bool:
        """Whether positions tell each other what they have made; a plan of computes leaves that open."""
        return any(self.creation) or self.has_communication

    @cached_property
    def gradient_edges(self) -> frozenset[Edge]:
        """The edges along which a gradient travels back."""
        without = set(self.forward_only)
        return frozenset(
            edge for edge in self.graph.stage_edges if edge.source not in without and edge.destination not in without
        )

    @cached_property
    def collective_edges(self) -> dict[Edge, str]:
        """The edges along which data travels by a ``COLLECTIVE`` in place of messages, and its group."""
        return {edge: group.name for group in self.groups for edge in group.edges}

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that the graph's edges need under this placement, ascending."""
        found: set[Lane] = set()
        for edge in self.graph.stage_edges:
            if edge in self.collective_edges:
                continue
            for source, destination in message_routes(self, edge):
                found.add(Lane(source, destination, Direction.FORWARD))
                if edge in self.gradient_edges:
                    found.add(Lane(destination, source, Direction.BACKWARD))
        return tuple(sorted(found))

    def __str__(self) -> str:
        from pipegrid.schedules.plan.text import to_text

        return to_text(self)

    @cached_property
    def digest(self) -> str:
        """Twelve hex digits that tell plans apart, the same in every process."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:12]


def require_plan(plan: object, *, error: Refusal = PlanError) -> None:
    """Refuse what is no plan: a generator that was not called, say."""
    require("plan", plan, Plan, "give a Plan, such as gpipe(4, 8) or from_text(...)", error=error)


def require_position(position: object, plan: Plan) -> None:
    """Refuse a position that ``plan`` does not have.

    Raises:
        PlanError: names the position and the range.
    """
    if not is_integer(position) or position not in range(plan.num_positions):
        raise PlanError(f"there is no position {shown(position)}; the plan has positions 0..{plan.num_positions - 1}")


def message_routes(plan: Plan, edge: Edge) -> tuple[tuple[int, int], ...]:
    """The pairs of positions (source, destination) between which an activation on ``edge`` is a message.

    Every position of the source stage sends to every position of the destination stage, itself excepted. A
    pair of stages on the very same positions is colocated: each position keeps what it has made.
    """
    sources, destinations = plan.placement[edge.source], plan.placement[edge.destination]
    if sources == destinations:
        return ()
    return tuple((s, d) for s in sources for d in destinations if s != d)


def default_creation(plan: Plan) -> tuple[tuple[Lane | str, ...], ...]:
    """Per position its groups and lanes, taken from one order for the whole plan: groups, then lanes.

    Creating a group waits for all its members, so orders that disagree can wait for each other in a cycle;
    parts of one order cannot.
    """
    creation: list[list[Lane | str]] = [[] for _ in plan.positions]
    if plan.has_communication:
        for group in plan.groups:
            for position in group.positions:
                creation[position].append(group.name)
        for lane in plan.lanes:
            creation[lane.source].append(lane)
            creation[lane.destination].append(lane)
    return tuple(tuple(names) for names in creation)


def compute_plan(
    orders: Sequence[Iterable[Action]],
    *,
    graph: ModuleGraph | int,
    placement: Iterable[int | Iterable[int]],
    num_microbatches: int,
    forward_only: Iterable[int] = (),
) -> Plan:
    """A plan of computes, one order per position; ``graph`` may be the number of stages of a chain.

    Raises:
        PlanFieldError, ModuleGraphError: as `Plan` and `chain`.
    """
    remedy = "give for each position the list of its actions"
    return Plan(
        positions=require_items("orders", orders, Iterable, remedy, error=PlanError),
        graph=chain(graph) if isinstance(graph, int) else graph,
        placement=placement,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
    )
