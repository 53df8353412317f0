"""The replica of this rank, by its process groups, and the check that all replicas have the same routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pipegrid.core.errors import StepArgumentError
from pipegrid.gradients.groups import collection_of, device_of, replica_group, size_of
from pipegrid.monitor import DisagreementError
from pipegrid.monitor.collectives import Waiting, texts_of_ranks
from pipegrid.plans.plan import Routes, stages_on
from pipegrid.transport.base import as_communicator
from pipegrid.transport.collectives.differences import difference

if TYPE_CHECKING:
    from pipegrid.schedules.megatron.call import StepCall
    from pipegrid.schedules.megatron.place import Place
    from pipegrid.transport.job import JobTopology


def replica_of(call: StepCall, place: Place) -> int | None:
    """The replica of this rank: its place in the ``dp`` group of its modules, among those that live at its position.

    None where neither routes, groups nor a single process tell it.

    Raises:
        StepArgumentError: routes of several replicas, and no group of as many living ranks; modules in two replicas, or
            with other numbers of them; or another ``num_microbatches`` than this replica has by the routes.
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
    """The position of this rank in its replica."""
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
    """Raise unless each module has the replicas of ``routes``."""
    count = routes.num_replicas
    for name, sizes in (job.dims or {}).items():
        if sizes.get("dp", 1) != count:
            raise StepArgumentError(
                f"module {name!r} has dp {sizes.get('dp', 1)}, and the routes are of {count} replicas: where replicas "
                "differ, each module has as many; routes of one replica say what all of them do"
            )


def require_equal_routes(
    pg_collection: Any, modules: Mapping[str, torch.nn.Module], routes: Routes, waiting: Waiting
) -> None:
    """Raise DisagreementError on all replicas of a module where one has other ``routes``: divisors would differ."""
    for name, module in modules.items():
        group = None if pg_collection is None else replica_group(pg_collection, name)
        if group is None or group.size() == 1:
            continue
        found = difference(texts_of_ranks(f"routes {routes.digest}", group, device_of(module, group), waiting))
        if found is not None:
            raise DisagreementError(
                f"the replicas of module {name!r} have other routes: {found}; agree_on_routes gives all the same"
            )
