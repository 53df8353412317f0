"""The rank of this process and the size of the world: an argument, the default process group, or the launcher.

No torch: a default process group can exist only where `torch.distributed` is imported already.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from pipegrid.core.fields import Count, Index, checked
from pipegrid.topology.errors import GridError, WorldError


def _from_default_group(question: str) -> int | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    answer: int = getattr(distributed, question)()
    return answer


def require_default_group() -> tuple[int, int]:
    """Rank and world size in the default process group; `WorldError` where there is none."""
    rank, size = _from_default_group("get_rank"), _from_default_group("get_world_size")
    if rank is None or size is None:
        raise WorldError("groups need the default one; call torch.distributed.init_process_group first")
    return rank, size


def resolve_world_size(world_size: int | None = None) -> int:
    """The argument, else the size of the default process group, else WORLD_SIZE of the launcher."""
    return _resolved("world_size", world_size, Count)


def resolve_rank(rank: int | None = None) -> int:
    """The argument, else this process's rank in the default process group, else the launcher's RANK."""
    return _resolved("rank", rank, Index)


def _resolved(what: str, given: Any, rule: Any) -> int:
    if given is None:
        given = _from_default_group(f"get_{what}")
    if given is None and what.upper() in os.environ:
        text = os.environ[what.upper()].strip()
        given = int(text) if text.isdecimal() else text
    if given is None:
        raise WorldError(f"{what} is unknown: pass it, or initialise the default process group, or set {what.upper()}")
    number: int = checked(given, rule, what, GridError)
    return number
