"""A bucket: parameters whose gradients are summed in one buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from attrs import define, field

from pipegrid.gradients import foreach
from pipegrid.gradients.all_reduce import all_reduce
from pipegrid.gradients.dtensors import local_of, partial_groups, summed_like, unlike_its_parameter
from pipegrid.gradients.layout import ParameterGradient, TieMark
from pipegrid.gradients.main_grad import accumulated, accumulation_dtype, replace_accumulated, set_accumulated
from pipegrid.monitor.collectives import Waiting

_AS_IT_IS_BYTES = 2**20  # from here on, a gradient alone in its bucket is not copied

Divisor = torch.Tensor | float


@define(eq=False)
class Bucket:
    """Parameters whose gradients travel in one buffer, with one flag each that counts the replicas that had a gradient.

    A large gradient that is alone is summed in place, and its flag beside it: nothing would overlap copies of it.
    Its methods are called without grad mode.
    """

    layouts: tuple[ParameterGradient, ...]  # of its parameters, which are alike (`ParameterGradient.bucket`)
    parameters: tuple[torch.nn.Parameter, ...] = field(init=False)  # of ``layouts``
    tensor: dist.ProcessGroup | None = field(init=False)  # group of tensor-parallel ranks to sum over first
    # Group of replicas to sum over; None where there is one, or a ``REDUCE`` has summed over them.
    replicas: dist.ProcessGroup | None = field(init=False)
    tie: TieMark | None = field(init=False)  # the mark of the one parameter, if it is tied
    # Gradients may be partial sums over a mesh; the same on every replica, even without a gradient.
    perhaps_partial: bool = field(init=False)
    gradients: list[torch.Tensor | None] = field(factory=list)
    values: torch.Tensor | None = None  # the gradients, flat; None where nothing is summed
    flags: torch.Tensor | None = None
    started: bool = field(init=False)
    missing: int = field(init=False)  # parameters whose gradients are not whole
    wait: Callable[[Waiting], None] | None = field(init=False)
    _summed_over: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = field(init=False)
    _sums: list[torch.Tensor] = field(factory=list, init=False)  # what is summed: ``values`` and ``flags``

    def __attrs_post_init__(self) -> None:
        self.parameters = tuple([each.parameter for each in self.layouts])
        self.tie, self.perhaps_partial = self.layouts[0].marks.tie, bool(self.layouts[0].alike)
        self._summed_over = self.layouts[0].summed_over
        self.begin()

    def begin(self) -> None:
        """Before a step."""
        self.tensor, self.replicas = self._summed_over
        self.started, self.missing, self.wait = False, len(self.parameters), None

    @property
    def first(self) -> dist.ProcessGroup | None:
        """The group of the first all-reduce."""
        return self.replicas if self.tensor is None else self.tensor

    def fault(self) -> str | None:
        """The fault of a gradient; None: there is none."""
        if self.tie is not None and not self.tie.summed:
            return (
                f"tied parameter {self.tie.name!r} in module {self.layouts[0].module!r} was not summed over its "
                "copies: the plan needs its REDUCE (PipelineConfig.tied_parameters, or with_reduce and reducers=)"
            )
        for each in self.layouts:
            if (gradient := accumulated(each.parameter)) is None:
                continue
            if gradient.is_sparse:
                return f"{each} has a sparse gradient; use Embedding(sparse=False)"
            plain = type(gradient) is torch.Tensor and not each.mesh
            unlike = None if plain else unlike_its_parameter(each.parameter, gradient)
            if unlike is not None:
                return f"{each} has a DTensor gradient that no sum makes its shard: {unlike}"
        return None

    def start(self) -> None:
        """Start the first all-reduce; one of partial sums only begins in `proceed`."""
        self.started = True
        if not self.perhaps_partial:
            self._start_sum()

    def _start_sum(self) -> None:
        """Copy the gradients into the buffer and start its first all-reduce."""
        self.gradients = [
            gradient if gradient is None or type(gradient) is torch.Tensor else local_of(gradient)
            for gradient in map(accumulated, self.parameters)
        ]
        if (first := self.first) is None:
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
        """Sum what is partial over its mesh; where the first sum was over tp, start the one over replicas."""
        if self.perhaps_partial:
            self._sum_partial(waiting)
            self._start_sum()
        if self.tensor is not None and self.replicas is not None and self.wait is not None:
            self.wait(waiting)
            self._sum_over(self.replicas)

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
        known = self.flags is None or all(each is not None for each in self.gradients)  # `in` compares tensors
        return None if known else self.flags

    def finish(self, divisor: Divisor | None, used: Sequence[bool]) -> None:
        """Divide by ``divisor`` (None: the module's replicas), and store; ``used``: has a gradient on any rank."""
        if self.tie is not None:
            self.tie.summed = False
        divisor = self.layouts[0].module_replicas if divisor is None else divisor
        if self.layouts[0].divided != 1:
            divisor = divisor / self.layouts[0].divided
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


def used_in(buckets: Sequence[Bucket]) -> list[list[bool]]:
    """Per bucket with flags which parameters have a gradient on any rank; one read of the device for all buckets."""
    flags = [bucket.unknown.double() for bucket in buckets if bucket.unknown is not None]
    counts = iter(torch.cat(flags).tolist() if flags else ())
    return [[next(counts) > 0 for _ in bucket.parameters] for bucket in buckets]


def bucketed(layouts: Iterable[ParameterGradient], bucket_bytes: int) -> Iterator[tuple[ParameterGradient, ...]]:
    """Gradients in order, cut where the module or their kind changes or the bucket is full.

    A tied parameter is alone: the order of an all-reduce's sum depends on the place, and all copies must get equal
    bits.
    """
    for _, alike in groupby(layouts, lambda each: (each.module, each.bucket)):
        bucket: list[ParameterGradient] = []
        size = 0
        for each in alike:
            nbytes = each.parameter.numel() * each.dtype.itemsize
            if bucket and size + nbytes > bucket_bytes:
                yield tuple(bucket)
                bucket, size = [], 0
            bucket.append(each)
            size += nbytes
        yield tuple(bucket)
