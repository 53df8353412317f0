"""Reduction of gradients over data lanes, bucket by bucket, each started as soon as its last gradient is there.

Every module of the job has its own data lanes, and each lane's gradient is the part of the loss that flowed
through it. So the gradient of a module is the **sum** over its own lanes, whatever their number; what it is
divided by belongs to the loss: the loss side's number of lanes for a mean loss (each lane has averaged over its
own share), the global number of tokens for a token-weighted one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field

from pipegrid.schedules.gradients import foreach
from pipegrid.schedules.gradients.dtensors import (
    fsdp_divisors,
    local_of,
    may_be_partial,
    mesh_ranks,
    partial_groups,
    summed_like,
    unlike_its_parameter,
)
from pipegrid.schedules.gradients.lanes import (
    GradientError,
    Waiting,
    all_reduce,
    collections_by_name,
    device_of,
    groups_of,
    is_expert,
    lanes_group,
    ranks_of,
    size_of,
)
from pipegrid.schedules.gradients.main_grad import (
    Modules,
    accumulated,
    accumulation_dtype,
    modules_of,
    named_modules,
    parameters_of,
    replace_accumulated,
    set_accumulated,
)
from pipegrid.schedules.gradients.tied import mark_of
from pipegrid.topology.fields import Amount, Count, checked
from pipegrid.transport.streams import has_streams

BUCKET_BYTES = 32 * 2**20
_AS_IT_IS_BYTES = 2**20  # from here on, a gradient alone in its bucket is not copied

Divisor = torch.Tensor | float


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
            "loss_lanes is not given, and the job has several modules: a mean loss divides by the data lanes of the "
            "module with the loss, which no other module knows. Pass loss_lanes=dp x cp of that module, or num_tokens"
        )
    reduction.finish(num_tokens, Waiting(deadline))


@define(eq=False)
class _Bucket:
    """Parameters whose gradients travel in one buffer, with one flag each that counts the lanes that had a gradient.

    A large gradient that is alone travels as it is, in place, and its flag beside it: a copy there and back would be
    computing that nothing overlaps.

    Attributes:
        module: name of the module, for errors.
        parameters: of one dtype and device.
        lanes: group of data lanes to sum over; None where there is one lane, or a ``REDUCE`` has summed over them.
        tensor: group of tensor-parallel ranks to sum over first.
        own_lanes: data lanes of the module.
        divided: what ``fully_shard`` has divided the gradients by; 1 where it has not.
    """

    module: str
    parameters: tuple[torch.nn.Parameter, ...]
    lanes: dist.ProcessGroup | None
    tensor: dist.ProcessGroup | None
    own_lanes: int
    divided: float = 1.0
    gradients: list[torch.Tensor | None] = field(factory=list)
    values: torch.Tensor | None = None  # the gradients, flat; None where nothing is summed
    flags: torch.Tensor | None = None
    started: bool = False
    wait: Callable[[Waiting], None] | None = None
    _sums: list[torch.Tensor] = field(factory=list, init=False)  # what is summed: ``values`` and ``flags``

    @property
    def first(self) -> dist.ProcessGroup | None:
        """The group of the first all-reduce."""
        return self.lanes if self.tensor is None else self.tensor

    @property
    def perhaps_partial(self) -> bool:
        """Whether gradients may be partial sums over a mesh; the same on every lane, even without a gradient."""
        return may_be_partial(self.parameters[0])

    def fault(self) -> str | None:
        """What is wrong with a gradient; None: nothing."""
        for parameter, gradient in zip(self.parameters, map(accumulated, self.parameters), strict=True):
            if gradient is None:
                continue
            which = f"a parameter of shape {tuple(parameter.shape)} in module {self.module!r}"
            if gradient.is_sparse:
                return f"{which} has a sparse gradient; use dense gradients (Embedding(sparse=False))"
            unlike = unlike_its_parameter(parameter, gradient)
            if unlike is not None:
                return f"{which} has a DTensor gradient that no sum makes its shard: {unlike}"
        return None

    def start(self) -> None:
        """Start the first all-reduce; one of partial sums only begins in `proceed`."""
        self.started = True
        if not self.perhaps_partial:
            self._start_sum()

    @torch.no_grad()
    def _start_sum(self) -> None:
        """Copy the gradients into the buffer and start its first all-reduce."""
        self.gradients = [
            None if gradient is None else local_of(gradient) for gradient in map(accumulated, self.parameters)
        ]
        first = self.first
        if first is None:
            return
        like = torch.empty(0, dtype=accumulation_dtype(self.parameters[0]), device=self.parameters[0].device)
        sizes = [local_of(parameter).numel() for parameter in self.parameters]
        flat = [
            like.new_zeros(size) if gradient is None else gradient.reshape(-1)
            for gradient, size in zip(self.gradients, sizes, strict=True)
        ]
        ones, zeros = like.new_ones(1), like.new_zeros(1)
        flags = [zeros if gradient is None else ones for gradient in self.gradients]
        if len(sizes) == 1 and sizes[0] * like.itemsize >= _AS_IT_IS_BYTES:
            self.values, self.flags = flat[0].to(like.dtype), flags[0]
            self._sums = [self.values, self.flags]
        else:
            together = torch.cat([*flat, *flags])
            self.values, self.flags = together[: -len(sizes)], together[-len(sizes) :]
            self._sums = [together]
        self._sum_over(first)

    def _sum_over(self, group: dist.ProcessGroup) -> None:
        waits = [all_reduce(tensor, group) for tensor in self._sums]

        def wait(waiting: Waiting) -> None:
            for each in waits:
                each(waiting)

        self.wait = wait

    def proceed(self, waiting: Waiting) -> None:
        """Sum what is partial over its mesh; where the first sum was over tp, start the one over data lanes."""
        if self.perhaps_partial:
            self._sum_partial(waiting)
            self._start_sum()
        if self.tensor is not None and self.lanes is not None and self.wait is not None:
            self.wait(waiting)
            self._sum_over(self.lanes)

    @torch.no_grad()
    def _sum_partial(self, waiting: Waiting) -> None:
        """Group by group, in one buffer each, and give the sums the placements of their parameters."""
        found = [
            (parameter, gradient, partial_groups(gradient), local_of(gradient))
            for parameter, gradient in zip(self.parameters, map(accumulated, self.parameters), strict=True)
            if gradient is not None
        ]
        groups = dict.fromkeys(group for _, _, partial, _ in found for group in partial)
        for group in groups:
            parts = [part for _, _, partial, part in found if group in partial]
            flat = torch.cat([part.reshape(-1) for part in parts])
            all_reduce(flat, group)(waiting)
            sums = torch.split(flat, [part.numel() for part in parts])
            foreach.copy_(parts, [total.view_as(part) for total, part in zip(sums, parts, strict=True)])
        for parameter, gradient, partial, part in found:
            if partial:
                replace_accumulated(parameter, summed_like(parameter, gradient, part))

    @property
    def unknown(self) -> torch.Tensor | None:
        """The flags, where this rank lacks a gradient; None where it has them all, or nothing is summed."""
        return self.flags if None in self.gradients else None

    @torch.no_grad()
    def finish(self, divisor: Divisor | None, used: Sequence[bool]) -> None:
        """Divide, and put the results where the gradients were.

        Args:
            divisor: of all gradients; None is the module's own number of data lanes.
            used: which parameters have a gradient on any rank.
        """
        mark = mark_of(self.parameters[0])
        if mark is not None:
            mark.summed = False
        if divisor is None:
            divisor = self.own_lanes
        if self.divided != 1:
            divisor = divisor / self.divided
        if self.values is None:
            foreach.divide_([gradient for gradient in self.gradients if gradient is not None], divisor)
        else:
            self._divide_and_copy(self.values, divisor, used)
        self.values = self.flags = None
        self.gradients, self._sums = [], []

    def _divide_and_copy(self, values: torch.Tensor, divisor: Divisor, used: Sequence[bool]) -> None:
        foreach.divide_([values], divisor)
        sizes = [local_of(parameter).numel() for parameter in self.parameters]
        parts = list(zip(self.parameters, self.gradients, torch.split(values, sizes), strict=True))
        here = [
            (gradient, part.view_as(gradient))
            for _, gradient, part in parts
            if gradient is not None and gradient.data_ptr() != part.data_ptr()
        ]
        foreach.copy_([gradient for gradient, _ in here], [part for _, part in here])
        for (parameter, gradient, part), anywhere in zip(parts, used, strict=True):
            if gradient is None and anywhere:
                set_accumulated(parameter, part.view_as(local_of(parameter)))


@define(eq=False)
class GradientReduction:
    """The reduction of one step's gradients on this rank: buckets in the order in which ranks of a group start them."""

    modules: Modules
    buckets: tuple[_Bucket, ...]
    loss_lanes: int | None
    job_group: dist.ProcessGroup | None
    _bucket_of: dict[int, _Bucket] = field(init=False)
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
        buckets: list[_Bucket] = []
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
            for part in _alike(reversed(parameters), bucket_bytes, divided):
                mark = mark_of(part[0])
                lanes, tensor = groups_of(part[0], collections, name)
                by_fsdp = id(part[0]) in divided
                over_lanes = size_of(lanes) > 1 and not by_fsdp and not (mark is not None and mark.over_lanes)
                over_tensor = partial_over_tp(part[0]) and size_of(tensor) > 1
                buckets.append(
                    _Bucket(
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
            _require_finished(bucket)
        tokens = None
        if num_tokens is not None:
            tokens = global_tokens(num_tokens, device_of(self.modules, self.job_group), self.job_group, waiting)
        for bucket in remaining:
            bucket.start()
        for bucket in self.buckets:
            bucket.proceed(waiting)
        divisor = tokens if tokens is not None else self.loss_lanes
        unknown: list[_Bucket] = []
        for bucket in self.buckets:
            if bucket.wait is not None:
                bucket.wait(waiting)
            if bucket.unknown is None:  # stored while later buckets are under way
                bucket.finish(divisor, (True,) * len(bucket.parameters))
            else:
                unknown.append(bucket)
        for bucket, used in zip(unknown, _used(unknown), strict=True):
            bucket.finish(divisor, used)


def partial_over_tp(parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter is whole on every tp rank while its gradient is a part: by Megatron's mark, or ours."""
    return bool(getattr(parameter, "sequence_parallel", False) or getattr(parameter, "partial_over_tp", False))


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


def _used(buckets: Sequence[_Bucket]) -> list[list[bool]]:
    """Per bucket with flags which parameters have a gradient on any rank; one read of the device for all buckets."""
    flags = [bucket.unknown.double() for bucket in buckets if bucket.unknown is not None]
    counts = iter(torch.cat(flags).tolist() if flags else ())
    return [[next(counts) > 0 for _ in bucket.parameters] for bucket in buckets]


def _alike(
    parameters: Iterator[torch.nn.Parameter], bucket_bytes: int, divided: Mapping[int, float | None]
) -> Iterator[tuple[torch.nn.Parameter, ...]]:
    """Parameters in order, cut where their kind changes or the bucket is full.

    A tied parameter is a bucket of its own: in which order an all-reduce sums depends on the place in the buffer, and
    the copies, which lie in different modules, must get the same bits.
    """
    bucket: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        nbytes = parameter.numel() * accumulation_dtype(parameter).itemsize
        if bucket and (_kind(bucket[0], divided) != _kind(parameter, divided) or size + nbytes > bucket_bytes):
            yield tuple(bucket)
            bucket, size = [], 0
        bucket.append(parameter)
        size += nbytes
    if bucket:
        yield tuple(bucket)


def _kind(parameter: torch.nn.Parameter, divided: Mapping[int, float | None]) -> tuple[object, ...]:
    """What the parameters of one bucket have in common."""
    alone = None if mark_of(parameter) is None else id(parameter)
    by_fsdp = id(parameter) in divided, divided.get(id(parameter))
    partial = partial_over_tp(parameter), may_be_partial(parameter)
    return accumulation_dtype(parameter), parameter.device, is_expert(parameter), *partial, *by_fsdp, alone


def _require_reducible(
    parameter: torch.nn.Parameter,
    name: str,
    lanes: dist.ProcessGroup | None,
    tensor: dist.ProcessGroup | None,
    *,
    by_fsdp: bool,
) -> None:
    which = f"a parameter of shape {tuple(parameter.shape)} in module {name!r}"
    mesh = mesh_ranks(parameter)
    shared = max(len(mesh & ranks_of(lanes)), 1)
    if by_fsdp and (shared, len(mesh)) != (size_of(lanes), shared * max(len(mesh & ranks_of(tensor)), 1)):
        raise GradientError(
            f"{which} is sharded by fully_shard over a mesh of {len(mesh)} ranks, of which {shared} are of its "
            f"{size_of(lanes)} data lanes: its mesh must have all data lanes (dp x cp), and beside them tp at most"
        )
    if not by_fsdp and shared > 1:
        raise GradientError(
            f"{which} is a DTensor over {shared} data lanes, and not by fully_shard: what is summed over them already, "
            "and what it was divided by, is not known; set finalize_model_grads_func"
        )
    if not partial_over_tp(parameter):
        return
    if tensor is None:
        raise GradientError(
            f"{which} is marked as partial over tp (sequence_parallel, partial_over_tp), and its collection has no tp "
            'group to sum it over: make it, grid.create_pg("tp"), or unset the mark where tp is 1'
        )
    if getattr(parameter, "tensor_model_parallel", False) or mark_of(parameter) is not None:
        raise GradientError(
            f"{which} is marked as partial over tp, and as {'tied' if mark_of(parameter) else 'tensor_model_parallel'} "
            "as well: only a parameter that every tp rank holds whole, and no other stage, is summed over tp"
        )


def _require_finished(bucket: _Bucket) -> None:
    fault = bucket.fault()
    if fault is not None:
        raise GradientError(fault)
    mark = mark_of(bucket.parameters[0])
    if mark is not None and not mark.summed:
        raise GradientError(
            f"tied parameter {mark.name!r} in module {bucket.module!r} was not summed over its copies since its "
            "gradient was last finished: the plan needs its REDUCE (PipelineConfig.tied_parameters, or with_reduce and "
            "reducers=)"
        )
