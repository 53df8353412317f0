"""The largest and the smallest of values over ranks: equal where all ranks have the same."""

from __future__ import annotations

from collections.abc import Callable

import torch


def extremes(values: torch.Tensor, reduce_max: Callable[[torch.Tensor], object]) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest and the smallest of each element over the ranks, in one all-reduce of twice as many.

    ``values``: of this rank, signed. ``reduce_max`` takes the maximum over the ranks of a tensor, in place, and returns
    when it is there.
    """
    both = torch.stack((values, _reversed(values)))
    reduce_max(both)
    return both[0], _reversed(both[1])


def _reversed(values: torch.Tensor) -> torch.Tensor:
    """In reversed order. ~x reverses integers, as -x does but for the least one."""
    return -values if values.is_floating_point() else ~values
