"""Gradients beside the schedule: their sum over data lanes, and one norm for the whole job.

Every module of the job has its own data lanes, and each lane's gradient is the part of the loss that flowed
through it. So the gradient of a module is the **sum** over its own lanes, whatever their number; what it is
divided by belongs to the loss: the loss side's number of lanes for a mean loss (each lane has averaged over its
own share), the global number of tokens for a token-weighted one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from pipegrid.schedules.arguments import as_number, require, require_integer, shown
from pipegrid.schedules.gradients.main_grad import (
    Modules,
    accumulated,
    accumulation_dtype,
    named_modules,
    parameters_of,
    set_accumulated,
)
from pipegrid.schedules.gradients.tied import mark_of
from pipegrid.transport.opening import resolve_device

BUCKET_BYTES = 32 * 2**20

GROUP = (dist.ProcessGroup, type(None))
GROUP_REMEDY = "give a process group, or None for the default one"


class GradientError(ValueError):
    """Gradients cannot be reduced as asked."""


@frozen
class _Slot:
    """A parameter's place in a bucket."""

    parameter: torch.nn.Parameter
    offset: int


def reduce_gradients(
    modules: Modules,
    collections: Any,
    *,
    num_tokens: torch.Tensor | float | None = None,
    loss_lanes: int | None = None,
    job_group: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Sum gradients over the data lanes of each module, in buckets, and divide by what the loss asks for.

    Call it once per step, after the last backward, on every rank of the job. A parameter that had no gradient
    on this lane but on another counts as zero; one that had none anywhere keeps None. Where a parameter keeps a
    ``main_grad``, that is what is summed, in its dtype. A tied parameter must have had its ``REDUCE``: the sum over
    its copies comes first, and where that was over data lanes, too (`tie_parameters`), it is only divided here.

    Args:
        modules: this rank's modules: by name, several chunks of one module, or one module.
        collections: process groups: one collection for all, or a mapping by module name (also as attribute
            ``modules``). ``dp_cp`` (or ``dp``) is the group of a module's data lanes; None is one lane.
        num_tokens: tokens that this rank's losses counted, or their weights (0 on ranks without loss, and on all but
            the first tp rank). Given: gradients are divided by the sum over the job. None: by ``loss_lanes``.
        loss_lanes: data lanes (dp x cp) of the module with the loss. Default: those of the module itself, which
            is right where all modules have the same number.
        job_group: all ranks of the job; default: the default process group. Used for ``num_tokens`` only.
        bucket_bytes: parameters are reduced together in buckets of about this size.

    Raises:
        GradientError: sparse or sharded (DTensor) gradients, a module name without a collection, cp without dp_cp, a
            tied parameter that no ``REDUCE`` has summed, or an argument of another kind. Nothing is sent then.
        StepArgumentError: ``modules`` holds what is no module.
    """
    error = GradientError
    if num_tokens is not None and not (isinstance(num_tokens, torch.Tensor) and num_tokens.numel() == 1):
        as_number("num_tokens", num_tokens, "give the tokens that this rank's losses counted, or None", error=error)
    if loss_lanes is not None:
        require_integer(
            "loss_lanes", loss_lanes, "give the data lanes of the module with the loss, or None", error=error
        )
    require_integer("bucket_bytes", bucket_bytes, "give about how many bytes to reduce together", error=error)
    require("job_group", job_group, GROUP, GROUP_REMEDY, error=error)
    of_module: dict[str, list[torch.nn.Parameter]] = {name: [] for name, _ in named_modules(modules)}
    for name, parameter in parameters_of(modules):
        _require_reducible(parameter, name)
        of_module[name].append(parameter)
    groups = {name: lanes_group(collections, name) for name in of_module}
    device = device_of(modules, job_group)
    tokens = None if num_tokens is None else _global_tokens(num_tokens, device, job_group)
    for name, parameters in of_module.items():
        group = groups[name]
        lanes = 1 if group is None else group.size()
        divisor = tokens if tokens is not None else (lanes if loss_lanes is None else loss_lanes)
        for bucket in _buckets(parameters, bucket_bytes):
            mark = mark_of(bucket[0])
            if lanes == 1 or (mark is not None and mark.over_lanes):
                for parameter in bucket:
                    gradient = accumulated(parameter)
                    if gradient is not None:
                        _divide_(gradient, divisor)
            else:
                _reduce_bucket(bucket, group, divisor)
            if mark is not None:
                mark.summed = False


def _require_reducible(parameter: torch.nn.Parameter, name: str) -> None:
    gradient = accumulated(parameter)
    if gradient is not None and gradient.is_sparse:
        raise GradientError(
            f"a parameter of shape {tuple(parameter.shape)} in module {name!r} has a sparse gradient; use dense "
            "gradients (Embedding(sparse=False))"
        )
    if hasattr(parameter, "device_mesh"):
        raise GradientError(
            f"a parameter of shape {tuple(parameter.shape)} in module {name!r} is a DTensor: what sharded it reduces "
            "its gradient; set finalize_model_grads_func"
        )
    mark = mark_of(parameter)
    if mark is not None and not mark.summed:
        raise GradientError(
            f"tied parameter {mark.name!r} in module {name!r} was not summed over its copies since its gradient was "
            "last finished: the plan needs its REDUCE (PipelineConfig.tied_parameters, or with_reduce and reducers=)"
        )


def collection_of(collections: Any, name: str) -> Any:
    """The process groups of module ``name``: its own, where there are several collections.

    Raises:
        GradientError: there are several, but none for this module; or what was given is no collection.
    """
    by_name = collections if isinstance(collections, Mapping) else getattr(collections, "modules", None)
    if not isinstance(by_name, Mapping):
        if not hasattr(collections, "dp") and not hasattr(collections, "dp_cp"):
            raise GradientError(
                f"collections is {shown(collections)}, which has neither `dp` nor `dp_cp`; give a "
                "ProcessGroupCollection, or a mapping from module names to them"
            )
        return collections
    if name not in by_name:
        raise GradientError(
            f"no process groups for module {name!r}; there are collections for {sorted(by_name)}. Pass modules as a "
            "mapping with these names"
        )
    return by_name[name]


def lanes_group(collections: Any, name: str) -> dist.ProcessGroup | None:
    """The group of a module's data lanes, dp x cp; None where it has one lane.

    Raises:
        GradientError: there is a cp group, but none for dp and cp together.
    """
    collection = collection_of(collections, name)
    group: dist.ProcessGroup | None = getattr(collection, "dp_cp", None)
    if group is not None:
        return group
    cp = getattr(collection, "cp", None)
    if cp is not None and cp.size() > 1:
        raise GradientError(
            f"module {name!r} has {cp.size()} cp ranks, whose gradients are summed with those of dp, but no dp_cp "
            "group; "
            'make it: grid.create_pg(["dp", "cp"])'
        )
    data_parallel: dist.ProcessGroup | None = getattr(collection, "dp", None)
    return data_parallel


def _global_tokens(
    num_tokens: torch.Tensor | float, device: torch.device, job_group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The tokens of the job, or 1 where there are none; stays on the device, so that nobody waits for it.

    In float64 on every rank, whatever was counted here: a rank without a loss cannot know whether others count whole
    tokens or weigh them, and up to 2**53 a count is exact in it.
    """
    total = torch.as_tensor(num_tokens, dtype=torch.float64).detach().to(device, copy=True).reshape(())
    dist.all_reduce(total, group=job_group)
    return torch.where(total > 0, total, torch.ones_like(total))


