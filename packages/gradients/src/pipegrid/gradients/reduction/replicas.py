"""Replicas compared: parameters by checksum before the first step, also gradients by norm in debug runs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pipegrid.gradients import foreach
from pipegrid.gradients.all_reduce import all_reduce
from pipegrid.gradients.dtensors import is_dtensor, local_of
from pipegrid.gradients.groups import device_of, ranks_of, size_of
from pipegrid.gradients.layout import GradientLayout, ParameterGradient
from pipegrid.gradients.main_grad import Modules, accumulated
from pipegrid.monitor import DisagreementError, JobFailedError
from pipegrid.monitor.collectives import Waiting, texts_of_ranks
from pipegrid.topology import GroupCreationTimeoutError, control_store
from pipegrid.topology.bounded_calls import giving_up
from pipegrid.topology.rendezvous import Rendezvous
from pipegrid.transport.collectives.checksum import checksums
from pipegrid.transport.collectives.differences import by_text, difference
from pipegrid.transport.collectives.extremes import extremes

if TYPE_CHECKING:
    from pipegrid.monitor import Monitor

_SHOWN = 4  # checksums in an error
_DEADLINE = 300.0  # seconds, where none is set
_PART = 0.9  # of the deadline: before that of a reduction in which a replica without the change waits


class ReplicaError(RuntimeError):
    """Replicas of a parameter, or of its gradient, differ: made with other seeds, or reduced on some ranks alone.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> copies = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.zeros(4))
        >>> TiedParameters("embedding", (0, 1), copies).require_equal()
        Traceback (most recent call last):
            ...
        pipegrid.gradients.reduction.replicas.ReplicaError: the copies of tied parameter 'embedding' have drifted
            apart since they were tied; their checksums are a500000000000000 beside 0000000000000000. Update them
            alike: options that are chosen by name or place must be the same for each copy (named_parameters() of a
            Pipeline has one name for all of them)
    """


def meet_replicas(module: str, group: dist.ProcessGroup, waiting: Waiting) -> None:
    """Return when all replicas of a module have come to compare it again; DisagreementError where some do not."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    monitor, seconds = waiting.monitor, _PART * (waiting.deadline or _DEADLINE)
    try:
        with giving_up(str if monitor is None else partial(_failure_of, monitor)):
            timeout = timedelta(seconds=seconds)
            meeting = Rendezvous(control_store("replicas"), ranks, rank, f"replicas of {module}", timeout)
            meeting.meet(f"{module} {ranks}", step="come to compare what they train")
    except GroupCreationTimeoutError as error:
        raise DisagreementError(
            f"what rank {rank} trains of module {module!r}, or how it finishes the gradients, has changed since the "
            f"replicas compared it, and not on all of the ranks {ranks} in this step; change all replicas alike"
        ) from error


def _failure_of(monitor: Monitor) -> str:
    try:
        monitor.check()
    except JobFailedError as error:
        return str(error)
    return ""


@torch.no_grad()
def require_equal_parameters(
    modules: Modules, collections: Any, *, waiting: Waiting | None = None, over: dist.ProcessGroup | None = None
) -> None:
    """Raise where replicas of a parameter, trained or not, differ in a bit.

    Over replicas those that each holds whole, or the same shards of; over tp, and over dims of a DTensor's mesh,
    those that are known to be whole there (``partial_over_tp``, ``sequence_parallel``, placement ``Replicate``).
    Buffers are not compared: running statistics and numbers of replicas differ by design. One read of the parameters,
    and per group one gather of a checksum, for which the host waits; every rank of the groups calls it.

    Raises:
        ReplicaError: on every rank of a group, with the first parameter that differs and which ranks have which.
    """
    waiting = waiting or Waiting()
    differing = []
    for (module, group), held in _replicated(GradientLayout.of(modules, collections), _known_whole).items():
        if over not in (None, group):
            continue
        device = device_of(modules, group)
        sums = checksums([local_of(parameter) for parameter in held.values()], device)
        # Names and forms beside the bytes: parameters in another order are other parameters.
        forms = [zlib.crc32(f"{name} {each.dtype} {tuple(each.shape)}".encode()) for name, each in held.items()]
        sums += torch.tensor(forms, device=device)
        own = f"{int(checksums([sums], device).item())} of {len(held)}"
        if difference(texts_of_ranks(own, group, device, waiting)) is not None:
            differing.append((module, group, list(held), sums))
    # A rank raises after all of its groups have compared, in which others wait for it.
    errors = []
    for module, group, names, sums in differing:
        own = " ".join(f"{value % 2**64:016x}" for value in sums.tolist())
        errors.append(_apart(module, names, texts_of_ranks(own, group, sums.device, waiting)))
    if errors:
        raise errors[0]


