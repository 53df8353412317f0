"""Gathers, of flat tensors and of texts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.distributed as dist

from pipegrid.transport.collectives.starting import start


def gather_flat(out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Start to gather every rank's flat ``own``, one after another, into the flat ``out``."""
    # torch 2.13 renames all_gather_into_tensor and warns about the old name; 2.11 has the old one only.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return start(gather, out, own, group=group)


def gather_text(
    text: str, group: dist.ProcessGroup, device: torch.device, wait: Callable[[dist.Work | None, torch.Tensor], object]
) -> dict[int, str]:
    """The text of each rank of ``group``, by rank of the world, in the order of the group; all of its ranks call this.

    Of any length, and no rank unpickles: `torch.distributed.all_gather_object` does, and needs numpy. Tensors are
    gathered on ``device``; ``wait`` holds the host until a collective with this result is done, or raises.
    """

    def gathered(own: torch.Tensor) -> torch.Tensor:
        every = own.new_empty(group.size() * own.numel())
        wait(gather_flat(every, own, group), every)
        return every.cpu()

    data = text.encode()
    sizes: list[int] = gathered(torch.tensor([len(data)], device=device)).tolist()
    width = max(*sizes, 1)
    own = torch.frombuffer(bytearray(data.ljust(width)), dtype=torch.uint8).to(device)
    rows = gathered(own)
    every = ctypes.string_at(rows.data_ptr(), rows.numel())
    said = (every[place * width :][:size].decode() for place, size in enumerate(sizes))
    return dict(zip(dist.get_process_group_ranks(group), said, strict=True))
