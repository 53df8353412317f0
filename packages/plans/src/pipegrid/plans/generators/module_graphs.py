"""Schedules over a graph of modules: 1F1B over any, and those of a chain for the module with the loss.

Around a schedule of a chain the encoders follow. One on ranks of its own stays one microbatch ahead of the stage that
it feeds, as the first stage of a longer chain would. One on the ranks of the main module does all its forwards before
the schedule and all its backwards after it, and holds every microbatch in between. ``1f1b`` needs none of this.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from attrs import evolve

from pipegrid.core.fields import Count, Name, checked, checked_arguments
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators.registry import SCHEDULES, Schedule, find_schedule, require_slices
from pipegrid.plans.generators.shapes import Order, looped_placement
from pipegrid.plans.plan import Action, ActionKind, Plan, as_placement, compute_plan, stages_on
from pipegrid.plans.plan.actions import backward, forward
from pipegrid.plans.plan.plan import require_graph, require_placed
from pipegrid.plans.simulate import Costs
from pipegrid.plans.simulate.engine import play


@checked_arguments(PlanError)
def multi_module_1f1b(
    graph: ModuleGraph,
    num_microbatches: Count,
    *,
    placement: Iterable[int | Iterable[int]] | None = None,
    forward_only: Iterable[str] = (),
) -> Plan:
    """1F1B over a graph of modules of any depths, with branches, skip edges and colocated modules.

    A stage warms up by its distance to the farthest sink, so branches of different depth neither deadlock nor stall; at
    most that distance and one microbatches are live.

    Args:
        graph: the modules.
        num_microbatches: of a step.
        placement: the position of each stage, or positions (a module that shares those of another); by default its own.
        forward_only: modules that run no backward: frozen ones that nothing trained feeds, or all in an evaluation.

    Source: the 1F1B rule of Narayanan et al. 2021, section 2.2.1, by the distance to the sink. It cannot deadlock: give
    the forward of microbatch ``m`` at a stage with distance ``d`` the date ``2m - d``, and its backward ``2m + d + 1``;
    every dependency goes from a smaller date to a larger one, and so does a position, through all of its stages.

    Examples:
        >>> multi_module_1f1b(chain(3), 4) == one_f_one_b(3, 4)
        True
    """
    require_graph(graph)
    without = frozen_stages(graph, forward_only)
    places = as_placement(range(graph.num_stages) if placement is None else placement)
    require_placed(places, graph)
    held = stages_on(places)
    positions = range(max(held, default=0) + 1)
    return compute_plan(
        [_order(held.get(position, ()), graph, num_microbatches, without=without) for position in positions],
        graph=graph,
        placement=places,
        num_microbatches=num_microbatches,
        forward_only=without,
    )


def frozen_stages(graph: ModuleGraph, forward_only: Iterable[str]) -> frozenset[int]:
    """The stages of the modules named in ``forward_only``."""
    names = checked(forward_only, tuple[Name, ...], "forward_only", PlanError)
    return frozenset(graph.stage(name, index) for name in names for index in range(graph.depth(name)))


def _order(stages: Iterable[int], graph: ModuleGraph, num_microbatches: int, *, without: frozenset[int]) -> Order:
    """The order of a position that holds ``stages``; of those in ``without``, forwards alone."""
    dated: list[tuple[int, int, Action]] = []
    for stage in stages:
        distance = graph.distance_to_sink[stage]
        for m in range(num_microbatches):
            # At one date, backwards first: they free memory. Neither waits for the other.
            dated.append((2 * m - distance, 1, forward(stage, m)))
            if stage not in without:
                dated.append((2 * m + distance + 1, 0, backward(stage, m)))
    dated.sort(key=lambda entry: (entry[0], entry[1], entry[2].stage))
    # Sorted by date, a stage does min(M, distance) forwards, then one and one, then the last backwards.
    return [action for _, _, action in dated]


ANY_GRAPH = "1f1b"
"""The schedule that needs no chain, and takes any number of stages on a position."""

U_SHAPE = "u_shape"


@checked_arguments(PlanError)
def fitting_schedules(num_chunks: Count) -> tuple[str, ...]:
    """The schedules that train ``num_chunks`` stages of a module on each position (of a U, one more on the first).

    Examples:
        >>> "zero_bubble_v" in fitting_schedules(2), find_schedule("1f1b", num_chunks=2).name
        (True, 'interleaved_1f1b')
    """
    training = (known for known in SCHEDULES.values() if known.trains and not known.sliced)
    return tuple(known.name for known in training if _fits(known, num_chunks))


def _fits(known: Schedule, num_chunks: int) -> bool:
    if known.name == U_SHAPE:
        return num_chunks == 1
    if known.chunks is None:
        return num_chunks > 1
    return known.name == ANY_GRAPH or known.chunks == num_chunks


@checked_arguments(PlanError)
def stage_places(name: str, num_positions: Count, num_chunks: Count | None = None) -> tuple[int, ...]:
    """The pp rank of each stage of a module under schedule ``name``: round and round, forth and back, or a U.

    For ``MultiModulePipelineCommunicator(stage_placement={module: ...})`` and ``P2PCommunicator(placement=...)``.
    ``num_chunks``: stages on each position; None is the schedule's own (2 where any will do, 1 in ``1f1b``).
    """
    known = find_schedule(name)
    if num_chunks is not None and not _fits(known, num_chunks):
        fitting = ", ".join(fitting_schedules(num_chunks))
        raise PlanError(f"{known.name} does not run {num_chunks} stages on each position; these do: {fitting}")
    if known.name == ANY_GRAPH:
        return looped_placement(num_positions, num_positions * (num_chunks or 1))
    return tuple(place for (place,) in _chain(known, num_positions, 1, num_chunks).placement)


def _chain(
    known: Schedule, num_positions: int, num_microbatches: int, num_chunks: int | None, num_slices: int = 1
) -> Plan:
    chunks = num_chunks if known.chunks is None else None
    return known.plan(num_positions, num_microbatches, chunks, num_slices=num_slices)


@checked_arguments(PlanError)
def schedule_for(
    graph: ModuleGraph,
    name: str,
    num_microbatches: Count,
    *,
    placement: Iterable[int | Iterable[int]] | None = None,
    forward_only: Iterable[str] = (),
    num_slices: Count = 1,
) -> Plan:
    """The plan of computes of schedule ``name`` for a graph of modules.

    Args:
        graph: the modules; under other schedules than ``1f1b``, one has the loss, and each stage before it feeds one
            other.
        name: of a schedule that trains, such as ``"zero_bubble_v"``.
        num_microbatches: of a step.
        placement: the positions of each stage (`stage_places` has them for one module); None: one position per stage.
        forward_only: frozen modules, which run no backward.
        num_slices: slices of each microbatch, of a single module.

    Examples:
        >>> schedule_for(chain(4), "zero_bubble_v", 4, placement=stage_places("zero_bubble_v", 2)).placement
        ((0,), (1,), (1,), (0,))
    """
    require_graph(graph)
    known = find_schedule(name)
    require_slices(known, num_slices)
    if known.name == ANY_GRAPH:
        return multi_module_1f1b(graph, num_microbatches, placement=placement, forward_only=forward_only)
    if not known.trains:
        raise PlanError(f"{known.name} runs no backward; evaluation runs the forwards of a schedule that trains")
    places = as_placement(range(graph.num_stages) if placement is None else placement)
    require_placed(places, graph)
    frozen = frozen_stages(graph, forward_only)
    what = f"{known.name} is a schedule of one chain, and the graph of {', '.join(graph.order)} branches"
    branches = PlanError(f"{what}; only {ANY_GRAPH} runs such a graph")
    if len(graph.sinks) > 1:
        raise branches
    if graph.stage(graph.order[-1], 0) in frozen:
        raise PlanError(f"forward_only names {graph.order[-1]!r}, the module with the loss; a step must train it")
    made = partial(
        compute_plan, graph=graph, num_microbatches=num_microbatches, forward_only=frozen, num_slices=num_slices
    )
    orders = _main_orders(known, graph, stages_on(places), frozen, num_microbatches, num_slices)
    of_stage: dict[int, Order] = {}
    for stage in reversed(range(graph.num_stages)):
        if places[stage][0] in orders:
            of_stage[stage] = [action for action in orders[places[stage][0]] if action.stage == stage]
            continue
        fed = [edge.destination for edge in graph.stage_edges if edge.source == stage]
        if len(fed) > 1:
            raise branches
        of_stage[stage] = _one_ahead(stage, of_stage[fed[0]], trains=stage not in frozen)
    orders |= _merged(of_stage, orders, places, made)
    return made([orders.get(position, ()) for position in range(max(orders) + 1)], placement=places)


def _main_orders(
    known: Schedule,
    graph: ModuleGraph,
    held: Mapping[int, Sequence[int]],
    frozen: frozenset[int],
    num_microbatches: int,
    num_slices: int,
) -> dict[int, Order]:
    """The orders of the positions with stages of the main module, which has the one sink and so comes last."""
    name, module, microbatches = known.name, graph.order[-1], range(num_microbatches)
    first, depth = graph.stage(module, 0), graph.depth(module)
    stages_of = {position: tuple(stage - first for stage in own if stage >= first) for position, own in held.items()}
    main = {position: stages for position, stages in stages_of.items() if stages}
    chunks, rest = divmod(depth - (name == U_SHAPE), len(main))
    if rest or not chunks:
        raise PlanError(f"{name} does not run the {depth} stages of {module!r} on {len(main)} positions")
    needed = list(stage_places(name, len(main), chunks))
    schedule = _chain(known, len(main), num_microbatches, chunks, num_slices)
    if set(schedule.stages_at) != set(main.values()):
        raise PlanError(
            f"{name} needs the stages of {module!r} on the pp ranks {needed}, and positions hold "
            f"{sorted(main.values())} of them; make the communicator with "
            f"stage_placement={{{module!r}: stage_places({name!r}, {len(main)}, {chunks})}}"
        )
    orders = {}
    for position, stages in main.items():
        encoders = [stage for stage in held[position] if stage < first]
        trained = [stage for stage in reversed(encoders) if stage not in frozen]
        actions = schedule.actions(schedule.stages_at.index(stages))
        orders[position] = [forward(stage, m) for m in microbatches for stage in encoders]
        orders[position] += [evolve(action, stage=action.stage + first) for action in actions]
        orders[position] += [backward(stage, m) for m in microbatches for stage in trained]
    return orders


def _one_ahead(stage: int, fed: Sequence[Action], *, trains: bool) -> Order:
    """The order of ``stage``: that of the stage it feeds, with its forwards one microbatch ahead."""
    ahead = iter([action for action in fed if action.kind is ActionKind.F])
    order = [evolve(next(ahead), stage=stage)]
    for action in fed:
        if action.kind is ActionKind.F:
            order += [evolve(later, stage=stage) for later in itertools.islice(ahead, 1)]
        elif action.kind is not ActionKind.W and trains:
            order.append(evolve(action, stage=stage, kind=ActionKind.B))
    return order


def _merged(
    of_stage: Mapping[int, Order],
    orders: Mapping[int, Order],
    places: Sequence[tuple[int, ...]],
    made: Callable[..., Plan],
) -> dict[int, Order]:
    """The orders of the positions without a stage of the main module, each out of those of its stages.

    They are merged by the dates of a simulation in which each of these stages has a position of its own. All that a
    compute waits for has an earlier date, so no position waits in a cycle. Of equal dates that nearest to the loss
    is first, whose result others wait for.
    """
    beside = {position: stages for position, stages in stages_on(places).items() if position not in orders}
    if all(len(stages) == 1 for stages in beside.values()):
        return {position: of_stage[stages[0]] for position, stages in beside.items()}
    rows, placement = [*orders.values()], [*places]
    number = {position: row for row, position in enumerate(orders)}
    for stage, own in enumerate(places):
        if own[0] in orders:
            placement[stage] = tuple([number[place] for place in own if place in number])
        else:
            placement[stage] = (len(rows),)
            rows.append(of_stage[stage])
    starts = play(made(rows, placement=placement), Costs())[0]
    dates = dict(zip(itertools.chain(*rows), itertools.chain(*starts), strict=True))
    return {
        position: sorted((one for stage in stages for one in of_stage[stage]), key=lambda one: (dates[one], -one.stage))
        for position, stages in beside.items()
    }