def _divide_(gradient: torch.Tensor, divisor: torch.Tensor | int) -> None:
    """In place; in float32 where the gradient is narrower: a GPU would make the tokens float16, which ends at 65504."""
    if isinstance(divisor, torch.Tensor) and gradient.dtype in (torch.float16, torch.bfloat16):
        gradient.copy_(gradient.float().div_(divisor))
    else:
        gradient.div_(divisor)


def _buckets(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> Iterator[list[torch.nn.Parameter]]:
    """Parameters in order, cut where the dtype or device changes or the bucket is full.

    A tied parameter is a bucket of its own: in which order an all-reduce sums depends on the place in the buffer, and
    the copies, which lie in different modules, must get the same bits.
    """
    bucket: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        nbytes = parameter.numel() * accumulation_dtype(parameter).itemsize
        alike = not bucket or _kind(bucket[0]) == _kind(parameter)
        if bucket and (not alike or size + nbytes > bucket_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += nbytes
    if bucket:
        yield bucket


def _kind(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.device, int | None]:
    """What the parameters of one bucket have in common."""
    alone = None if mark_of(parameter) is None else id(parameter)
    return accumulation_dtype(parameter), parameter.device, alone


def _reduce_bucket(
    bucket: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None, divisor: torch.Tensor | int
) -> None:
    """One all-reduce: the gradients, then one flag per parameter that says on how many lanes there was one."""
    first = bucket[0]
    elements = sum(parameter.numel() for parameter in bucket)
    flat = torch.zeros(elements + len(bucket), dtype=accumulation_dtype(first), device=first.device)
    gradients = [accumulated(parameter) for parameter in bucket]
    present = [gradient is not None for gradient in gradients]
    flat[elements:].copy_(torch.tensor(present))
    slots: list[_Slot] = []
    offset = 0
    for parameter, gradient in zip(bucket, gradients, strict=True):
        slots.append(_Slot(parameter, offset))
        if gradient is not None:
            flat[offset : offset + parameter.numel()].view_as(parameter).copy_(gradient)
        offset += parameter.numel()
    dist.all_reduce(flat, group=group)
    # Reading the flags would wait for the device; only a parameter without a gradient here needs its flag.
    anywhere = present if all(present) else (flat[elements:] > 0).tolist()
    _divide_(flat[:elements], divisor)
    for slot, used in zip(slots, anywhere, strict=True):
        if used:
            parameter = slot.parameter
            set_accumulated(parameter, flat[slot.offset : slot.offset + parameter.numel()].view_as(parameter))


def device_of(modules: Any, group: dist.ProcessGroup | None) -> torch.device:
    """Where this rank's collectives run: with its parameters, or, where it has none, where the group's backend is."""
    for _, module in named_modules(modules):
        for parameter in module.parameters():
            return parameter.device
    return resolve_device(None, None, group)[1]
