"""The fit of routes to the graph of a plan and the placement of its stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan.routes import Routes


def check_routes(
    routes: Routes, graph: ModuleGraph, placement: Sequence[Sequence[int]], *, forward_only: Collection[int] = ()
) -> None:
    """Check that routes name stages and modules of ``graph``, and lead each call to living actors.

    Args:
        routes: of the units of all replicas.
        graph: of the modules.
        placement: per stage, its positions in each replica.
        forward_only: stages without a backward.

    Raises:
        PlanError: a part that does not fit, with its path (``routes.moves``, ...).
    """
    for named, path in ((routes.skips, "routes.skips"), (routes.every, "routes.every")):
        for name, _ in named:
            if name not in graph.order:
                raise PlanError(f"{path} names module {name!r}; the graph has {list(graph.order)}", path=path)
    _check_calls(routes, graph)
    for unit in sorted({unit for _, units in routes.skips for unit in units}):
        _check_skips(routes, graph, unit, forward_only)
    _check_moves(routes, graph)
    num_positions = 1 + max(max(places) for places in placement)
    for actor in routes.dead:
        if actor.position >= num_positions:
            what = f"actor {actor} is of position {actor.position}; a replica has positions 0..{num_positions - 1}"
            raise PlanError(what, path="routes.dead")
    _check_living(routes, graph, placement)


def _check_calls(routes: Routes, graph: ModuleGraph) -> None:
    """A module that feeds another serves a multiple of the other's units by each call; the last serve one each."""
    every = dict(routes.every)
    for module, count in routes.every:
        if all(source != module for source, _ in graph.edges):
            what = f"a call of {module!r} serves {count} units, and feeds no module"
            raise PlanError(f"{what}; it is called for each", path="routes.every")
    for source, destination in graph.edges:
        here, there = every.get(source, 1), every.get(destination, 1)
        if here % there:
            what = f"a call of {source!r} serves {here} units, and one of {destination!r}, which it feeds, {there}"
            raise PlanError(f"{what}; the first must be a multiple of the second", path="routes.every")


def _check_skips(routes: Routes, graph: ModuleGraph, unit: int, forward_only: Collection[int]) -> None:
    """A unit passes through a module, and through one after each that is not last: one that trains it, if it trains."""
    name, passed = routes.name(unit), [module for module in graph.order if not routes.skips_module(unit, module)]
    if not passed:
        raise PlanError(f"unit {name} skips every module; leave it out", path="routes.skips")
    for module in passed:
        after = [destination for source, destination in graph.edges if source == module]
        left = [other for other in after if other in passed]
        if after and not left:
            what = f"unit {name} passes through {module!r} and skips all that it feeds ({', '.join(after)})"
            raise PlanError(f"{what}; skip it too", path="routes.skips")
        trained = graph.stage(module, -1) not in forward_only
        if trained and after and all(graph.stage(other, 0) in forward_only for other in left):
            what = f"unit {name} passes through {module!r}, which is trained, and on to {', '.join(left)}"
            raise PlanError(f"{what}, which give no gradient back", path="routes.skips")


def _check_moves(routes: Routes, graph: ModuleGraph) -> None:
    """Raise unless each move is of a stage of a call."""
    calls = {module: frozenset(routes.calls(module)) for module in graph.order} if routes.moves else {}
    for move in routes.moves:
        if move.stage >= graph.num_stages:
            stages = f"0..{graph.num_stages - 1}"
            raise PlanError(f"a move names stage {move.stage}; the graph has {stages}", path="routes.moves")
        module, _ = graph.module_of(move.stage)
        if move.unit not in calls[module]:
            what = f"stage {move.stage} of unit {routes.name(move.unit)} moves to replica {move.replica}"
            raise PlanError(f"{what}, and no call of {module!r} begins with that unit", path="routes.moves")


def _check_living(routes: Routes, graph: ModuleGraph, placement: Sequence[Sequence[int]]) -> None:
    """No call leads to a dead actor."""
    dead = {(actor.position, actor.replica): actor for actor in routes.dead}
    for stage, places in enumerate(placement if dead else ()):
        module, _ = graph.module_of(stage)
        for unit in routes.calls(module):
            replica = routes.of(unit, stage)
            for place in places:
                if (place, replica) in dead:
                    what = f"stage {stage} of unit {routes.name(unit)} is computed by actor {dead[place, replica]}"
                    raise PlanError(f"{what}, which is dead; move it", path="routes.moves")
