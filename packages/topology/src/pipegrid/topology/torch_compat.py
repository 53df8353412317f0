"""The only place that touches torch's private functions; a test pins what is used here (2.11 to 2.13).

`torch.distributed.new_group` cannot be told a group's name, and with ``use_local_synchronization`` the name
it makes up contains how many groups this process has created so far: ranks with different histories then
wait for each other under different names. `_new_process_group_helper`, which `new_group` calls, takes the
name as an argument.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from pipegrid.topology.errors import GroupSpecError

_c10d: Any = distributed_c10d


def default_store() -> Any:
    """The store that the default process group was initialised with."""
    return _c10d._get_default_store()  # noqa: SLF001


def resolve_backend(backend: str | None) -> str:
    """The backend of a new group: the one asked for (``gloo``, or ``cpu:gloo,cuda:nccl``), else the default's.

    Raises:
        GroupSpecError: torch has no such backend, or it cannot create a group among its members alone.
    """
    if backend is None:
        backend = str(_c10d._world.pg_map[_c10d._get_default_group()][0])  # noqa: SLF001
    names = [part.rsplit(":", 1)[-1].strip().lower() for part in str(backend).split(",")]
    for name in names:
        if name == dist.Backend.MPI:
            raise GroupSpecError(
                "the MPI backend creates groups only with all ranks of the world, not among members alone; "
                "use gloo or nccl for these groups"
            )
        if name != dist.Backend.UNDEFINED and not dist.is_backend_available(name):
            raise GroupSpecError(
                f"the backend {backend!r} is not available in this build of torch; "
                f"the known ones are {dist.Backend.backend_list}"
            )
    return str(dist.Backend(backend))


def is_fake(backend: str) -> bool:
    """Whether a group of this backend talks to nobody (torch's own stand-in for tests and benchmarks)."""
    return set(_c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map().values()) == {"fake"}


def resolve_timeout(backend: str, timeout: timedelta | None) -> timedelta:
    """The timeout of a new group: the one asked for, else torch's default for the backend."""
    if timeout is not None:
        return timeout
    default: timedelta = _c10d._get_default_timeout(dist.Backend(backend))  # noqa: SLF001
    return default


def is_alive(group: ProcessGroup) -> bool:
    """Whether torch still knows the group: neither it nor the world has been destroyed."""
    return group in _c10d._world.pg_map  # noqa: SLF001


def is_name_taken(name: str) -> bool:
    """Whether a group of that name is alive in this process."""
    return name in _c10d._world.pg_names.values()  # noqa: SLF001


def make_group(
    *,
    ranks: Sequence[int],
    name: str,
    backend: str,
    timeout: timedelta,
    pg_options: Any,
    group_desc: str,
) -> ProcessGroup:
    """Create the group ``name`` of ``ranks``, given in group-rank order, this process among them.

    Only the members call this. Torch's public functions find the group like any other.
    """
    default = _c10d._get_default_group()  # noqa: SLF001
    ranks = list(ranks)
    if hasattr(pg_options, "__deepcopy__"):
        # Torch writes the group's name and ranks into NCCL's options and keeps them; others it leaves alone.
        pg_options = copy.deepcopy(pg_options)
        pg_options._timeout = timeout  # noqa: SLF001 -- torch does so itself, but warns where it differs
    # With a device bound to the default group torch splits its NCCL communicator, which every rank of the
    # world must take part in. Unbound, the members connect a communicator of their own.
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        group, _ = _c10d._new_process_group_helper(  # noqa: SLF001
            len(ranks),
            ranks.index(default.rank()),
            ranks,
            dist.Backend(backend),
            default_store(),
            name,
            backend_options=pg_options,
            timeout=timeout,
            device_id=device,
            group_desc=group_desc,
        )
    finally:
        default.bound_device_id = device
    _c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}  # noqa: SLF001
    made: ProcessGroup = group
    return made


# What torch writes into an options object when a group is made: says which group, not which options.
_SET_BY_TORCH = frozenset({"backend", "global_ranks_in_group", "group_name", "split_color", "split_from"})


_DEEPEST = 4  # options hold options (NCCL's its config), but not for ever


def describe_options(options: Any, *, depth: int = 0) -> str:
    """The values of a backend's options as a text that is the same on every rank that set the same ones."""
    if options is None:
        return "-"
    if depth > _DEEPEST or isinstance(options, (bool, int, float, str, list, tuple, dict, Tensor)):
        raise GroupSpecError(
            f"pg_options is or holds {type(options).__name__} {options!r:.60}, which are no options of a backend; give "
            f"an object such as torch.distributed.ProcessGroupNCCL.Options(), or None"
        )
    parts = []
    for name in sorted(dir(options)):
        if name.startswith("_") or name in _SET_BY_TORCH:
            continue
        value = getattr(options, name)
        if isinstance(value, (bool, int, float, str, timedelta)) or value is None:
            parts.append(f"{name}={value!r}")
        elif not callable(value):
            parts.append(f"{name}=({describe_options(value, depth=depth + 1)})")
    return f"{type(options).__name__}({', '.join(parts)})"