def _apart(module: str, names: list[str], said: dict[int, str]) -> ReplicaError:
    """The error for the checksums of all parameters, in the order of ``names`` here, by rank."""
    columns = list(zip_longest(*(text.split() for text in said.values()), fillvalue="none"))
    differing = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    first = differing[0]
    found = by_text(dict(zip(said, columns[first], strict=True)))
    more = f" and {len(found) - _SHOWN} others" if len(found) > _SHOWN else ""
    which = names[first] if first < len(names) else "one that this rank does not have"
    return ReplicaError(
        f"replicas of module {module!r} start with different parameters, {len(differing)} of {len(columns)}; the first "
        f"is {which}, with the checksums {'; '.join(found[:_SHOWN])}{more}. Make the model with one seed "
        "(torch.manual_seed) or load one checkpoint; check_replicas=None is for replicas that differ on purpose"
    )


def require_equal_replicas(
    modules: Modules, collections: Any, *, tolerance: float = 1e-6, waiting: Waiting | None = None
) -> None:
    """Raise where parameters or gradients differ between replicas, or between tp ranks that hold them whole.

    Compares the norm of each, up to ``tolerance`` times the larger one: one read of parameters and gradients, a small
    all-reduce per group and one read by the host. Every rank of the groups calls it, after the reduction or after the
    optimizer's step. A gradient that is partial over tp, and neither summed nor marked, is found in the first step.

    Raises:
        ReplicaError: on every rank of the group, with the parameters and by how much they differ.
        GradientError: a group of replicas is missing.

    Examples:
        >>> import torch
        >>> from pipegrid.topology import ProcessGroupCollection
        >>> require_equal_replicas(torch.nn.Linear(4, 1), ProcessGroupCollection())
    """
    layout = GradientLayout.of(modules, collections)
    layout.require_groups()
    require_equal_norms(layout, waiting or Waiting(), tolerance)


@torch.no_grad()
def require_equal_norms(layout: GradientLayout, waiting: Waiting, tolerance: float = 1e-6) -> None:
    """`require_equal_replicas` of a layout."""
    for (module, group), held in _replicated(layout, _plain_and_trained).items():
        names, parameters = [f"{module}.{name}" if module else name for name in held], list(held.values())
        kinds = ("parameter", "gradient")
        tensors = [tensor for parameter in parameters for tensor in (parameter.detach(), accumulated(parameter))]
        norms = torch.zeros(len(tensors), dtype=torch.float64, device=parameters[0].device)
        if filled := [place for place, tensor in enumerate(tensors) if tensor is not None and tensor.numel()]:
            local = [local_of(tensors[place]) for place in filled]
            norms[filled] = foreach.norms(local, 2.0).nan_to_num(nan=-1.0)
        most, least = extremes(norms, partial(_reduce_max, group, waiting))
        apart = most - least
        differing = (apart > tolerance * most.abs()).nonzero().flatten().tolist()
        if found := [f"the {kinds[at % 2]} of {names[at // 2]} by {float(apart[at]):.3g}" for at in differing]:
            raise ReplicaError(
                f"the ranks {sorted(dist.get_process_group_ranks(group))} hold replicas whose norms differ: "
                f"{', '.join(found[:5])}{f' and {len(found) - 5} more' if len(found) > 5 else ''}. Mark a gradient "
                "that is a part on each tp rank (partial_over_tp), or a sharded parameter (tensor_model_parallel)"
            )


def _reduce_max(group: dist.ProcessGroup, waiting: Waiting, values: torch.Tensor) -> None:
    all_reduce(values, group, dist.ReduceOp.MAX)(waiting)


def _replicated(
    layout: GradientLayout, groups_of: Callable[[ParameterGradient], Iterator[dist.ProcessGroup | None]]
) -> dict[tuple[str, dist.ProcessGroup], dict[str, torch.nn.Parameter]]:
    """The parameters that all ranks of a group hold alike, under their names, by module and group."""
    found: dict[tuple[str, dist.ProcessGroup], dict[str, torch.nn.Parameter]] = {}
    for each in layout.gradients:
        for group in groups_of(each):
            if group is not None and size_of(group) > 1:
                found.setdefault((each.module, group), {})[each.name] = each.parameter
    return found


def _known_whole(layout: ParameterGradient) -> Iterator[dist.ProcessGroup | None]:
    """The groups over which the parameter, or this rank's shard of it, is known to be replicated."""
    if len(layout.mesh & ranks_of(layout.replicas)) <= 1:
        yield layout.replicas
    if not layout.mesh and layout.marks.partial:
        yield layout.tensor
    yield from layout.alike


def _plain_and_trained(layout: ParameterGradient) -> Iterator[dist.ProcessGroup | None]:
    """The groups of a plain parameter whose gradient is to be the same over them; over tp, unless it is marked."""
    if layout.parameter.requires_grad and not is_dtensor(layout.parameter):
        yield layout.replicas
        if not layout.marks.sharded:
            yield layout.tensor
