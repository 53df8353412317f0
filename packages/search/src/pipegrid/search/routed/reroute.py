"""Routes around dead and slow actors: their units go to their peers, so that no peer has more work than it must."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from attrs import evolve

from pipegrid.core.fields import Seconds, checked, shown
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Actor, Plan, Routes


def reroute(
    routes: Routes,
    dead: Iterable[Actor] | Mapping[int, Iterable[int]] = (),
    speeds: Mapping[Actor, float] | None = None,
    *,
    plan: Plan | None = None,
) -> Routes:
    """``routes`` on which nothing leads to a dead actor, and no peer's work, by its speed, is more than it must be.

    A unit stays where it is, at home as a rule, if that actor lives. The others (orphans, oldest first) go one by one
    to the peer, an actor of the same position, that would be done first, of equal ones to the lowest replica. As units
    are alike, that is the least maximum, and a function of the arguments alone: the same on every rank.

    With ``speeds``, units also leave an actor that would be done later than a peer with one more. ``speeds``: of the
    actors that are slower or faster than the rest (1).

    Args:
        routes: with those that are already dead; `Routes.identity` for none.
        dead: actors, or per position the replicas that are dead there.
        speeds: per actor; twice the speed is half the time.
        plan: the plan that the routes are for, undisturbed, with its graph and placement (None: one module, with one
            stage on each position).

    Raises:
        PlanError: a stage has no living actor; a speed that is not above 0; routes that skip modules or share calls,
            without the plan that says whose they are.

    Examples:
        >>> from pipegrid.plans import Routes, one_f_one_b
        >>> routes = Routes.identity(2, 4)  # 2 replicas of 4 microbatches
        >>> around = reroute(routes, {0: [1]}, plan=one_f_one_b(2, 4))  # position 0 of replica 1 is dead
        >>> len(around.moves)
        4
    """
    named: list[object]
    try:
        if isinstance(dead, Mapping):
            named = [Actor(position, replica) for position, replicas in dead.items() for replica in replicas]
        else:
            named = [*dead]
    except TypeError:
        named = [dead]
    dying = [one for one in named if isinstance(one, Actor)]
    if len(dying) < len(named):
        raise PlanError(f"dead is {shown(dead)}; it must be actors, or a dict from a position to its dead replicas")
    routes = evolve(routes, dead={*routes.dead, *dying})
    pace = as_speeds(speeds)
    if plan is None and (routes.skips or routes.every):
        raise PlanError("the routes skip modules or share calls; give plan=, which says what stages those are")
    moves = {(move.unit, move.stage): move.replica for move in routes.moves}
    positions = sorted({actor.position for actor in (*routes.dead, *pace)})
    by_places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for stage, places in enumerate(plan.placement) if plan else ((position, (position,)) for position in positions):
        by_places[places].append(stage)
    for places, stages in by_places.items():
        if not set(places).isdisjoint(positions):
            moves.update(_moved(routes, places, _works(routes, stages, plan), pace))
    return evolve(routes, moves=moves)


def as_speeds(speeds: Mapping[Actor, float] | None) -> dict[Actor, float]:
    """The speeds of actors, each above 0."""
    given = {} if speeds is None else speeds
    if not isinstance(given, Mapping) or not all(isinstance(one, Actor) for one in given):
        raise PlanError(f"speeds are {shown(given)}; they must be a dict from actors to their speeds")
    return {actor: checked(of, Seconds, f"the speed of {actor}", PlanError) for actor, of in given.items()}


def _works(routes: Routes, stages: list[int], plan: Plan | None) -> dict[tuple[int, int], list[int]]:
    """Stages of one module and one position, which stay together, by call and the replica that computes it."""
    works: dict[tuple[int, int], list[int]] = defaultdict(list)
    for stage in stages:
        for call in routes.calls(plan.graph.module_of(stage)[0] if plan else ""):
            works[call, routes.of(call, stage)].append(stage)
    return works


def _moved(
    routes: Routes, places: tuple[int, ...], works: dict[tuple[int, int], list[int]], pace: Mapping[Actor, float]
) -> dict[tuple[int, int], int]:
    """The moves, as replica by unit and stage, of the works of one position (or those that hold a stage together)."""
    living = sorted(set.intersection(*[{*routes.living(place)} for place in places]))
    if not living:
        raise PlanError(
            f"no replica of position {', '.join(map(str, places))} is alive, so nothing computes stage "
            f"{min(min(stages) for stages in works.values())}; restart from a checkpoint"
        )
    speed = {replica: min(pace.get(Actor(place, replica), 1.0) for place in places) for replica in living}
    load = dict.fromkeys(living, 0)
    for (_, replica), stages in works.items():
        if replica in load:
            load[replica] += len(stages)
    to: dict[tuple[int, int], int] = {}

    def first_done(work: tuple[int, int]) -> int:
        return min(living, key=lambda replica: ((load[replica] + len(works[work])) / speed[replica], replica))

    def age(work: tuple[int, int]) -> tuple[int, int]:
        return routes.microbatch(work[0]), work[0]

    for work in sorted((work for work in works if work[1] not in load), key=age):
        to[work] = first_done(work)
        load[to[work]] += len(works[work])
    while pace and works:
        last = max(living, key=lambda replica: (load[replica] / speed[replica], replica))
        work = max((work for work in works if to.get(work, work[1]) == last), key=age)
        peer = first_done(work)
        if (load[peer] + len(works[work])) / speed[peer] >= load[last] / speed[last]:
            break
        to[work] = peer
        load[last], load[peer] = load[last] - len(works[work]), load[peer] + len(works[work])
    return {(call, stage): replica for (call, at), replica in to.items() for stage in works[call, at]}
