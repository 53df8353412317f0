"""An exchange between ranks for a comparison with one process: plain data, and tensors that one rank has."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from pipegrid.checkpoint.gathering import gather_plain
from pipegrid.gradients.all_reduce import all_reduce
from pipegrid.monitor.collectives import Waiting
from pipegrid.schedules import PipelineConfig

Description = tuple[str, list[int]]
"""Dtype and shape, as plain data; an empty dtype: no tensor."""


def described(tensor: Tensor | None) -> Description:
    """The dtype and the shape of a tensor, by which `RankExchange.tensors` makes room for it."""
    return ("", [0]) if tensor is None else (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


@frozen(eq=False)
class RankExchange:
    """The ranks of a job.

    Attributes:
        what: is compared, such as "the first step".
        config: of the job.
        device: of tensors.
    """

    what: str
    config: PipelineConfig
    device: torch.device

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

    def plain(self, value: Any, *, after_first: bool = False) -> list[Any]:
        """The plain ``value`` of every rank; ``after_first``: the first one computes before, for all of them."""
        waiting = self._waiting
        if after_first and waiting.deadline is not None:
            waiting = attrs.evolve(waiting, deadline=(dist.get_world_size(self._group) + 1) * waiting.deadline)
        return gather_plain(value, self._group, self.device, waiting=waiting)

    def tensors(self, table: Sequence[Description], here: Sequence[Tensor | None]) -> list[Any]:
        """The tensors of ``table``, which all ranks know, and of which one rank each has the values; else None.

        Args:
            table: dtypes and shapes.
            here: as many tensors; None for those of other ranks, and for what is no tensor.
        """
        sizes = [math.prod(shape) * getattr(torch, kind).itemsize if kind else 0 for kind, shape in table]
        flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        for tensor, part in zip(here, torch.split(flat, sizes), strict=True):
            if tensor is not None and tensor.numel():
                part.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        all_reduce(flat, self._group)(self._waiting)
        return [
            part.clone().view(getattr(torch, kind)).reshape(shape) if kind else None
            for part, (kind, shape) in zip(torch.split(flat, sizes), table, strict=True)
        ]
