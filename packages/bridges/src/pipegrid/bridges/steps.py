"""The steps of a reshard plan on tensors: reduce, pack, unpack, complete. Decides nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from pipegrid.bridges.reshard import Box, Completion, Message


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


def copy_locally(tensor: torch.Tensor, messages: Iterable[Message], out: torch.Tensor, dtype: torch.dtype) -> None:
    """What a rank of both sides gives to itself, rounded as the wire would."""
    for message in messages:
        out[message.destination_box.slices].copy_(tensor[message.source_box.slices].to(dtype))


def reduce_partial(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of the partial sums of the group's ranks, in a new tensor."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def broadcast_text(text: str, src: int, group: dist.ProcessGroup, device: torch.device) -> str:
    """The ``text`` of rank ``src``, on every rank of the group; other ranks' own is not looked at.

    `torch.distributed.broadcast_object_list` would do, but needs numpy, which torch itself does not require.
    """
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    dist.broadcast(size, src=src, group=group)
    if dist.get_rank() != src:
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=src, group=group)
    return bytes(data.tolist()).decode()


def gather_flat(
    out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Every rank's flat ``own``, one after another, into the flat ``out``."""
    # torch 2.13 renames all_gather_into_tensor and warns about the old name; 2.11 has the old one only.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(out, own, group=group, async_op=async_op)
    return work


class Completing:
    """One completion under way on this rank: started at construction, `finish` waits and copies.

    All ranks of the completion construct in the same order; nothing blocks before `finish`.

    Attributes:
        buffer: what comes from the others, until it is copied.
        memory: what the collective reads and writes.
    """

    def __init__(
        self, step: Completion, out: torch.Tensor, group: dist.ProcessGroup, *, rank: int, dtype: torch.dtype
    ) -> None:
        self._step, self._out, self._rank = step, out, rank
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
            self._work = dist.broadcast(own, src=step.root, group=group, async_op=True)
        else:
            self.buffer = torch.empty(len(step.ranks) * width, dtype=dtype, device=out.device)
            self.memory = (own, self.buffer)
            self._work = gather_flat(self.buffer, own, group, async_op=True)
        self._width = width

    def is_completed(self) -> bool:
        """Whether `finish` would not block."""
        return self._work is None or self._work.is_completed()

    def wait(self, seconds: float) -> bool:
        """Hold the host until `finish` would not block, at most so long; whether it would not. On gloo only."""
        if self._work is None:
            return True
        try:
            # A collective's wait that times out leaves it as it is, unlike that of a transfer between two ranks.
            self._work.wait(timedelta(seconds=max(seconds, 1e-3)))
        except RuntimeError:
            return bool(self._work.is_completed())
        return True

    def finish(self) -> None:
        """Wait for the collective and write the others' boxes. Once."""
        if self._work is not None:
            self._work.wait()
        for index, (giver, boxes) in enumerate(zip(self._step.ranks, self._step.boxes, strict=True)):
            if giver != self._rank and boxes:
                start = 0 if self._broadcast else index * self._width
                unpack(self.buffer[start : start + self._sizes[index]], boxes, self._out)


def start_completions(
    completions: Iterable[Completion],
    out: torch.Tensor,
    group_of: Callable[[Sequence[int]], dist.ProcessGroup],
    *,
    rank: int,
    dtype: torch.dtype,
) -> list[Completing]:
    """Start the completions of a plan in which this rank takes part."""
    return [Completing(step, out, group_of(step.ranks), rank=rank, dtype=dtype) for step in completions]


def abort_groups(groups: Iterable[dist.ProcessGroup], seconds: float = 2.0) -> None:
    """End the collectives under way in all ``groups`` at once; return after at most ``seconds``.

    An abort may wait for kernels of groups that are not aborted yet, so each has a thread. Waits over gloo are short
    ones, which look for themselves whether their communicator has ended.
    """
    threads = [
        threading.Thread(target=group.abort, name="pipegrid-abort", daemon=True)
        for group in groups
        if dist.get_backend(group) != "gloo"
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
