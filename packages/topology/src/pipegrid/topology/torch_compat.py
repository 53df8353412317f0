"""All private functions of torch that this package uses; tests pin their behaviour (torch 2.11 to 2.15).

`torch.distributed.new_group` takes no group name, and with ``use_local_synchronization`` the name that it makes up
contains the number of groups that this process has created so far: ranks with different histories then wait for
each other under different names. `_new_process_group_helper`, which `new_group` calls, takes the name as an argument.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipegrid.topology.addresses import GLOO_INTERFACE
from pipegrid.topology.bounded_calls import bounded, reason_to_give_up
from pipegrid.topology.errors import GridError

_c10d: Any = distributed_c10d


def default_store() -> Any:
    """The store that the default process group was initialised with."""
    return _c10d._get_default_store()  # noqa: SLF001


def own_store(prefix: str) -> Store:
    """The default store's keys under ``prefix``, over a connection of its own; in a dry run, a new store."""
    return PrefixStore(prefix, HashStore() if is_dry() else default_store().clone())


def resolve_backend(backend: str | None) -> str:
    """The backend of a new group: ``backend`` (``gloo``, or ``cpu:gloo,cuda:nccl``), else the default group's."""
    if backend is None:
        backend = str(_c10d._world.pg_map[_c10d._get_default_group()][0])  # noqa: SLF001
    names = [part.rsplit(":", 1)[-1].strip().lower() for part in str(backend).split(",")]
    for name in names:
        # MPI creates groups only with all ranks of the world, not among members alone.
        if name == dist.Backend.MPI or (name != dist.Backend.UNDEFINED and not dist.is_backend_available(name)):
            known = [one for one in dist.Backend.backend_list if one != dist.Backend.MPI]
            raise GridError(f"the backend {backend!r} does not serve groups here; the known ones are {known}")
    return str(dist.Backend(backend))


def backends_by_device(backend: str) -> Mapping[str, str]:
    """Type of device to the backend that serves it: ``{"cpu": "gloo", "cuda": "nccl"}``."""
    served: dict[str, str] = _c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    return served


def accelerator_of(served: Mapping[str, str]) -> str | None:
    """The type of accelerator with a backend of its own, which does not serve the CPU; None where there is none."""
    return next((kind for kind, name in served.items() if kind != "cpu" and name != served.get("cpu")), None)


def is_fake(backend: str) -> bool:
    """Whether groups of this backend communicate with no one (torch's stand-in for tests and benchmarks)."""
    return set(backends_by_device(backend).values()) == {"fake"}


def is_dry() -> bool:
    """Whether the default group is fake: this rank is the only one that exists."""
    return is_fake(dist.get_backend_config())


def resolve_timeout(backend: str, timeout: timedelta | None) -> timedelta:
    """The timeout of a new group: ``timeout``, else torch's default for the backend."""
    if timeout is not None:
        return timeout
    default: timedelta = _c10d._get_default_timeout(dist.Backend(backend))  # noqa: SLF001
    return default


def is_alive(group: ProcessGroup) -> bool:
    """Whether torch still knows the group: neither it nor the world has been destroyed."""
    return group in _c10d._world.pg_map  # noqa: SLF001


def living_groups() -> list[ProcessGroup]:
    """All process groups of this process, also those of the program; torch has no public list of them."""
    return list(_c10d._world.pg_map)  # noqa: SLF001


def aborts_of(groups: Iterable[ProcessGroup], host_backends: Collection[str]) -> dict[ProcessGroup, Callable[[], None]]:
    """The functions that abort the backends other than ``host_backends``, by living group that has one.

    A group of several backends, such as ``cpu:gloo,cuda:nccl``, keeps those of the host.
    """
    found: dict[ProcessGroup, Callable[[], None]] = {}
    for group in groups:
        if not is_alive(group):
            continue
        served = backends_by_device(dist.get_backend_config(group))
        kinds = {name: kind for kind, name in served.items() if name not in host_backends}
        backends = [group._get_backend(torch.device(kind)) for kind in kinds.values()]  # noqa: SLF001
        if backends:
            found[group] = partial(_abort_all, backends)
    return found


def _abort_all(backends: Iterable[Any]) -> None:
    for backend in backends:
        backend.abort()


def is_name_taken(name: str) -> bool:
    """Whether a group of that name is alive in this process."""
    return name in _c10d._world.pg_names.values()  # noqa: SLF001


def free_name(name: str) -> str:
    """``name`` with the first number that no group of this process has."""
    return next(free for number in itertools.count() if not is_name_taken(free := f"{name}#{number}"))


def is_destroying() -> bool:
    """Whether some thread is in torch's `destroy_process_group`: what it has ended is alive until it returns."""
    code = dist.destroy_process_group.__code__
    frames: list[FrameType | None] = list(sys._current_frames().values())  # noqa: SLF001 -- public, in spite of its name
    while frames:
        frame = frames.pop()
        if frame is not None:
            if frame.f_code is code:
                return True
            frames.append(frame.f_back)
    return False


def meets_at_its_end(group: ProcessGroup) -> bool:
    """Whether the group's destruction may wait for its members, as NCCL's does; gloo's and torch's fake do not."""
    return _is_of_device(dist.get_backend_config(group))


