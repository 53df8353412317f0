"""Reduction of gradients over replicas, bucket by bucket, each started as soon as its last gradient is there.

Each replica's gradient is the part of the loss that flowed through it. So the gradient of a module is the **sum** over
its own replicas, whatever their number; the divisor belongs to the loss: its number of replicas for a mean loss (each
has averaged over its own share), the tokens of the job for a token-weighted one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field

from pipegrid.core.fields import Amount, Count, checked
from pipegrid.gradients.all_reduce import reduce_few
from pipegrid.gradients.errors import GradientError
from pipegrid.gradients.groups import collections_by_name, device_of, ranks_of, size_of
from pipegrid.gradients.layout import GradientLayout, ParameterGradient
from pipegrid.gradients.main_grad import Modules
from pipegrid.gradients.reduction.buckets import Bucket, Divisor, bucketed, used_in
from pipegrid.monitor.collectives import Waiting
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
    """Sum gradients over the replicas of each module, in buckets, and divide by what the loss asks for.

    Call it once per step, after the last backward, on every rank of the job; see `fresh_gradients` for several steps
    per update. A parameter without a gradient on this replica counts as zero; one that has none anywhere keeps None.

    - ``main_grad`` is summed where a parameter keeps one, in its dtype.
    - A tied parameter must have had its ``REDUCE``; where that was over replicas, it is only divided here.
    - A parameter that is whole on every tp rank, but whose gradient is this rank's part (a norm inside sequence
      parallelism, a gain per head), is summed over tp as well where it is marked: ``parameter.sequence_parallel =
      True`` (Megatron's), or ``parameter.partial_over_tp = True``.
    - An expert's (``parameter.allreduce = False``, Megatron's, or ``parameter.expert = True``) has seen the tokens of
      its expert-parallel ranks: it is summed over the ``expt_dp`` group alone, and divided like the others.
    - DTensors are reduced by their local shards. Parts of a sum (placement ``Partial``) are summed over their mesh;
      what ``fully_shard`` has reduced and divided already is only multiplied by the ratio of the two divisors.

    Args:
        modules: this rank's stages: of one module, or by module; one each, or several.
        collections: process groups: one collection for all, or a mapping by module name (also as attribute
            ``modules``). ``dp_cp`` (or ``dp``) is the group of a module's replicas, None is one replica; ``tp`` is read
            for marked parameters.
        num_tokens: tokens that this rank's losses counted, or their weights (0 on ranks without loss, and on all but
            the first tp rank). Gradients are divided by the sum over the job. None: by ``loss_lanes``.
        loss_lanes: replicas (dp x cp) of the module with the loss. Default: those of the module itself, in a job of
            one module; a job of several (``collections`` by name) must say it.
        job_group: all ranks of the job; default: the default process group. Used for ``num_tokens`` only.
        bucket_bytes: parameters are reduced together in buckets of about this size.
        deadline: seconds that the host waits for each all-reduce; None leaves it to the group's timeout.

    Raises:
        GradientError: the gradients could not come out right: sparse ones, a DTensor over some of the replicas,
            several modules without ``loss_lanes``, a group that is missing, a tied parameter that no ``REDUCE`` has
            summed. Nothing is sent then.
        CollectiveFailedError: past the deadline; gradients are undefined then, as partial sums may be among them.

    Examples:
        >>> import torch
        >>> from pipegrid.topology import ProcessGroupCollection
        >>> stage = torch.nn.Linear(4, 1)
        >>> stage(torch.ones(2, 4)).sum().backward()
        >>> reduce_gradients(stage, ProcessGroupCollection(), num_tokens=2)
    """
    reduction = GradientReduction.of(
        modules, collections, loss_lanes=loss_lanes, job_group=job_group, bucket_bytes=bucket_bytes
    )
    if num_tokens is None and loss_lanes is None and collections_by_name(collections) is not None:
        raise GradientError(
            "loss_lanes is not given, and the job has several modules; give the replicas (dp x cp) of the one with "
            "the loss, or num_tokens"
        )
    reduction.finish(num_tokens, Waiting(deadline))


@define(eq=False)
class GradientReduction:
    """The reduction of a step's gradients on this rank: buckets in the order in which ranks of a group start them."""

    layout: GradientLayout
    buckets: tuple[Bucket, ...]
    loss_lanes: int | None
    job_group: dist.ProcessGroup | None
    parameters: tuple[torch.nn.Parameter, ...] = field(init=False)  # what is reduced
    _bucket_of: dict[int, Bucket] = field(init=False)
    _left: dict[int, Bucket] = field(init=False)  # of the parameters whose gradients are not whole

    def __attrs_post_init__(self) -> None:
        self.parameters = tuple([parameter for bucket in self.buckets for parameter in bucket.parameters])
        self._bucket_of = {id(parameter): bucket for bucket in self.buckets for parameter in bucket.parameters}
        self._left = dict(self._bucket_of)

    def begin(self) -> None:
        """Forget the step before."""
        self._left = dict(self._bucket_of)
        for bucket in self.buckets:
            bucket.begin()

    @classmethod
    def of(
        cls,
        modules: Modules,
        collections: Any,
        *,
        loss_lanes: int | None = None,
        job_group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> GradientReduction:
        """The reduction that `reduce_gradients` with these arguments is."""
        loss_lanes = checked(loss_lanes, Count | None, "loss_lanes", GradientError)
        bucket_bytes = checked(bucket_bytes, Count, "bucket_bytes", GradientError)
        layout = GradientLayout.of(modules, collections)
        layout.require_groups()
        trained = list(layout.trained)
        for each in trained:
            _require_reducible(each)
        # Backwards come to the last module, and its last layer, first.
        buckets = list(map(Bucket, bucketed(reversed(trained), bucket_bytes)))
        # A tied parameter waits for its REDUCE; nothing else waits behind it.
        buckets.sort(key=lambda bucket: bucket.tie is not None)
        return cls(layout, tuple(buckets), loss_lanes, job_group)

    @property
    def communicates(self) -> bool:
        """Whether there is anything to start early."""
        return any(bucket.replicas is not None or bucket.tensor is not None for bucket in self.buckets)

    def summed_over(self, group: dist.ProcessGroup) -> tuple[int, int]:
        """The number of elements that are summed over ``group``, and a checksum of which they are, bucket by bucket."""
        places = {id(each): place for place, each in enumerate(self.layout.gradients)}
        summed = [bucket.layouts for bucket in self.buckets if bucket.replicas is group]
        forms = [[(places[id(each)], each.parameter.shape, each.dtype) for each in bucket] for bucket in summed]
        return sum(each.parameter.numel() for bucket in summed for each in bucket), zlib.crc32(repr(forms).encode())

    def form_of(self, module: str) -> tuple[object, ...]:
        """Shapes and dtypes of the sums over the replicas of ``module``, bucket by bucket. For this rank alone."""
        own = [bucket.layouts for bucket in self.buckets if bucket.replicas and bucket.layouts[0].module == module]
        return tuple([tuple([(each.parameter.shape, each.dtype) for each in bucket]) for bucket in own])

    def ready(self, parameters: Collection[torch.nn.Parameter]) -> None:
        """The gradients of ``parameters`` are whole; start the buckets of which that holds for all.

        Buckets of one group start in one order on all of its ranks. Those of other groups do not wait for each other:
        each starts inside the last backward of its own stage, which all ranks of its group come to together in a
        verified plan. So where a GPU plays kernels one by one, no all-reduce holds up a message that another rank needs
        to come to it.
        """
        filled = False
        for parameter in parameters:
            if (bucket := self._left.pop(id(parameter), None)) is not None:
                bucket.missing -= 1
                filled = filled or not bucket.missing
        if filled:
            self._start_filled()

    @torch.no_grad()
    def _start_filled(self) -> None:
        behind: set[int] = set()  # groups with a bucket that is not whole
        for bucket in self.buckets:
            if bucket.started or id(bucket.first) in behind:
                continue
            if not bucket.missing and bucket.tie is None and bucket.fault() is None:
                bucket.start()
            elif bucket.first is not None:
                behind.add(id(bucket.first))

    @torch.no_grad()
    def finish(
        self,
        num_tokens: torch.Tensor | float | None,
        waiting: Waiting,
        counted: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """Start the remaining buckets, wait for all, divide, and store the gradients.

        ``num_tokens``: of this rank; or ``counted`` waits for those of the job, float64 on the gradients' device.
        The host reads the device at most once: where a parameter of this rank had no gradient.
        """
        remaining = [bucket for bucket in self.buckets if not bucket.started]
        for bucket in remaining:  # nothing is sent where one of them cannot be summed
            if (fault := bucket.fault()) is not None:
                raise GradientError(fault)
        for bucket in remaining:
            bucket.start()
        divisor: Divisor | None = self.loss_lanes
        total = None if counted is None else counted()
        if num_tokens is not None:
            device = self.layout.device or device_of(self.layout.modules, self.job_group)
            total = global_tokens(num_tokens, device, self.job_group, waiting)
        if total is not None:
            divisor = torch.where(total > 0, total, torch.ones_like(total))
        for bucket in self.buckets:
            bucket.proceed(waiting)
        unknown: list[Bucket] = []
        for bucket in self.buckets:
            if bucket.wait is not None:
                bucket.wait(waiting)
            if bucket.unknown is None:  # stored while later buckets are under way
                bucket.finish(divisor, (True,) * len(bucket.parameters))
            else:
                unknown.append(bucket)
        for bucket, used in zip(unknown, used_in(unknown) if unknown else (), strict=True):
            bucket.finish(divisor, used)


def global_tokens(
    num_tokens: torch.Tensor | float, device: torch.device, job_group: dist.ProcessGroup | None, waiting: Waiting
) -> torch.Tensor:
    """The tokens of the job; stays on the device, so that the host does not wait for it.

    In float64 on every rank, whatever was counted here: a rank without a loss cannot know whether others count whole
    tokens or weigh them, and up to 2**53 a count is exact in it.
    """
    if isinstance(num_tokens, torch.Tensor) and num_tokens.numel() == 1:
        # Not blocking to a device with streams: memory of the host is read before the call returns.
        total = num_tokens.detach().to(device, torch.float64, non_blocking=has_streams(device), copy=True).reshape(())
    else:
        count = checked(num_tokens, Amount, "num_tokens", GradientError)
        total = torch.full((), count, dtype=torch.float64, device=device)
    reduce_few(total, job_group)(waiting)
    return total


def _require_reducible(layout: ParameterGradient) -> None:
    """Raise for a gradient that no reduction makes right."""
    mesh, replicas, tensor = layout.mesh, layout.replicas, layout.tensor
    shared = max(len(mesh & ranks_of(replicas)), 1)
    if layout.by_fsdp and (shared, len(mesh)) != (size_of(replicas), shared * max(len(mesh & ranks_of(tensor)), 1)):
        raise GradientError(
            f"{layout} is sharded by fully_shard over a mesh of {len(mesh)} ranks, of which {shared} are of its "
            f"{size_of(replicas)} replicas; the mesh must have all of these, and beside them tp at most"
        )
    if not layout.by_fsdp and shared > 1:
        raise GradientError(
            f"{layout} is a DTensor over {shared} replicas, and not by fully_shard: what is summed over them already "
            "is not known; set finalize_model_grads_func"
        )
    if not layout.marks.partial:
        return
    marked = f"{layout} is marked as partial over tp (sequence_parallel, partial_over_tp)"
    if tensor is None:
        raise GradientError(f"{marked}, and its collection has no tp group to sum it over")
    if layout.marks.sharded or layout.marks.tie is not None:
        other = "tensor_model_parallel" if layout.marks.tie is None else "tied"
        raise GradientError(
            f"{marked}, and as {other}; the sum over tp is of a parameter that every tp rank holds whole"
        )
