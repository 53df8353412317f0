"""Running statistics of a stage, such as a batch norm's, where it computes microbatches of other replicas."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipegrid.schedules.runtime.stages.stage import Stage, modules_of


def for_another_replica(stage: Stage, forward: Callable[[], None]) -> None:
    """``forward`` of a microbatch of another replica, after which running statistics are as before.

    Each replica has statistics of its own microbatches. With those of others, they would depend on who has died. Other
    buffers are the stage's own matter: a count that is summed over replicas belongs to whichever rank computes.
    """
    held = [
        (module, name, buffer)
        for _, module in modules_of(stage)
        if getattr(module, "track_running_stats", False)
        for name, buffer in module._buffers.items()  # noqa: SLF001 -- torch has no list of one module's own entries
        if buffer is not None
    ]
    for module, name, buffer in held:  # copies, not the values put back: a backward may need what its forward has read
        module._buffers[name] = torch.clone(buffer)  # noqa: SLF001
    try:
        forward()
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer  # noqa: SLF001
