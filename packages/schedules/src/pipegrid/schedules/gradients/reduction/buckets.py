"""A bucket: parameters whose gradients are summed in one buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from attrs import define, field

from pipegrid.schedules.gradients import foreach
from pipegrid.schedules.gradients.all_reduce import Waiting, all_reduce
from pipegrid.schedules.gradients.dtensors import (
    local_of,
    may_be_partial,
    partial_groups,
    summed_like,
    unlike_its_parameter,
)
from pipegrid.schedules.gradients.lanes import described, is_expert
from pipegrid.schedules.gradients.main_grad import (
    accumulated,
    accumulation_dtype,
    replace_accumulated,
    set_accumulated,
)
from pipegrid.schedules.gradients.reduction.tied import mark_of

_AS_IT_IS_BYTES = 2**20  # from here on, a gradient alone in its bucket is not copied

Divisor = torch.Tensor | float


@define(eq=False)
class Bucket:
    """Parameters whose gradients travel in one buffer, with one flag each that counts the lanes that had a gradient.

    A large gradient that is alone is summed in place, and its flag beside it: nothing would overlap copies of it.

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
        mark = mark_of(self.parameters[0])
        if mark is not None and not mark.summed:
            return (
                f"tied parameter {mark.name!r} in module {self.module!r} was not summed over its copies: the plan "
                "needs its REDUCE (PipelineConfig.tied_parameters, or with_reduce and reducers=)"
            )
        for parameter, gradient in zip(self.parameters, map(accumulated, self.parameters), strict=True):
            if gradient is None:
                continue
            if gradient.is_sparse:
                return f"{described(parameter, self.module)} has a sparse gradient; use Embedding(sparse=False)"
            unlike = unlike_its_parameter(parameter, gradient)
            if unlike is not None:
                return (
                    f"{described(parameter, self.module)} has a DTensor gradient that no sum makes its shard: {unlike}"
                )
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
        """Divide by ``divisor`` (None: the module's data lanes), and put the results where the gradients were.

        ``used``: which parameters have a gradient on any rank.
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


def partial_over_tp(parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter is whole on every tp rank while its gradient is a part: by Megatron's mark, or ours."""
    return bool(getattr(parameter, "sequence_parallel", False) or getattr(parameter, "partial_over_tp", False))


def used_in(buckets: Sequence[Bucket]) -> list[list[bool]]:
    """Per bucket with flags which parameters have a gradient on any rank; one read of the device for all buckets."""
    flags = [bucket.unknown.double() for bucket in buckets if bucket.unknown is not None]
    counts = iter(torch.cat(flags).tolist() if flags else ())
    return [[next(counts) > 0 for _ in bucket.parameters] for bucket in buckets]


def bucketed(
    parameters: Iterator[torch.nn.Parameter], bucket_bytes: int, divided: Mapping[int, float | None]
) -> Iterator[tuple[torch.nn.Parameter, ...]]:
    """Parameters in order, cut where their kind changes or the bucket is full; a tied one is a bucket of its own.

    The order in which an all-reduce sums depends on the place in the buffer, and all copies must get the same bits.
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
