"""Which rank this process is and how many there are: an argument, the default group, or the launcher. No torch.

Torch is asked only where somebody has imported it already; where nobody has, no default group can exist.
"""

from __future__ import annotations

import os
import sys

from pipegrid.topology._checks import as_integer
from pipegrid.topology.errors import WorldSizeUnknownError


def _from_default_group(question: str) -> int | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    answer: int = getattr(distributed, question)()
    return answer


def _from_launcher(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise WorldSizeUnknownError(
            f"the environment variable {variable} is {text!r}, which is no integer; "
            f"correct it, or pass the number as an argument"
        ) from None


def resolve_world_size(world_size: int | None = None) -> int:
    """The argument, else the size of the default process group, else the launcher's WORLD_SIZE."""
    if world_size is not None:
        return as_integer(world_size, "world_size", least=1)
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
        return as_integer(rank, "rank", least=0)
    for found in (_from_default_group("get_rank"), _from_launcher("RANK")):
        if found is not None:
            return found
    raise WorldSizeUnknownError(
        "the current rank is unknown: pass rank, or initialise the default process group, "
        "or set the environment variable RANK"
    )
