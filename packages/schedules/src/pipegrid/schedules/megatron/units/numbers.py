"""The microbatches of a stage by their number in the plan: whose they are, what divides their losses. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from pipegrid.schedules.megatron.units.batches import Unit
from pipegrid.schedules.plan import Routes


@frozen(eq=False)
class StageUnits:
    """What a number of a plan means on one stage: a microbatch of this replica or, with routes, a call of its module.

    Attributes:
        num_microbatches: of the plan.
        module: of the stage.
        replica: of this rank, which is the home of all numbers without routes; None where it is not known.
        routes: where replicas differ.
        order: the numbers of the stage's forwards on this rank, in the plan's order.
    """

    num_microbatches: int
    module: str
    replica: int | None
    routes: Routes | None
    order: Sequence[int]

    @property
    def divisor(self) -> float:
        """By what a loss is divided before the sum over replicas, which their number divides: the units per replica.

        The two together make the mean over all units, whichever replica has how many of them, and computes them.
        """
        return self.num_microbatches if self.routes is None else self.routes.num_units / self.routes.num_replicas

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
