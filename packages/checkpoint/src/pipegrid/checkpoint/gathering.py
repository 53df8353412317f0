"""Plain data between ranks, as JSON: what arrives from another process is parsed and never unpickled."""

from __future__ import annotations

import json
from typing import Any

import cattrs
import torch
import torch.distributed as dist

from pipegrid.monitor.collectives import Waiting, texts_of_ranks

_CPU = torch.device("cpu")
_PLAIN_DATA = Waiting(what="an exchange of plain data")


def gather_plain(
    value: Any, group: dist.ProcessGroup | None, device: torch.device = _CPU, *, waiting: Waiting = _PLAIN_DATA
) -> list[Any]:
    """The values of all ranks of a group, on each: lists, dicts, texts and numbers. None: of this process alone.

    Tuples arrive as lists, attrs objects as dicts, also this rank's own. ``device``: of the tensors that the group's
    backend gathers. Raises CollectiveFailedError where a rank of the group has ended or has not joined in time, and
    with a monitor in ``waiting`` JobFailedError: another rank failed, or its deadline passed.
    """
    text = json.dumps(cattrs.unstructure(value))
    if group is None:
        return [json.loads(text)]
    return [json.loads(each) for each in texts_of_ranks(text, group, device, waiting).values()]


def wait_for_all(group: dist.ProcessGroup | None, device: torch.device = _CPU, *, waiting: Waiting) -> None:
    """Wait at a barrier of the group; raises as `gather_plain`."""
    gather_plain(None, group, device, waiting=waiting)
