"""Plain data between ranks, as JSON: what arrives from another process is parsed and never unpickled."""

from __future__ import annotations

import json
from typing import Any

import cattrs
import torch
import torch.distributed as dist


def gather_plain(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks of a group on the host, on each; lists, dicts, texts and numbers.

    Tuples arrive as lists, attrs objects as dicts, also this rank's own.
    """
    data = torch.frombuffer(bytearray(json.dumps(cattrs.unstructure(value)).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
    own = torch.zeros(max(int(size.item()) for size in sizes), dtype=torch.uint8)
    own[: data.numel()] = data
    parts = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(parts, own, group=group)
    return [json.loads(part.numpy().tobytes()[: int(size.item())]) for part, size in zip(parts, sizes, strict=True)]
