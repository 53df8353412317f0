"""The steps of a reshard plan on tensors: reduce, pack, unpack, complete. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipegrid.reshard import Box, Completion, ShapeError
from pipegrid.transport.collectives.gathering import gather_flat
from pipegrid.transport.collectives.starting import start
from pipegrid.transport.waits.aborts import device_aborts


def pack(tensor: torch.Tensor, boxes: Sequence[Box], dtype: torch.dtype) -> torch.Tensor:
    """The boxes of ``tensor`` as one contiguous tensor of ``dtype``: one in its own shape, several flat, in order.

    A view of ``tensor`` where the boxes lie in one piece in memory and the dtype is right.
    """
    if len(boxes) == 1:
        (box,) = boxes
        packed = (tensor if box.shape == tensor.shape else tensor[box.slices]).contiguous()
    elif boxes:
        packed = torch.cat([tensor[box.slices].reshape(-1) for box in boxes])
    else:
        return tensor.new_empty(0, dtype=dtype)
    return packed if packed.dtype is dtype else packed.to(dtype)


def unpack(packed: torch.Tensor, boxes: Sequence[Box], out: torch.Tensor) -> None:
    """Copy the tensor that `pack` made into the boxes of ``out``, in its dtype."""
    if len(boxes) == 1:
        (box,) = boxes
        (out if box.shape == out.shape else out[box.slices]).copy_(packed.view(box.shape))
        return
    offset = 0
    for box in boxes:
        out[box.slices].copy_(packed[offset : offset + box.numel].view(box.shape))
        offset += box.numel


# Dtypes that backends add up; tensors of all others travel, as bytes.
_SUMMED = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex32, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip


def require_summed(dtype: torch.dtype, name: str) -> None:
    """Raise ShapeError for partial sums, on the edge ``name``, of a dtype that backends do not add up."""
    if dtype not in _SUMMED:
        raise ShapeError(f"{name}: partial sums of {dtype} are not added up by backends; send another dtype")


def start_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work | None]:
    """A new tensor for the sum of the partial sums of the group's ranks, and the collective that adds them up."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    return total, start(dist.all_reduce, total, group=group)


class Completing:
    """One completion under way on this rank: started at construction, written when its collective is done.

    Tensors travel as bytes: no backend knows every dtype. All ranks construct in the same order; nothing here blocks.

    Attributes:
        work: of the collective; None where it was done at once.
        buffer: the bytes of the others, until they are copied.
        memory: the tensors that the collective reads and writes.
    """

    def __init__(
        self, step: Completion, out: torch.Tensor, group: dist.ProcessGroup, *, rank: int, dtype: torch.dtype
    ) -> None:
        self._step, self._out, self._rank = step, out, rank
        self.group = group
        self._sizes = sizes = [sum(box.numel for box in boxes) for boxes in step.boxes]
        width = max(sizes)
        mine = step.ranks.index(rank)
        own = torch.empty(width, dtype=dtype, device=out.device)
        if sizes[mine]:
            own[: sizes[mine]].copy_(pack(out, step.boxes[mine], dtype).view(-1))
        self._broadcast = step.root is not None
        if step.root is not None:
            self.buffer = own
            self.memory: tuple[torch.Tensor, ...] = (own,)
            self.work = start(dist.broadcast, own.view(torch.uint8), src=step.root, group=group)
        else:
            self.buffer = torch.empty(len(step.ranks) * width, dtype=dtype, device=out.device)
            self.memory = (own, self.buffer)
            self.work = gather_flat(self.buffer.view(torch.uint8), own.view(torch.uint8), group)
        self._width = width

    def is_completed(self) -> bool:
        """Whether the collective is done."""
        return self.work is None or device_aborts.poll(self.work.is_completed)

    def write(self) -> None:
        """Write the others' boxes, once the collective is done. Once."""
        for index, (giver, boxes) in enumerate(zip(self._step.ranks, self._step.boxes, strict=True)):
            if giver != self._rank and boxes:
                start = 0 if self._broadcast else index * self._width
                unpack(self.buffer[start : start + self._sizes[index]], boxes, self._out)