def _is_of_device(backend: str) -> bool:
    names = [part.rsplit(":", 1)[-1] for part in backend.split(",")]
    return not all(name.startswith("gloo") or name in ("fake", dist.Backend.UNDEFINED) for name in names)


def connecting_device(served: Mapping[str, str], bound: torch.device | None) -> torch.device | None:
    """The device on which a new group connects at its creation; None connects at the first operation.

    The device that the default group is bound to, where the new group serves its type; else the current device of
    the accelerator with a backend of its own. NCCL without a device connects lazily, in the middle of a step.
    """
    if bound is not None:
        return bound if bound.type in served else None
    kind = accelerator_of(served)
    return None if kind is None else torch.device(kind, torch.get_device_module(kind).current_device())


def make_group(
    *,
    ranks: Sequence[int],
    name: str,
    backend: str,
    timeout: timedelta,
    creation_timeout: timedelta,
    pg_options: Any,
    group_desc: str,
    connects: bool = True,
) -> ProcessGroup:
    """Create and connect the group ``name`` of ``ranks``, in group-rank order, this process among them.

    Only the members call this. Torch's public functions find the group like any other. Without ``connects`` a group of
    NCCL is of this rank alone until its first operation; for gloo see `unconnected`.

    Raises:
        SilentStoreError: a group of a device was not connected within its creation's timeout, or was given up; the
            thread that connects it is left behind. NCCL waits for a member that has died for as long as it takes.
    """
    default = _c10d._get_default_group()  # noqa: SLF001
    ranks = list(ranks)
    if hasattr(pg_options, "__deepcopy__"):
        # Torch writes the group's name and ranks into NCCL's options and keeps them; others it leaves alone.
        pg_options = copy.deepcopy(pg_options)
        pg_options._timeout = creation_timeout  # noqa: SLF001 -- torch does so itself, but warns where it differs
    # With a device bound to the default group torch splits its NCCL communicator, which every rank of the
    # world must take part in. Unbound, the members connect a communicator of their own.
    bound = default.bound_device_id
    # A group of one rank has no one to connect to.
    connects = connects and len(ranks) > 1
    device = connecting_device(backends_by_device(backend), bound) if connects else None

    def connect() -> ProcessGroup:
        made: ProcessGroup = _c10d._new_process_group_helper(  # noqa: SLF001
            len(ranks),
            ranks.index(default.rank()),
            ranks,
            dist.Backend(backend),
            default_store(),
            name,
            backend_options=pg_options,
            timeout=creation_timeout,
            device_id=device,
            group_desc=group_desc,
        )[0]
        return made

    def connect_beside() -> ProcessGroup:
        if device is not None and _is_of_device(backend):  # the current device is one of each thread
            torch.get_device_module(device.type).set_device(device)
        return connect()

    default.bound_device_id = None
    try:
        why = reason_to_give_up()
        if connects and (_is_of_device(backend) or why is not str):
            seconds = creation_timeout.total_seconds()
            group = bounded(connect_beside, seconds=seconds, name="pipegrid-connect", given_up=why)
        else:
            group = connect()
    finally:
        default.bound_device_id = bound
    _c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}  # noqa: SLF001
    if timeout != creation_timeout:
        set_timeout(group, timeout)
    return group


def unconnected_options(backend: str) -> Any:
    """NCCL's options by which torch 2.15 leaves a new group unconnected; None where none are needed."""
    known: Any = getattr(dist, "ProcessGroupNCCL", None) if _is_of_device(backend) else None
    options: Any = None if known is None else known.Options()
    if not hasattr(options, "lazy_init"):
        return None
    options.lazy_init = True
    return options


_LAZY = "TORCH_GLOO_LAZY_INIT"


def unconnected() -> AbstractContextManager[None]:
    """Let this rank create gloo groups alone in the block: two ranks connect at their first exchange."""
    return _variable(_LAZY, "1")


def over(interface: str) -> AbstractContextManager[None]:
    """Let gloo groups created in the block listen on ``interface``; empty leaves the choice to gloo."""
    return _variable(GLOO_INTERFACE, interface) if interface else nullcontext()


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of the group's operations, on all its devices; of a fake group, which has none, nothing."""
    if is_fake(dist.get_backend_config(group)):
        return
    if hasattr(group, "set_timeout"):
        group.set_timeout(timeout)
    else:  # torch before 2.12
        for device in group._device_types:  # noqa: SLF001
            backend_of(group, device)._set_default_timeout(timeout)  # noqa: SLF001


def backend_of(group: Any, device: torch.device) -> Any:
    """The object that serves the group's tensors of the device."""
    return group._get_backend(device)  # noqa: SLF001


# Torch writes these into an options object when a group is created: they identify the group, not its options.
_SET_BY_TORCH = frozenset({"backend", "global_ranks_in_group", "group_name", "split_color", "split_from"})


_DEEPEST = 4  # levels of options inside options, such as NCCL's config


def describe_options(options: Any, *, depth: int = 0) -> str:
    """The values of a backend's options as text: the same on every rank with the same values."""
    if options is None:
        return "-"
    if depth > _DEEPEST or isinstance(options, (bool, int, float, str, list, tuple, dict, Tensor)):
        raise GridError(f"pg_options is or holds {options!r:.60}; it must be a backend's options, or None")
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
