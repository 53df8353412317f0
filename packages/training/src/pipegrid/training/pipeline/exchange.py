"""An exchange between ranks for a comparison with one process: plain data, and tensors in it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from pipegrid.checkpoint.gathering import gather_plain
from pipegrid.gradients.all_reduce import all_reduce
from pipegrid.monitor.collectives import Waiting
from pipegrid.schedules import PipelineConfig
from pipegrid.stages.errors import CutError, few

_SHOWN = 6


def as_plain(value: Any, tensors: list[Tensor]) -> Any:
    """JSON data for a nested ``value``, whose tensors and arrays are appended to ``tensors``; `TypeError`: others."""
    if isinstance(value, (Tensor, np.ndarray)):
        tensors.append(torch.as_tensor(value).detach())
        return {"tensor" if isinstance(value, Tensor) else "array": tensors[-1].device.type}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {"dict": [[name, as_plain(each, tensors)] for name, each in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [as_plain(each, tensors) for each in value]}
    if type(value) in (str, int, float, bool, type(None)):
        return {"value": value}
    raise TypeError(type(value).__name__)


def of_plain(plain: Any, tensors: Iterator[Tensor]) -> Any:
    """The value that `as_plain` was called with; mappings are dicts, and what was on the host is there."""
    ((kind, held),) = plain.items()
    if kind in ("tensor", "array"):
        tensor = next(tensors)
        if kind == "array":
            return tensor.cpu().numpy()
        return tensor.cpu() if held == "cpu" else tensor
    if kind == "value":
        return held
    if kind == "dict":
        return {name: of_plain(each, tensors) for name, each in held}
    return {"list": list, "tuple": tuple}[kind]([of_plain(each, tensors) for each in held])


def first_with(told: Sequence[Iterable[str]]) -> dict[str, int]:
    """By name, the number of the first of the ranks that have told it."""
    return {name: number for number, names in reversed([*enumerate(told)]) for name in names}


def not_of_one_process(what: str, lines: Sequence[str]) -> CutError:
    """The error of a comparison, with the first of its lines."""
    shown = "".join(f"\n  {line}" for line in few(lines, _SHOWN))
    return CutError(f"{what}{shown}\nPipelineConfig(check=False) leaves the comparison out")


@frozen(eq=False)
class RankExchange:
    """The ranks of a job, between which ``what`` is compared, such as "the first step"."""

    what: str
    config: PipelineConfig
    device: torch.device  # of tensors

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self.config.job_group or dist.group.WORLD
        assert group is not None  # a job runs
        return group

    @property
    def _waiting(self) -> Waiting:
        return Waiting(self.config.deadline, self.config.monitor, f"the comparison of {self.what}")

    @property
    def rank(self) -> int:
        """This rank's number among those of the job."""
        return dist.get_rank(self._group)

    def say_not_compared(self, why: str) -> None:
        """One line, on the first rank."""
        if self.rank == 0:
            text = f"{self.what} is not compared with one process: {why}; check_stages compares the cut of a model"
            print(text, file=sys.stderr, flush=True)  # noqa: T201 -- no error and no mistake, and no logger is set up

    def may_compare(self, why_not: str | None) -> bool:
        """Whether no rank has a reason against it; the first that is given is said."""
        why = next((each for each in self.plain(why_not) if each), None)
        if why is not None:
            self.say_not_compared(why)
        return why is None

    def plain(self, value: Any, *, after_first: bool = False) -> list[Any]:
        """The plain ``value`` of every rank; ``after_first``: the first one computes before, for all of them."""
        waiting = self._waiting
        if after_first and waiting.deadline is not None:
            waiting = attrs.evolve(waiting, deadline=(dist.get_world_size(self._group) + 1) * waiting.deadline)
        return gather_plain(value, self._group, self.device, waiting=waiting)

    def nested(self, value: Any, *, after_first: bool = False) -> list[Any]:
        """As `plain`, of values with tensors in them (`as_plain`); each tensor arrives as a copy on all ranks."""
        own: list[Tensor] = []
        plain = as_plain(value, own)
        forms = [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in own]
        told = self.plain([plain, forms], after_first=after_first)
        table = [(getattr(torch, kind), shape) for _, each in told for kind, shape in each]
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in table]
        flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        first = sum(len(each) for _, each in told[: self.rank])
        for tensor, part in zip(own, torch.split(flat, sizes)[first:], strict=False):
            if tensor.numel():
                part.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        if sizes:
            all_reduce(flat, self._group)(self._waiting)
        parts = zip(torch.split(flat, sizes), table, strict=True)
        arrived = (part.clone().view(dtype).reshape(shape) for part, (dtype, shape) in parts)
        return [of_plain(each, arrived) for each, _ in told]
