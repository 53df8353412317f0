"""A schedule of one replica, led along routes: one order per actor.

Units at home keep the order that the schedule has. What an actor computes for other replicas goes in between by list
scheduling. How good the result is depends on the routes, and on what is moved; that it runs does not.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque

from attrs import Factory, define, evolve

from pipegrid.core.edge import Direction
from pipegrid.core.fields import Amount, checked_arguments
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import COMPUTES, Action, ActionKind, Plan, Routes, require_plan
from pipegrid.plans.plan.dataflow import BACKWARD, FORWARD, dataflow_of
from pipegrid.plans.simulate import Costs
from pipegrid.plans.simulate.engine import play

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W


@checked_arguments(PlanError)
def routed(plan: Plan, routes: Routes, *, memory_limit: Amount | None = None) -> Plan:
    """``plan``, a schedule of one replica, for all replicas and along ``routes``; ``plan`` itself, if they act alike.

    Units at home keep their order. An actor takes the units of others between: forwards from its own first backward on
    (it has warmed up), and weight gradients when there is nothing else to do.

    Args:
        plan: of computes, with as many microbatches as the replica with the most units.
        routes: which replica computes what.
        memory_limit: of live activations on each actor, in microbatches as in `verify`; None for none.

    Why it cannot deadlock: in the schedule of one replica each compute has a date, later than those that it waits for.
    Of all computes that are not done, that with the first date has all its inputs; if it is at home, all of its actor's
    own before it are done, and if it is not, it may be taken at any time. A call for several units has its forward at
    the date of the first of them, and its backward at that of the last.

    Raises:
        PlanError: the plan communicates, has routes or slices, or another number of microbatches; the routes do not fit
            it; or the units do not fit the memory limit in this order.

    Examples:
        >>> [str(step) for step in routed(one_f_one_b(1, 2), Routes([2, 2], {(3, 0): 0})).positions[0]]
        ['0F0', '0B0', '0F1', '0F3', '0B1', '0B3']
    """
    require_plan(plan)
    if plan.routes is not None or plan.num_slices > 1:
        raise PlanError("the plan has routes or slices; give the schedule of one replica, of whole microbatches")
    if any(action.kind not in COMPUTES for position in range(plan.num_positions) for action in plan.actions(position)):
        raise PlanError("the plan communicates or offloads; give a plan of computes, and lower the result")
    if plan.num_microbatches != max(routes.units):
        what = f"the plan has {plan.num_microbatches} microbatches; the replicas have {list(routes.units)}"
        raise PlanError(f"{what}, so give a schedule of {max(routes.units)}")
    if routes.is_identity:
        return plan
    rows: list[tuple[Action, ...]] = [()] * (plan.num_positions * routes.num_replicas)
    empty = evolve(plan, positions=rows, num_microbatches=routes.num_units, routes=routes)
    limit, operations = math.inf if memory_limit is None else memory_limit, _operations(plan, empty, routes)
    return evolve(empty, positions=_OperationScheduler(plan, len(rows), operations, limit).run())


@define(eq=False)
class _Operation:
    """A compute of all the actors that do it together; ``order``: its date, stage and call."""

    order: tuple[float, int, int]
    action: Action
    actors: tuple[int, ...]
    at_home: bool
    waits: int = 0
    ready: float = 0.0
    then: list[_Operation] = Factory(list)


def _operations(plan: Plan, empty: Plan, routes: Routes) -> list[_Operation]:
    """All computes, in order, with those that wait for each."""
    dates: dict[tuple[int, int], dict[ActionKind, float]] = defaultdict(dict)  # in the schedule of one replica
    for position, starts in enumerate(play(plan, Costs()).start):
        for action, date in zip(plan.actions(position), starts, strict=True):
            dates[action.stage, action.microbatch or 0][action.kind] = date
    # By stage, what it makes (an activation, a gradient, or None: nothing that another needs), and call.
    made: dict[tuple[int, Direction | None, int], _Operation] = {}
    for stage, places in enumerate(plan.placement):
        module, _ = plan.graph.module_of(stage)
        for call in routes.calls(module):
            replica = routes.of(call, stage)
            actors, at_home = empty.actors(places, replica), replica == routes.home(call)
            first, last = dates[stage, routes.microbatch(call)], routes.units_for(call, module)[-1]
            for kind, date in {**dates[stage, routes.microbatch(last)], F: first[F]}.items():
                way = None if kind is W else FORWARD if kind is F else BACKWARD
                made[stage, way, call] = _Operation((date, stage, call), Action(kind, stage, call), actors, at_home)
    flows = dataflow_of(empty)
    for (stage, way, call), one in made.items():
        needs: list[tuple[int, Direction | None, int]] = []
        if way is not FORWARD:
            needs.append((stage, FORWARD if way is BACKWARD else BACKWARD, call))
        for flow, message in flows.arriving(stage, way, call) if way is not None else ():
            makers = {maker for source in flow.sources for maker in flow.makers(message, source)}
            needs += [(flow.producer, way, maker) for maker in sorted(makers)]
        for need in needs:
            made[need].then.append(one)
        one.waits = len(needs)
    return sorted(made.values(), key=lambda one: one.order)


class _OperationScheduler:
    """Orders of all actors, operation by operation: always one of those that can start first.

    ``own``: per actor, the operations of its own units that are left, in order; ``others``: those of other replicas
    whose inputs are there. ``live``: per actor, in microbatches.
    """

    def __init__(self, plan: Plan, num_actors: int, operations: list[_Operation], limit: float) -> None:
        self.plan, self.limit, self.left = plan, limit, len(operations)
        self.own: list[deque[_Operation]] = [deque() for _ in range(num_actors)]
        for one in operations:
            for actor in one.actors if one.at_home else ():
                self.own[actor].append(one)
        self.others = [one for one in operations if not one.at_home and not one.waits]
        self.free, self.live = [0.0] * num_actors, [0.0] * num_actors
        self.warm = [all(one.action.kind is F for one in own) for own in self.own]  # those have no warmup
        self.orders: list[list[Action]] = [[] for _ in range(num_actors)]

    def run(self) -> list[list[Action]]:
        """The orders."""
        for _ in range(self.left):
            chosen = self._next(warm=True) or self._next(warm=False)
            if chosen is None:
                what = f"the units do not fit a memory limit of {self.limit:g} microbatches in this order"
                raise PlanError(f"{what}; give more, or other routes")
            self._do(chosen)
        return self.orders

    def _next(self, *, warm: bool) -> _Operation | None:
        """The operation to do next; ``warm``: forwards of other replicas only after the warmup."""
        heads = {id(own[0]): own[0] for own in self.own if own}.values()
        candidates = [one for one in heads if not one.waits and all(self.own[a][0] is one for a in one.actors)]
        candidates += [
            one for one in self.others if one.action.kind is not F or not warm or all(self.warm[a] for a in one.actors)
        ]
        candidates = [one for one in candidates if one.action.kind is not F or self._fits(one)]
        # The first to start; of these the first by its date, and weight gradients of other replicas last.
        return min(
            candidates,
            key=lambda one: (self._start(one), not one.at_home and one.action.kind is W, one.order),
            default=None,
        )

    def _start(self, one: _Operation) -> float:
        return max(one.ready, *(self.free[actor] for actor in one.actors))

    def _size(self, one: _Operation) -> float:
        return 1.0 / self.plan.stages_beside[one.action.stage]

    def _fits(self, one: _Operation) -> bool:
        more = self._size(one) if one.action.kind is F else 0.0
        return all(self.live[actor] + more <= self.limit + 1e-9 for actor in one.actors)

    def _do(self, one: _Operation) -> None:
        kind, end = one.action.kind, self._start(one) + (2.0 if one.action.kind is B else 1.0)
        keeps = kind is F and one.action.stage not in self.plan.forward_only
        for actor in one.actors:
            self.orders[actor].append(one.action)
            self.free[actor] = end
            self.live[actor] += self._size(one) if keeps else -self._size(one) if kind in (B, W) else 0.0
            self.warm[actor] = self.warm[actor] or (one.at_home and kind is not F)
            if one.at_home:
                self.own[actor].popleft()
        if not one.at_home:
            self.others.remove(one)
        for other in one.then:
            other.waits -= 1
            other.ready = max(other.ready, end)
            if not other.waits and not other.at_home:
                self.others.append(other)
