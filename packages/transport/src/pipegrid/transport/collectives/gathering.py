"""Gathers of flat tensors, by the name that torch has for them."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_flat(
    out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False
) -> dist.Work | None:
    """Every rank's flat ``own``, one after another, into the flat ``out``."""
    # torch 2.13 renames all_gather_into_tensor and warns about the old name; 2.11 has the old one only.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(out, own, group=group, async_op=async_op)
    return work
