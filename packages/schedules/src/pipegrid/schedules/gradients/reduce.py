"""Reduction of gradients over data lanes, bucket by bucket, each started as soon as its last gradient is there.

Every module of the job has its own data lanes, and each lane's gradient is the part of the loss that flowed
through it. So the gradient of a module is the **sum** over its own lanes, whatever their number; what it is
divided by belongs to the loss: the loss side's number of lanes for a mean loss (each lane has averaged over its
own share), the global number of tokens for a token-weighted one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field

from pipegrid.schedules.gradients.buckets import Bucket, alike, partial_over_tp, used_in
from pipegrid.schedules.gradients.dtensors import fsdp_divisors, mesh_ranks
from pipegrid.schedules.gradients.lanes import (
    GradientError,
    Waiting,
    all_reduce,
    collections_by_name,
    described,
    device_of,
    groups_of,
    lanes_group,
    ranks_of,
    size_of,
)
from pipegrid.schedules.gradients.main_grad import Modules, modules_of, named_modules, parameters_of
from pipegrid.schedules.gradients.tied import mark_of
from pipegrid.topology.fields import Amount, Count, checked
from pipegrid.transport.streams import has_streams

BUCKET_BYTES = 32 * 2**20


def reduce_gradients(
    modules: Modules,
    collections: Any,
    *,
    num_tokens: torch.Tensor | float | None = None,
    loss_lanes: int | None = None,
    job_group: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    deadline: float | None = None,
) -> None:
    """Sum gradients over the data lanes of each module, in buckets, and divide by what the loss asks for.

    Call it once per step, after the last backward, on every rank of the job. A parameter that had no gradient
    on this lane but on another counts as zero; one that had none anywhere keeps None. Where a parameter keeps a
    ``main_grad``, that is what is summed, in its dtype. A tied parameter must have had its ``REDUCE``: the sum over
    its copies comes first, and where that was over data lanes, too (`tie_parameters`), it is only divided here.

    A parameter that is whole on every tensor-parallel rank, but whose gradient is only this rank's part (a norm inside
    sequence parallelism, a gain per head), is summed over tp as well where it is marked: by Megatron's
    ``parameter.sequence_parallel = True``, or by ``parameter.partial_over_tp = True``.

    An expert's parameter (Megatron's ``parameter.allreduce = False``, or ``parameter.expert = True``) has seen the
    tokens of its expert-parallel ranks, so it is summed over the ``expt_dp`` group of its collection alone, and divided
    like the others.

    DTensors, of any mesh, are reduced by their local shards. Parts of a sum (placement ``Partial``) are summed over
    their mesh and get the parameter's placements. What ``fully_shard`` has spread over the data lanes is reduced
    already, and divided by their number (or by its ``set_gradient_divide_factor``): that is made up for, so that mean
    and per-token losses and other numbers of loss lanes come out right.

    Gradients that several steps accumulate: see `fresh_gradients`.

    Args:
        modules: this rank's stages, as the step functions take them: of one module, or by module; one each, or several.
        collections: process groups: one collection for all, or a mapping by module name (also as attribute
            ``modules``). ``dp_cp`` (or ``dp``) is the group of a module's data lanes, None is one lane; ``tp`` is read
            for marked parameters.
        num_tokens: tokens that this rank's losses counted, or their weights (0 on ranks without loss, and on all but
            the first tp rank). Gradients are divided by the sum over the job. None: by ``loss_lanes``.
        loss_lanes: data lanes (dp x cp) of the module with the loss. Default: those of the module itself, in a job of
            one module; a job of several (``collections`` by name) must say it.
        job_group: all ranks of the job; default: the default process group. Used for ``num_tokens`` only.
        bucket_bytes: parameters are reduced together in buckets of about this size.
        deadline: seconds that the host waits for each all-reduce; None leaves it to the group's timeout.

    Raises:
        GradientError: the gradients could not come out right: sparse ones, a DTensor over some of the data lanes, or
            over all without ``fully_shard``, several modules without ``loss_lanes``, a module name without a
            collection, cp without dp_cp, a marked parameter without a tp group, a tied one that no ``REDUCE`` has
            summed. Nothing is sent then.
        ReductionTimeoutError: past the deadline; gradients are undefined then, as partial sums may be among them.
    """
    reduction = GradientReduction.of(
        modules, collections, loss_lanes=loss_lanes, job_group=job_group, bucket_bytes=bucket_bytes
    )
    if num_tokens is None and loss_lanes is None and collections_by_name(collections) is not None:
        raise GradientError(
            "loss_lanes is not given, and the job has several modules; give the data lanes (dp x cp) of the one with "
            "the loss, or num_tokens"
        )
    reduction.finish(num_tokens, Waiting(deadline))


@define(eq=False)
class GradientReduction:
    """The reduction of one step's gradients on this rank: buckets in the order in which ranks of a group start them."""

    modules: Modules
    buckets: tuple[Bucket, ...]
    loss_lanes: int | None
    job_group: dist.ProcessGroup | None
    _bucket_of: dict[int, Bucket] = field(init=False)
    _missing: dict[int, int] = field(init=False)  # parameters of each bucket whose gradients are not whole

    def __attrs_post_init__(self) -> None:
        self._bucket_of = {id(parameter): bucket for bucket in self.buckets for parameter in bucket.parameters}
        self._missing = {id(bucket): len(bucket.parameters) for bucket in self.buckets}

    @classmethod
    def of(
        cls,
        modules: Modules,
        collections: Any,
        *,
        loss_lanes: int | None = None,
        job_group: dist.ProcessGroup | None = None,
        bucket_bytes: int | None = None,
    ) -> GradientReduction:
        """The reduction that `reduce_gradients` with these arguments is.

        Raises:
            GradientError: as there, but for sparse gradients and missing sums of tied parameters.
        """
        loss_lanes = checked(loss_lanes, Count | None, "loss_lanes", GradientError)
        bucket_bytes = checked(
            BUCKET_BYTES if bucket_bytes is None else bucket_bytes, Count, "bucket_bytes", GradientError
        )
        held: dict[str, list[torch.nn.Parameter]] = {name: [] for name, _ in named_modules(modules)}
        for name, parameter in parameters_of(modules):
            held[name].append(parameter)
        buckets: list[Bucket] = []
        for name, parameters in reversed(held.items()):  # backwards come to the last module, and its last layer, first
            own_lanes = size_of(lanes_group(collections, name))
            divided = {
                number: factor
                for module in modules_of(modules, name)
                for number, factor in fsdp_divisors(module).items()
            }
            for parameter in parameters:
                lanes, tensor = groups_of(parameter, collections, name)
                _require_reducible(parameter, name, lanes, tensor, by_fsdp=id(parameter) in divided)
            for part in alike(reversed(parameters), bucket_bytes, divided):
                mark = mark_of(part[0])
                lanes, tensor = groups_of(part[0], collections, name)
                by_fsdp = id(part[0]) in divided
                over_lanes = size_of(lanes) > 1 and not by_fsdp and not (mark is not None and mark.over_lanes)
                over_tensor = partial_over_tp(part[0]) and size_of(tensor) > 1
                buckets.append(
                    Bucket(
                        name,
                        part,
                        lanes if over_lanes else None,
                        tensor if over_tensor else None,
                        own_lanes,
                        (divided[id(part[0])] or size_of(lanes)) if by_fsdp else 1.0,
                    )
                )
        # A tied parameter waits for its REDUCE; nothing else waits behind it.
        buckets.sort(key=lambda bucket: mark_of(bucket.parameters[0]) is not None)
        return cls(modules, tuple(buckets), loss_lanes, job_group)

    @property
    def communicates(self) -> bool:
        """Whether there is anything to start early."""
        return any(bucket.lanes is not None or bucket.tensor is not None for bucket in self.buckets)

    def ready(self, parameters: Collection[torch.nn.Parameter]) -> None:
        """The gradients of ``parameters`` are whole; start the buckets of which that holds for all.

        Buckets of one group start in one order on all of its ranks. Those of other groups do not wait for each other:
        each starts inside the last backward of its own stage, which all ranks of its group come to together in a
        verified plan. So where a GPU plays kernels one by one, no all-reduce holds up a message that another rank needs
        to come to it.
        """
        filled = False
        for parameter in parameters:
            bucket = self._bucket_of.pop(id(parameter), None)
            if bucket is not None:
                self._missing[id(bucket)] -= 1
                filled = filled or self._missing[id(bucket)] == 0
        if filled:
            self._start_filled()

    def _start_filled(self) -> None:
        behind: set[int] = set()  # groups with a bucket that is not whole
        for bucket in self.buckets:
            if bucket.started or id(bucket.first) in behind:
                continue
            whole = self._missing[id(bucket)] == 0 and mark_of(bucket.parameters[0]) is None
            if whole and bucket.fault() is None:
                bucket.start()
            elif bucket.first is not None:
                behind.add(id(bucket.first))

    @torch.no_grad()
    def finish(self, num_tokens: torch.Tensor | float | None, waiting: Waiting) -> None:
        """Start the remaining buckets, wait for all, divide, and store the gradients.

        The host reads the device at most once: where a parameter of this rank had no gradient.

        Raises:
            GradientError: sparse gradients, tied parameters that no ``REDUCE`` has summed.
            ReductionTimeoutError: as `Waiting.wait`.
        """
        if num_tokens is not None and not (isinstance(num_tokens, torch.Tensor) and num_tokens.numel() == 1):
            num_tokens = checked(num_tokens, Amount, "num_tokens", GradientError)
        remaining = [bucket for bucket in self.buckets if not bucket.started]
        for bucket in remaining:
            if (fault := bucket.fault()) is not None:
                raise GradientError(fault)
        tokens = None
        if num_tokens is not None:
            tokens = global_tokens(num_tokens, device_of(self.modules, self.job_group), self.job_group, waiting)
        for bucket in remaining:
            bucket.start()
        for bucket in self.buckets:
            bucket.proceed(waiting)
        divisor = tokens if tokens is not None else self.loss_lanes
        unknown: list[Bucket] = []
        for bucket in self.buckets:
            if bucket.wait is not None:
                bucket.wait(waiting)
            if bucket.unknown is None:  # stored while later buckets are under way
                bucket.finish(divisor, (True,) * len(bucket.parameters))
            else:
                unknown.append(bucket)
        for bucket, used in zip(unknown, used_in(unknown), strict=True):
            bucket.finish(divisor, used)


