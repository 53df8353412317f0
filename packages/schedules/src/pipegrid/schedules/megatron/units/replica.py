"""The replica of this rank, by its process groups, and the check that all replicas have the same routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pipegrid.schedules.errors import StepArgumentError
from pipegrid.schedules.gradients.all_reduce import Waiting, texts_of_ranks
from pipegrid.schedules.gradients.lanes import collection_of, device_of, lanes_group, size_of
from pipegrid.schedules.monitor import DisagreementError
from pipegrid.schedules.plan import Routes
from pipegrid.transport.collectives.differences import difference
from pipegrid.transport.job import JobTopology


def replica_of(pg_collection: Any, modules: Iterable[str], routes: Routes | None, position: int) -> int | None:
    """The replica of this rank: its place in the ``dp`` group of its ``modules``, among those of a living ``position``.

    None where neither groups nor a single process tell it, and ``routes`` need none.

    Raises:
        StepArgumentError: ``routes`` of several replicas and no group of as many living ranks, or modules in two.
    """
    living = None if routes is None or routes.num_replicas == 1 else routes.living(position)
    if pg_collection is None:
        if living is not None and len(living) > 1:
            raise StepArgumentError(
                f"the routes are of {len(living)} living replicas; pass a pg_collection with their dp group, in order"
            )
        alone = not dist.is_initialized()
        return living[0] if living else 0 if alone else None
    found: dict[str, int] = {}
    for name in modules:
        collection = collection_of(pg_collection, name)
        group = getattr(collection, "dp", None)
        if group is None and size_of(getattr(collection, "cp", None)) == 1:
            group = getattr(collection, "dp_cp", None)
        place = 0 if group is None else group.rank()
        if living is not None and size_of(group) != len(living):
            raise StepArgumentError(
                f"module {name!r} has {size_of(group)} ranks in its dp group, and the routes have {len(living)} living "
                f"replicas at position {position}; the group has these, in order"
            )
        found[name] = place if living is None else living[place]
    if len(set(found.values())) > 1 and routes is not None and routes.num_replicas > 1:
        raise StepArgumentError(f"this rank is in replicas {found} of its modules; with routes it is in one")
    return next(iter(found.values()), None) if len(set(found.values())) == 1 else None


def require_same_replicas(job: JobTopology, routes: Routes) -> None:
    """Raise StepArgumentError unless each module has the replicas of ``routes``, where these differ."""
    count = routes.num_replicas
    for name, sizes in (job.dims or {}).items() if count > 1 else ():
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
        group = None if pg_collection is None else lanes_group(pg_collection, name)
        if group is None or group.size() == 1:
            continue
        found = difference(texts_of_ranks(f"routes {routes.digest}", group, device_of(module, group), waiting))
        if found is not None:
            raise DisagreementError(
                f"the replicas of module {name!r} have other routes: {found}; agree_on_routes gives all the same"
            )
