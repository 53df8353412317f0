"""The microbatches of a stage by their number in the plan: whose they are, what divides their losses. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from pipegrid.plans.plan import ActionKind, Plan, Routes
from pipegrid.schedules.megatron.units.batches import Unit


def units_per_replica(routes: Routes) -> float:
    """The divisor of losses, before the sum over replicas is divided by their number.

    The two together make the mean over all units, whichever replica has how many of them, and computes them.
    """
    return routes.num_units / routes.num_replicas


def planned_routes(routes: Routes, replica: int, *, num_ties: int = 0) -> Routes | None:
    """The routes of the plan that ``replica`` runs; None where that is an ordinary plan.

    Where no unit moves a replica runs a plan of its own units, numbered from 0: planning takes the time of one replica,
    and each position waits for the others only when it has nothing left to do. With several tied parameters, which
    replicas reduce in one order, and for a replica without units it is the plan of all.
    """
    own = routes.units_of(0 if routes.num_replicas == 1 else replica)
    if routes.moves or routes.dead or num_ties > 1 or not own:
        return routes
    skips = {name: [unit - own.start for unit in units if unit in own] for name, units in routes.skips}
    alone = Routes([len(own)], skips=skips, every=routes.every)
    return None if alone.is_identity else alone


@frozen(eq=False)
class StageUnits:
    """What a number of a plan means on one stage: a microbatch of this replica or, with routes, a call of its module.

    Attributes:
        divisor: of its losses: microbatches, or `units_per_replica`.
        module: of the stage.
        replica: of this rank, which is the home of all numbers without routes; None where it is not known.
        routes: of the plan; of one replica, numbers are of its microbatches.
        order: the numbers of the stage's forwards on this rank, in the plan's order.
    """

    divisor: float
    module: str
    replica: int | None
    routes: Routes | None
    order: Sequence[int]

    @property
    def in_order_at_home(self) -> bool:
        """Whether this rank computes its replica's own microbatches, all of them and in order."""
        if self.routes is None:
            return True
        return list(self.order) == [one for one in self.routes.calls(self.module) if self.home(one) == self.replica]

    def home(self, number: int) -> int | None:
        """The replica whose microbatch it is."""
        if self.routes is None or self.routes.num_replicas == 1:  # routes of one replica say what each does
            return self.replica
        return self.routes.home(number)

    def microbatch(self, number: int) -> int:
        """Its number at home: of a call for several microbatches the first."""
        return number if self.routes is None else self.routes.microbatch(number)

    def served(self, number: int) -> int:
        """For how many units a call is."""
        return 1 if self.routes is None else len(self.routes.served(number, self.module))

    def units(self, number: int) -> list[Unit]:
        """The units of a call: each by its home replica, and its number there."""
        home = self.home(number)
        assert home is not None  # checked as the step began
        served = (number,) if self.routes is None else self.routes.served(number, self.module)
        return [(home, self.microbatch(unit)) for unit in served]


def chunk_numbers(plan: Plan, stages: Iterable[int]) -> dict[int, int]:
    """The chunk number of each stage, for modules with several stages on this rank."""
    by_module: dict[str, list[int]] = {}
    for stage in stages:
        by_module.setdefault(plan.graph.module_of(stage)[0], []).append(stage)
    return {stage: chunk for held in by_module.values() if len(held) > 1 for chunk, stage in enumerate(held)}


def forwards_on(plan: Plan, position: int, stage: int) -> dict[int, int]:
    """By microbatch of ``stage``, in order, the number of earlier forwards (of any stage) on ``position``."""
    forwards = [action for action in plan.actions(position) if action.kind is ActionKind.F]
    return {action.microbatch or 0: place for place, action in enumerate(forwards) if action.stage == stage}


def checkpointed_on(plan: Plan, position: int, stage: int, partial: int) -> frozenset[int]:
    """The microbatches of ``stage`` that checkpoint all activations: all but the first few of each window in flight.

    ``partial`` is how many follow the model's own setting, of each window of forwards of any stage on ``position``.
    """
    window = window_on(plan, position)
    forwards = forwards_on(plan, position, stage)
    return frozenset(microbatch for microbatch, place in forwards.items() if place % window >= partial)


def window_on(plan: Plan, position: int) -> int:
    """Number of forwards on ``position`` before its first backward: the microbatches in flight."""
    count = 0
    for action in plan.actions(position):
        if action.kind is ActionKind.F:
            count += 1
        elif action.kind.is_compute:
            break
    return count
