"""A plan: what every position of a pipeline does, in order, as plain data; and how it is written as text.

A *position* is the class of ranks that hold the same set of stages; all its ranks act alike.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate

from attrs import field, frozen

from pipegrid.core.edge import Direction, Edge
from pipegrid.core.fields import Count, Index, checked_fields, shown
from pipegrid.core.graph import ModuleGraph, chain
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan.actions import OFFLOADING, SHARDING, Action
from pipegrid.plans.plan.parts import (
    Group,
    Step,
    actions_of,
    as_placement,
    as_positions,
    ascending,
    is_pair,
    name_text,
    stages_on,
    step_text,
)
from pipegrid.plans.plan.routes import Routes
from pipegrid.plans.plan.routes_check import check_routes


def _count_steps(positions: tuple[tuple[Step, ...], ...]) -> str:
    return f"<{len(positions)} positions, {sum(map(len, positions))} steps>"


def _unless_alike(routes: Routes | None) -> Routes | None:
    return None if routes is None or routes.is_identity else routes


@frozen(slots=False, kw_only=True, field_transformer=checked_fields(PlanError))
class Plan:
    """The steps of each position, in order, with the graph of modules and the placement of its stages.

    The class checks that the parts fit each other; `verify` proves that the plan can be run.

    Attributes:
        positions: per position, its steps. With routes, per *actor*: the positions of replica 0, then of replica 1, ...
        graph: the modules, and so the stages and their edges.
        placement: per stage, the position that holds it (or the positions, where a module is colocated with several
            stages of another); with routes, of each replica.
        num_microbatches: of one training step; with routes, units.
        forward_only: the stages without a backward, because nothing before or in them is trained (all of them in an
            evaluation); no gradient travels along an edge with such an end.
        groups: what ``REDUCE`` and ``COLLECTIVE`` actions name; with routes, of positions of each replica.
        num_slices: into which the sequence of each microbatch of a single module is cut; then every action of a
            microbatch names its slice, of which 0 is the first in the sequence.
        routes: which replica computes which stage of each unit; None where all replicas act alike.

    Examples:
        >>> plan = one_f_one_b(2, 4)
        >>> plan.num_positions, plan.num_stages, plan.placement
        (2, 2, ((0,), (1,)))
        >>> [str(step) for step in plan.positions[1]][:4]
        ['1F0', '1B0', '1F1', '1B1']
    """

    positions: tuple[tuple[Step, ...], ...] = field(converter=as_positions, repr=_count_steps)
    graph: ModuleGraph
    placement: tuple[tuple[int, ...], ...] = field(converter=as_placement)
    num_microbatches: Count
    forward_only: tuple[Index, ...] = field(converter=ascending, default=())
    groups: tuple[Group, ...] = field(converter=tuple[Group, ...], default=())
    num_slices: Count = 1
    routes: Routes | None = field(converter=_unless_alike, default=None)

    def __attrs_post_init__(self) -> None:
        require_graph(self.graph)
        require_placed(self.placement, self.graph)
        _check_routed(self)
        _check_stages(self)
        _check_groups(self)
        _check_slices(self)
        _check_pairs(self)

    @property
    def num_positions(self) -> int:
        """Positions of the plan; with routes, actors."""
        return len(self.positions)

    @property
    def num_replicas(self) -> int:
        """Replicas with orders of their own: 1 where all act alike."""
        return 1 if self.routes is None else self.routes.num_replicas

    @property
    def positions_each(self) -> int:
        """Positions of each replica, n: actor ``a`` is position ``a % n`` of replica ``a // n``."""
        return len(self.positions) // self.num_replicas

    def actors(self, places: Iterable[int], replica: int) -> tuple[int, ...]:
        """The actors of positions ``places`` of a replica: the positions themselves, where all replicas act alike."""
        first = replica * self.positions_each
        return tuple([first + place for place in places])

    def living(self, places: Iterable[int]) -> tuple[int, ...]:
        """The actors of positions ``places`` in all replicas, ascending, without dead ones."""
        if self.routes is None:
            return tuple(sorted(places))
        each = self.positions_each
        return tuple(sorted(place + each * replica for place in places for replica in self.routes.living(place)))

    @property
    def num_stages(self) -> int:
        """Stages of the graph."""
        return len(self.placement)

    @property
    def num_pieces(self) -> int:
        """Pieces that pass through each stage: the microbatches of a step or, with slices, all of their slices."""
        return self.num_microbatches * self.num_slices

    def piece_of(self, action: Action) -> int:
        """The number of an action's piece: its microbatch, or its slice counted through all microbatches."""
        return (action.microbatch or 0) * self.num_slices + (action.slice or 0)

    @cached_property
    def stages_at(self) -> tuple[tuple[int, ...], ...]:
        """Per position, the stages it holds, ascending."""
        held = stages_on(map(self.living, self.placement))
        return tuple(tuple(held.get(position, ())) for position in range(len(self.positions)))

    def pieces_at(self, stage: int, position: int) -> Sequence[int]:
        """The pieces of ``stage`` that ``position``, one of those that hold it, computes, ascending."""
        if self.routes is None:
            return range(self.num_pieces)
        replica, (module, _) = position // self.positions_each, self.graph.module_of(stage)
        return [call for call in self.routes.calls(module) if self.routes.of(call, stage) == replica]

    @property
    def num_chunks(self) -> int:
        """The most stages that one position holds."""
        return max(len(held) for held in self.stages_at)

    @cached_property
    def stages_beside(self) -> tuple[int, ...]:
        """Per stage, the number of stages on its position, itself included; of several positions, the most."""
        held = Counter(place for places in self.placement for place in places)
        return tuple(max(held[place] for place in places) for places in self.placement)

    @cached_property
    def has_communication(self) -> bool:
        """Whether any action is a communication; a plan of computes alone has none."""
        firsts = (step if isinstance(step, Action) else step[0] for steps in self.positions for step in steps)
        return any(action.kind.is_communication for action in firsts)

    @cached_property
    def pairs(self) -> tuple[frozenset[int], ...]:
        """Per position, the numbers in `actions` of the forwards of its pairs; the backward of each is the next."""
        found = []
        for steps in self.positions:
            paired = any(type(step) is tuple and is_pair(step) for step in steps)
            starts = accumulate(map(len, map(actions_of, steps)), initial=0) if paired else ()
            found.append(frozenset(at for at, step in zip(starts, steps, strict=False) if is_pair(step)))
        return tuple(found)

    def actions(self, position: int) -> Iterator[Action]:
        """The actions of ``position`` in order, batches and pairs opened."""
        require_position(position, self)
        for step in self.positions[position]:
            if isinstance(step, Action):
                yield step
            else:
                yield from step

    @cached_property
    def traffic(self) -> tuple[tuple[Edge, Direction], ...]:
        """Its edges, each with the directions of messages and collectives, ascending: a communicator's ``traffic``."""
        actions = [action for position in range(self.num_positions) for action in self.actions(position)]
        used = {(a.edge, a.direction) for a in actions if a.edge is not None and a.direction is not None}
        return tuple(sorted(used, key=lambda one: (one[0], one[1] is Direction.BACKWARD)))

    @cached_property
    def gradient_edges(self) -> frozenset[Edge]:
        """The edges along which a gradient travels back."""
        without = set(self.forward_only)
        return frozenset(edge for edge in self.graph.stage_edges if without.isdisjoint((edge.source, edge.destination)))

    @cached_property
    def collective_edges(self) -> dict[Edge, str]:
        """The edges along which data travels by a ``COLLECTIVE`` in place of messages, and its group."""
        return {edge: group.name for group in self.groups for edge in group.edges}

    def __str__(self) -> str:
        return to_text(self)

    @cached_property
    def digest(self) -> str:
        """Twelve hex digits of the plan's text, the same in every process."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:12]


def compute_plan(
    orders: Sequence[Iterable[Step]],
    *,
    graph: ModuleGraph | int,
    placement: Iterable[int | Iterable[int]],
    num_microbatches: int,
    forward_only: Iterable[int] = (),
    num_slices: int = 1,
    routes: Routes | None = None,
) -> Plan:
    """A plan of computes, one order per position (or actor); ``graph`` may be the number of stages of a chain.

    Examples:
        >>> order = [Action(ActionKind.F, 0, 0), Action(ActionKind.B, 0, 0)]
        >>> compute_plan([order], graph=1, placement=[0], num_microbatches=1).positions == gpipe(1, 1).positions
        True
    """
    return Plan(
        positions=orders,
        graph=chain(graph) if isinstance(graph, int) else graph,
        placement=placement,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        num_slices=num_slices,
        routes=routes,
    )


def require_plan(plan: object, *, error: type[Exception] = PlanError) -> None:
    """Raise unless ``plan`` is a Plan: a generator that was not called is a common mistake."""
    if not isinstance(plan, Plan):
        raise error(f"plan is {shown(plan)}; give a Plan, such as gpipe(4, 8) or from_text(...)")


def require_graph(graph: object, *, error: type[Exception] = PlanError) -> None:
    """Raise unless ``graph`` is a ModuleGraph."""
    if not isinstance(graph, ModuleGraph):
        raise error(f"graph is {shown(graph)}; give a ModuleGraph, or chain(number of stages)")


def require_placed(placement: Sequence[object], graph: ModuleGraph) -> None:
    """Raise unless ``placement`` has an entry for each stage of ``graph``."""
    if len(placement) != graph.num_stages:
        what = f"the placement covers {len(placement)} stages and the graph has {graph.num_stages}"
        raise PlanError(f"{what}; give the position of every stage", path="placement")


def require_position(position: object, plan: Plan) -> None:
    """Raise unless ``plan`` has ``position``."""
    if position not in range(plan.num_positions):
        raise PlanError(f"there is no position {shown(position)}; the plan has positions 0..{plan.num_positions - 1}")


# How the parts of a plan must fit each other


def _check_known(what: str, named: Iterable[object], has: str, known: Collection[object], path: str) -> None:
    for one in named:
        if one not in known:
            listed = f"0..{len(known) - 1}" if isinstance(known, range) and known else ", ".join(map(str, known))
            raise PlanError(f"{what} {one}; {has} {listed or 'none'}", path=path)


def _check_stages(plan: Plan) -> None:
    """Raise unless every stage lies on positions of the plan, and a gradient comes to each that is trained."""
    positions, stages = range(plan.positions_each), range(plan.num_stages)
    for stage, places in enumerate(plan.placement):
        what = f"stage {stage} is placed on position"
        _check_known(what, places, "the plan has", positions, f"placement[{stage}]")
    _check_known("forward_only names stage", plan.forward_only, "the graph has", stages, "forward_only")
    for stage in stages:
        after = [edge.destination for edge in plan.graph.stage_edges if edge.source == stage]
        if stage not in plan.forward_only and after and all(other in plan.forward_only for other in after):
            what = f"stage {stage} is trained, but all stages that it feeds ({', '.join(map(str, after))})"
            raise PlanError(f"{what} are forward_only, so no gradient comes back to it", path="forward_only")


def _check_groups(plan: Plan) -> None:
    """Raise unless names and edges are of one group each, which has the positions of its stages."""
    taken: set[object] = set()
    trained = [stage for stage in range(plan.num_stages) if stage not in plan.forward_only]
    positions, edges = range(plan.positions_each), plan.graph.stage_edges
    for number, group in enumerate(plan.groups):
        what, path = f"group {group.name!r}", f"groups[{number}]"
        _check_known(f"{what} names position", group.positions, "the plan has", positions, f"{path}.positions")
        _check_known(f"{what} ties stage", group.tied, "trained are", trained, f"{path}.tied")
        _check_known(f"{what} names edge", group.edges, "the graph has", edges, f"{path}.edges")
        for own in (group.name, *group.edges):
            if own in taken:
                raise PlanError(f"{what} has {own}, which a group has already", path=f"{path}.name")
            taken.add(own)
        ends = {stage for edge in group.edges for stage in (edge.source, edge.destination)}
        tied, joined = ({place for stage in stages for place in plan.placement[stage]} for stages in (group.tied, ends))
        # A position without a tied stage has nothing to reduce; one beside those of an edge only joins the call.
        if not tied | joined <= {*group.positions} <= (tied or {*group.positions}):
            lie = f"its {'tied ' if tied else ''}stages lie on {sorted(tied or joined)}"
            raise PlanError(f"{what} has positions {list(group.positions)}; {lie}", path=f"{path}.positions")


def _check_routed(plan: Plan) -> None:
    """Raise unless the routes fit the plan, which has no collective along an edge and no gather: a move breaks them."""
    routes = plan.routes
    if routes is None:
        return
    orders, count = len(plan.positions), routes.num_replicas
    if orders % count:
        raise PlanError(f"{orders} orders are not those of {count} replicas; give one per actor", path="positions")
    if plan.num_microbatches != routes.num_units:
        what = f"there are {plan.num_microbatches} microbatches; the routes have {routes.num_units} units"
        raise PlanError(what, path="microbatches")
    check_routes(routes, plan.graph, plan.placement, forward_only=plan.forward_only)
    if plan.num_slices > 1:
        raise PlanError(f"microbatches are cut into {plan.num_slices} slices; routes are of whole ones", path="slices")
    for number, group in enumerate(plan.groups):
        if group.edges:
            what = f"group {group.name!r} carries edges {', '.join(map(str, group.edges))}"
            raise PlanError(f"{what}; with routes, data is sent", path=f"groups[{number}].edges")
    for position, steps in enumerate(plan.positions):
        for step in steps:
            if isinstance(step, Action) and (step.kind in SHARDING or step.kind in OFFLOADING):
                what = f"actor {position} has {step}; a plan with routes neither gathers parameters nor offloads"
                raise PlanError(what, path="positions")


def _check_slices(plan: Plan) -> None:
    """Raise unless microbatches are cut over a single module, and every action of one names a slice."""
    count = plan.num_slices
    if count > 1 and len(plan.graph.modules) > 1:
        what = f"microbatches of modules {', '.join(plan.graph.order)} are cut into {count} slices"
        raise PlanError(f"{what}; slices are for one", path="slices")
    if count == 1 and not _names_slices(plan):
        return
    slices = range(count) if count > 1 else (None,)
    for action in (action for position in range(plan.num_positions) for action in plan.actions(position)):
        if action.microbatch is not None and action.slice not in slices:
            named = "no slice" if action.slice is None else f"slice {action.slice}"
            raise PlanError(f"{action} names {named}; microbatches are cut into {count}", path="slices")


def _names_slices(plan: Plan) -> bool:
    """Whether any action names a slice; quickly, as plans have hundreds of thousands of actions."""
    return any(
        any(step.slice is not None for step in steps if type(step) is Action)
        or any(action.slice is not None for step in steps if type(step) is tuple for action in step)
        for steps in plan.positions
    )


def _check_pairs(plan: Plan) -> None:
    """Raise for a pair of a stage on several positions: their ranks would have to interleave its computes alike."""
    shared = {stage for stage, places in enumerate(plan.placement) if len(places) > 1}
    for position, steps in enumerate(plan.positions if shared else ()):
        for step in steps:
            if type(step) is tuple and is_pair(step) and (held := [a.stage for a in step if a.stage in shared]):
                what = f"stage {held[0]} lies on positions {list(plan.placement[held[0]])}, those of a pair on one"
                raise PlanError(f"position {position} has {step_text(step)}; {what}", path="positions")


# How a plan is written


def to_text(plan: Plan) -> str:
    """The plan as text; `from_text` reads it back to an equal plan."""
    require_plan(plan)
    width = len(str(plan.num_positions - 1))
    rows = [" ".join([f"{place:>{width}}:", *map(step_text, steps)]) for place, steps in enumerate(plan.positions)]
    return "\n".join([*header_lines(plan), *rows]) + "\n"


def header_lines(plan: Plan) -> list[str]:
    """The lines above the table of steps: all that the table itself does not say."""
    modules = [f"{name_text(name)}:{depth}" for name, depth in plan.graph.modules]
    edges = [f"{name_text(source)}>{name_text(destination)}" for source, destination in plan.graph.edges]
    lines = [
        f"microbatches {plan.num_microbatches}",
        f"slices {plan.num_slices}" if plan.num_slices > 1 else "",
        " ".join(["modules", *modules]),
        " ".join(["edges", *edges]) if edges else "",
        " ".join(["skips", *map(str, plan.graph.skips)]) if plan.graph.skips else "",
        " ".join(["placement", *(",".join(map(str, places)) for places in plan.placement)]),
        " ".join(["forward_only", *map(str, plan.forward_only)]) if plan.forward_only else "",
        *map(_group_line, plan.groups),
        *([] if plan.routes is None else plan.routes.lines()),
    ]
    return [line for line in lines if line]


def _group_line(group: Group) -> str:
    parts = (group.name, group.positions), ("edges", group.edges), ("tied", group.tied)
    return " ".join(["group", *(f"{word} {','.join(map(str, items))}" for word, items in parts if items)])
