"""Routes of a step: out of what each rank knows of its own replica, and what a number of the plan is by them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Index, Seconds, checked
from pipegrid.gradients.groups import collection_of, device_of, replica_group, size_of
from pipegrid.monitor import DisagreementError
from pipegrid.monitor.collectives import Waiting, texts_of_ranks
from pipegrid.plans.plan import Routes, stages_on
from pipegrid.schedules.megatron.call import StepCall
from pipegrid.schedules.megatron.place import Place
from pipegrid.schedules.megatron.units.batches import Unit
from pipegrid.transport.base import as_communicator
from pipegrid.transport.collectives.differences import difference
from pipegrid.transport.control.opening import resolve_device
from pipegrid.transport.job import JobTopology


def units_per_replica(routes: Routes) -> float:
    """The divisor of losses, before the sum over replicas is divided by their number: a mean over all units."""
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
    """What a number of a plan means on one stage: a microbatch of this replica, or with routes a call of it."""

    module: str
    replica: int | None  # of this rank, the home of all numbers without routes; None where it is not known
    routes: Routes | None  # of the plan; of one replica, numbers are of its microbatches
    order: Sequence[int]  # the numbers of the stage's forwards on this rank

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


def replica_of(call: StepCall, place: Place) -> int | None:
    """The replica of this rank: its place in the ``dp`` group of its modules, among those that live at its position.

    None where neither routes, groups nor a single process tell it; StepArgumentError where they contradict each other.
    """
    routes, communicator = call.routes, as_communicator(call.p2p_communicator)
    living = None
    if routes is not None and routes.num_replicas > 1:
        _require_same_replicas(communicator.job, routes)
        living = routes.living(_position(communicator.job, place))
    replica, known = _place_among(living, call.pg_collection, place.modules), communicator.job.replica
    if living is not None and known not in (None, replica):
        raise StepArgumentError(
            f"this rank is in replica {known} by its communicator, and in {replica} by its dp group among the living "
            f"replicas {list(living)}"
        )
    if routes is not None:
        own = routes.units[0 if living is None else replica or 0]
        if call.num_microbatches != own:
            raise StepArgumentError(
                f"num_microbatches is {call.num_microbatches}, and by the routes replica {replica} has {own}"
            )
    return replica


def _position(job: JobTopology, place: Place) -> int:
    if job.graph is None:
        return job.current_stage
    if job.placement is None:
        return place.stages[0]
    return next(position for position, stages in stages_on(job.placement).items() if stages == list(place.stages))


def _place_among(living: Sequence[int] | None, pg_collection: Any, modules: Sequence[str]) -> int | None:
    """The replica of this rank, one of ``living`` where they differ."""
    if pg_collection is None:
        if living is not None and len(living) > 1:
            raise StepArgumentError(
                f"the routes are of {len(living)} living replicas; pass a pg_collection with their dp group, in order"
            )
        return living[0] if living else None if dist.is_initialized() else 0
    found: dict[str, int] = {}
    for name in modules:
        collection = collection_of(pg_collection, name)
        group = getattr(collection, "dp", None)
        if group is None and size_of(getattr(collection, "cp", None)) == 1:
            group = getattr(collection, "dp_cp", None)
        if living is not None and size_of(group) != len(living):
            raise StepArgumentError(
                f"module {name!r} has {size_of(group)} ranks in its dp group, and the routes have {len(living)} living "
                "replicas at this position; the group has these, in order"
            )
        at = 0 if group is None else group.rank()
        found[name] = at if living is None else living[at]
    replicas = set(found.values())
    if len(replicas) > 1 and living is not None:
        raise StepArgumentError(f"this rank is in replicas {found} of its modules; with routes it is in one")
    return replicas.pop() if len(replicas) == 1 else None


def _require_same_replicas(job: JobTopology, routes: Routes) -> None:
    count = routes.num_replicas
    for name, sizes in (job.dims or {}).items():
        if sizes.get("dp", 1) != count:
            raise StepArgumentError(
                f"module {name!r} has dp {sizes.get('dp', 1)}, and the routes are of {count} replicas: where replicas "
                "differ, each module has as many; routes of one replica say what all of them do"
            )


def require_equal_routes(
    pg_collection: Any, place: Place, models: Mapping[int, torch.nn.Module], routes: Routes, waiting: Waiting
) -> None:
    """Raise DisagreementError on all replicas of a module where one has other ``routes``: divisors would differ."""
    for name, module in {place.module_of(stage): model for stage, model in models.items()}.items():
        group = None if pg_collection is None else replica_group(pg_collection, name)
        if group is None or group.size() == 1:
            continue
        found = difference(texts_of_ranks(f"routes {routes.digest}", group, device_of(module, group), waiting))
        if found is not None:
            raise DisagreementError(f"replicas of module {name!r} have other routes: {found}; use agree_on_routes")


def agree_on_routes(
    num_microbatches: int | None,
    skips: Mapping[str, Iterable[int]] | None = None,
    *,
    replica: int,
    every: Mapping[str, int] | None = None,
    group: dist.ProcessGroup | None = None,
    deadline: float | None = None,
) -> Routes:
    """The routes of a step in which each replica has microbatches of its own, equal on every rank of ``group``.

    The ranks that read the data of a replica know which of its microbatches have no image. Every rank calls this before
    each step; those that read no data pass None. One gather of a short text.

        without = [number for number, batch in enumerate(batches) if batch["images"] is None]
        routes = agree_on_routes(len(batches), {"vision": without}, replica=grid.coords(rank)["dp"])

    Args:
        num_microbatches: of this rank's replica; None: this rank does not know.
        skips: per module the microbatches of this replica that do not pass through it; None: this rank does not know.
        replica: the replica (dp) of this rank.
        every: for how many consecutive microbatches of a replica a module is called once; equal on all ranks.
        group: all ranks of the job; default: the default process group. The replicas of one position are enough where
            each of them knows.
        deadline: seconds that the host waits for the gather; None leaves it to the group's timeout.

    Raises:
        DisagreementError: ranks of one replica contradict each other, or ``every`` differs; on all ranks.
        StepArgumentError: no rank of a replica knows its number of microbatches; on all ranks.
        PlanError: a number is out of range; on all ranks.
        CollectiveFailedError: past the deadline.
    """
    replica = checked(replica, Index, "replica", StepArgumentError)
    deadline = checked(deadline, Seconds | None, "deadline", StepArgumentError)
    known = None if skips is None else {name: sorted(set(map(int, skips[name]))) for name in sorted(skips)}
    counts = sorted((every or {}).items())
    skipped = known and {name: skip for name, skip in known.items() if skip}
    own = json.dumps([replica, num_microbatches, skipped, counts])
    if not dist.is_initialized():
        return merged({0: own})
    group = group or dist.group.WORLD
    assert group is not None
    device: torch.device = resolve_device(None, None, group)[1]
    return merged(texts_of_ranks(own, group, device, Waiting(deadline, what="the agreement on routes")))


def merged(said: Mapping[int, str]) -> Routes:
    """The routes out of what each rank says."""
    told: dict[int, dict[str, dict[int, Any]]] = {}  # by replica and subject, what its ranks say
    counts: dict[int, Any] = {}
    for rank, text in said.items():
        replica, number, skips, counts[rank] = json.loads(text)
        own = told.setdefault(replica, {"num_microbatches": {}, "skips": {}})
        for what, value in (("num_microbatches", number), ("skips", skips)):
            if value is not None:
                own[what][rank] = value
    every = _one("every", counts)
    units: list[int] = []
    skipped: dict[str, list[int]] = defaultdict(list)
    for replica in range(max(told) + 1):
        own = told.get(replica, {})
        number = _one(f"num_microbatches of replica {replica}", own.get("num_microbatches", {}))
        if number is None:
            raise StepArgumentError(
                f"no rank knows num_microbatches of replica {replica}; the ranks that read its data pass it to "
                "agree_on_routes"
            )
        number = checked(number, Index, f"num_microbatches of replica {replica}", StepArgumentError)
        for name, numbers in (_one(f"skips of replica {replica}", own.get("skips", {})) or {}).items():
            if numbers[-1] >= number or numbers[0] < 0:
                raise StepArgumentError(
                    f"microbatches {numbers} of replica {replica} skip {name!r}; it has microbatches 0..{number - 1}"
                )
            skipped[name] += [sum(units) + each for each in numbers]
        units.append(number)
    return Routes(units, skips=skipped, every=dict(every))


def _one(what: str, values: Mapping[int, Any]) -> Any:
    """The value that all ranks give alike; None where no rank has one."""
    found = difference({rank: f"{what} {json.dumps(value)}" for rank, value in values.items()})
    if found is not None:
        raise DisagreementError(f"the ranks do not have the same routes: {found}")
    return next(iter(values.values()), None)