def global_tokens(
    num_tokens: torch.Tensor | float, device: torch.device, job_group: dist.ProcessGroup | None, waiting: Waiting
) -> torch.Tensor:
    """The tokens of the job, or 1 where there are none; stays on the device, so that the host does not wait for it.

    In float64 on every rank, whatever was counted here: a rank without a loss cannot know whether others count whole
    tokens or weigh them, and up to 2**53 a count is exact in it.
    """
    if isinstance(num_tokens, torch.Tensor):
        # Not blocking to a device with streams: memory of the host is read before the call returns.
        total = num_tokens.detach().to(device, torch.float64, non_blocking=has_streams(device), copy=True).reshape(())
    else:
        total = torch.full((), num_tokens, dtype=torch.float64, device=device)
    all_reduce(total, job_group)(waiting)
    return torch.where(total > 0, total, torch.ones_like(total))


def _require_reducible(
    parameter: torch.nn.Parameter,
    name: str,
    lanes: dist.ProcessGroup | None,
    tensor: dist.ProcessGroup | None,
    *,
    by_fsdp: bool,
) -> None:
    mesh = mesh_ranks(parameter)
    shared = max(len(mesh & ranks_of(lanes)), 1)
    if by_fsdp and (shared, len(mesh)) != (size_of(lanes), shared * max(len(mesh & ranks_of(tensor)), 1)):
        raise GradientError(
            f"{described(parameter, name)} is sharded by fully_shard over a mesh of {len(mesh)} ranks, of which "
            f"{shared} are of its {size_of(lanes)} data lanes; the mesh must have all lanes, and beside them tp at most"
        )
    if not by_fsdp and shared > 1:
        raise GradientError(
            f"{described(parameter, name)} is a DTensor over {shared} data lanes, and not by fully_shard: what is "
            "summed over them already is not known; set finalize_model_grads_func"
        )
    if partial_over_tp(parameter) and (
        tensor is None or getattr(parameter, "tensor_model_parallel", False) or mark_of(parameter) is not None
    ):
        raise GradientError(
            f"{described(parameter, name)} is marked as partial over tp (sequence_parallel, partial_over_tp): that "
            "needs a tp group in its collection, and excludes tensor_model_parallel and ties"
        )
