"""The rank of this process and the size of the world: an argument, the default process group, or the launcher.

No torch: a default process group can exist only where `torch.distributed` is imported already.
"""

from __future__ import annotations

import os
import sys

from pipegrid.topology.errors import GridShapeError, WorldSizeUnknownError
from pipegrid.topology.fields import Count, Index, checked


def _from_default_group(question: str) -> int | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    answer: int = getattr(distributed, question)()
    return answer


def require_default_group() -> tuple[int, int]:
    """Rank and world size in the default process group.

    Raises:
        WorldSizeUnknownError: there is no default process group.
    """
    rank, size = _from_default_group("get_rank"), _from_default_group("get_world_size")
    if rank is None or size is None:
        raise WorldSizeUnknownError(
            "process groups need the default process group; call torch.distributed.init_process_group first"
        )
    return rank, size


def _from_launcher(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise WorldSizeUnknownError(
            f"the environment variable {variable} is {text!r}, not an integer; "
            f"correct it, or pass the number as an argument"
        ) from None


def resolve_world_size(world_size: int | None = None) -> int:
    """The argument, else the size of the default process group, else WORLD_SIZE of the launcher."""
    if world_size is not None:
        size: int = checked(world_size, Count, "world_size", GridShapeError)
        return size
    for found in (_from_default_group("get_world_size"), _from_launcher("WORLD_SIZE")):
        if found is not None:
            return found
    raise WorldSizeUnknownError(
        "the world size is unknown: pass world_size, or initialise the default process group, "
        "or set the environment variable WORLD_SIZE"
    )


def resolve_rank(rank: int | None = None) -> int:
    """The argument, else this process's rank in the default process group, else the launcher's RANK."""
    if rank is not None:
        index: int = checked(rank, Index, "rank", GridShapeError)
        return index
    for found in (_from_default_group("get_rank"), _from_launcher("RANK")):
        if found is not None:
            return found
    raise WorldSizeUnknownError(
        "the current rank is unknown: pass rank, or initialise the default process group, "
        "or set the environment variable RANK"
    )
