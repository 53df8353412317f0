"""Routes of a step out of what each rank knows of its own replica."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Index, Seconds, checked
from pipegrid.monitor import DisagreementError
from pipegrid.monitor.collectives import Waiting, texts_of_ranks
from pipegrid.plans.plan import Routes
from pipegrid.transport.collectives.differences import difference
from pipegrid.transport.control.opening import resolve_device


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
