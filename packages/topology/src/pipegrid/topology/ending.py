"""The end of process groups: destroyed in one order within a deadline, or aborted.

``ncclCommDestroy`` is a barrier of the members on a node, without a deadline. So all members destroy their groups in
one order, never from the garbage collector, which each rank runs at another time; past the deadline, and after a
failure, groups are aborted. A communicator that torch has destroyed must not be aborted: NCCL would free it twice. No
torch until a group ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pipegrid.topology.bounded_calls import BoundedCalls, SilentStoreError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DESTROY_SECONDS = 300.0
_ABORT_SECONDS = 5.0  # on a device an abort waits for kernels


def destroy_groups(
    groups: Mapping[Any, ProcessGroup] | Iterable[ProcessGroup], *, seconds: float = _DESTROY_SECONDS
) -> None:
    """Destroy each group once, latest first: on all members, in the same order. Groups that no longer exist are left.

    Args:
        groups: in the order of their creation.
        seconds: until groups that some other member has not begun to destroy are aborted.
    """
    import torch.distributed as dist

    from pipegrid.topology import torch_compat as compat

    left = _living(groups)[::-1]
    end, calls = time.monotonic() + seconds, BoundedCalls("pipegrid-destroy")
    try:
        while left:
            if compat.meets_at_its_end(left[0]):
                calls.run(dist.destroy_process_group, left[0], seconds=max(0.0, end - time.monotonic()))
            else:
                dist.destroy_process_group(left[0])
            left.pop(0)
    except SilentStoreError:
        discard_groups(left)
    finally:
        calls.close()


def discard_groups(groups: Mapping[Any, ProcessGroup] | Iterable[ProcessGroup]) -> None:
    """End groups after a failure, with or without their other members: aborted all at once, then taken from torch.

    An abort that has not ended after 5 s is left to its thread.
    """
    left = _living(groups)
    threads = [threading.Thread(target=_discard, args=(one,), name="pipegrid-abort", daemon=True) for one in left]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _ABORT_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def abort_group(group: ProcessGroup) -> None:
    """Abort the group, unless torch has destroyed it. On a device this waits for kernels of other groups."""
    from pipegrid.topology import torch_compat as compat

    if compat.is_alive(group):
        group.abort()


def _discard(group: ProcessGroup) -> None:
    import torch.distributed as dist

    from pipegrid.topology import torch_compat as compat

    if compat.meets_at_its_end(group):
        group.abort()
    with contextlib.suppress(ValueError, KeyError):  # a destroy that the abort has freed takes it from torch as well
        dist.destroy_process_group(group)


def _living(groups: Mapping[Any, ProcessGroup] | Iterable[ProcessGroup]) -> list[ProcessGroup]:
    """Each group once that torch still has."""
    from pipegrid.topology import torch_compat as compat

    listed = groups.values() if isinstance(groups, Mapping) else groups
    return [group for group in dict.fromkeys(listed) if compat.is_alive(group)]
