"""Plain data between ranks, as JSON: what arrives from another process is parsed and never unpickled."""

from __future__ import annotations

import json
from typing import Any

import cattrs
import torch
import torch.distributed as dist

from pipegrid.transport.collectives.gathering import gather_text


def gather_plain(
    value: Any,
    group: dist.ProcessGroup | None,
    device: torch.device = torch.device("cpu"),  # noqa: B008 -- a constant
) -> list[Any]:
    """The values of all ranks of a group, on each: lists, dicts, texts and numbers. None: of this process alone.

    Tuples arrive as lists, attrs objects as dicts, also this rank's own. ``device``: of the tensors that the group's
    backend gathers.
    """
    text = json.dumps(cattrs.unstructure(value))
    if group is None:
        return [json.loads(text)]
    said = gather_text(text, group, device, lambda work, _: None if work is None else work.wait())
    return [json.loads(each) for each in said.values()]
