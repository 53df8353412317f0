"""Which schedule fits, and the plan that it makes of the modules. Pure: no torch, no process.

The named schedules are those of a chain of stages, and here the chain is the language model: it runs the schedule on
the places of its pipeline, and the encoders follow. An encoder on ranks of its own stays one microbatch ahead of the
stage that it feeds, which is what a first stage of a longer chain would do. One on the language model's own ranks
does all its forwards before the schedule and all its backwards after it, and holds every microbatch in between.
``1f1b`` needs none of this: its rule holds for any graph of modules on any ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from attrs import evolve

from digit_reader.modules import LANGUAGE
from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules import SCHEDULES, Action, ActionKind, Plan, compute_plan, lower, step_plan, verify
from pipegrid.schedules.generators.shapes import looped_placement
from pipegrid.schedules.plan.actions import backward, forward
from pipegrid.transport.edge import Edge

ANY_GRAPH: Final = "1f1b"
"""The schedule that needs no chain, and takes any number of chunks."""

U_SHAPE: Final = "u_shape"

NAMES: Final = (ANY_GRAPH, *(name for name, known in SCHEDULES.items() if known.trains and name != ANY_GRAPH))


def chunks_of(name: str) -> int | None:
    """Stages of the language model that ``name`` needs on every place of its pipeline; None is two or more.

    A U has one on every place, and the last one on the first place besides.
    """
    return 1 if name == U_SHAPE else SCHEDULES[name].chunks


def fits(name: str, vpp: int) -> bool:
    """Whether ``name`` runs ``vpp`` stages of the language model on every place."""
    chunks = chunks_of(name)
    return name == ANY_GRAPH or (vpp > 1 if chunks is None else vpp == chunks)


def fitting_names(vpp: int) -> tuple[str, ...]:
    """The schedules that run ``vpp`` stages of the language model on every place."""
    return tuple(name for name in NAMES if fits(name, vpp))


def num_stages(name: str, pp: int, vpp: int) -> int:
    """Stages of the language model: ``vpp`` on each of ``pp`` places, and one more in a U."""
    return pp * vpp + (name == U_SHAPE)


def places_of_stages(name: str, pp: int, vpp: int) -> tuple[int, ...]:
    """The place in the pipeline of each stage of the language model: round and round, forth and back, or a U."""
    if name == ANY_GRAPH or not fits(name, vpp):
        return looped_placement(pp, num_stages(name, pp, vpp))
    return tuple(place for (place,) in _of_the_language_model(name, pp, vpp, 1).placement)


def _of_the_language_model(name: str, pp: int, vpp: int, num_microbatches: int) -> Plan:
    """The schedule of the language model alone."""
    known = SCHEDULES[name]
    return known.plan(pp, num_microbatches, vpp if known.chunks is None else known.chunks)


def plan_of(
    name: str,
    graph: ModuleGraph,
    num_microbatches: int,
    *,
    placement: tuple[tuple[int, ...], ...],
    collectives: tuple[Edge, ...] = (),
) -> Plan:
    """The verified plan of a step.

    Args:
        name: a schedule that fits.
        graph: the modules; every encoder feeds the language model alone.
        num_microbatches: of a step.
        placement: per stage its positions, see `pipegrid.bridges.Positions`.
        collectives: the edges between modules on the same ranks.

    Raises:
        PlanError: the proof failed. With a schedule that fits, that is a fault of this file.
    """
    if name == ANY_GRAPH:
        return step_plan(graph, num_microbatches, placement=placement, collectives=collectives)
    computes = _around_the_language_model(name, graph, num_microbatches, placement)
    plan = lower(computes, collectives={edge: f"bridge-{edge.source}-{edge.destination}" for edge in collectives})
    verify(plan)
    return plan


def _around_the_language_model(
    name: str, graph: ModuleGraph, num_microbatches: int, placement: Sequence[Sequence[int]]
) -> Plan:
    """The schedule ``name`` of the language model, with the encoders' forwards and backwards beside it."""
    first = graph.stage(LANGUAGE, 0)
    held: dict[int, list[int]] = {}
    for stage, positions in enumerate(placement):
        for position in positions:
            held.setdefault(position, []).append(stage)
    # A topological order has the language model last: every encoder feeds it.
    language = {position: tuple(s - first for s in stages if s >= first) for position, stages in held.items()}
    places = sum(1 for stages in language.values() if stages)
    schedule = _of_the_language_model(name, places, graph.depth(LANGUAGE) // places, num_microbatches)
    place_of = {stages: place for place, stages in enumerate(schedule.stages_at)}
    orders: dict[int, list[Action]] = {}
    for position, stages in held.items():
        if language[position]:
            encoders = [stage for stage in stages if stage < first]
            actions = schedule.actions(place_of[language[position]])
            orders[position] = [
                *(forward(stage, m) for m in range(num_microbatches) for stage in encoders),
                *(evolve(action, stage=action.stage + first) for action in actions),
                *(backward(stage, m) for m in range(num_microbatches) for stage in reversed(encoders)),
            ]
    for stage in reversed(range(first)):
        for position in placement[stage]:
            if not language[position]:
                (fed,) = (edge.destination for edge in graph.stage_edges if edge.source == stage)
                of_fed = [action for action in orders[placement[fed][0]] if action.stage == fed]
                orders[position] = _one_ahead(stage, of_fed)
    return compute_plan(
        [orders[position] for position in range(len(held))],
        graph=graph,
        placement=placement,
        num_microbatches=num_microbatches,
    )


def _one_ahead(stage: int, fed: Sequence[Action]) -> list[Action]:
    """The order of ``stage``: that of the stage it feeds, with its forwards one microbatch ahead."""
    ahead = iter([action for action in fed if action.kind is ActionKind.F])
    order = [evolve(next(ahead), stage=stage)]
    for action in fed:
        if action.kind is ActionKind.F:
            order += [evolve(later, stage=stage) for later in itertools.islice(ahead, 1)]
        elif action.kind is not ActionKind.W:
            order.append(evolve(action, stage=stage, kind=ActionKind.B))
    return order
