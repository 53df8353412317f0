"""Process groups of a module: its replicas, and what the sizes of its grid demand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pipegrid.core.fields import nearest, shown
from pipegrid.gradients.errors import GradientError
from pipegrid.gradients.main_grad import Modules, named_modules
from pipegrid.transport.control.opening import resolve_device

_DIMS = ("dp", "cp", "tp", "ep", "pp")


def collection_of(collections: Any, name: str) -> Any:
    """The process groups of module ``name``: one collection serves all modules, or there is one per module.

    Raises:
        GradientError: there are several, but none for this module; or ``collections`` is not a collection.

    Examples:
        >>> from pipegrid.topology import ProcessGroupCollection
        >>> collection_of(ProcessGroupCollection(), "language").dp is None
        True
    """
    if (by_name := collections_by_name(collections)) is None:
        if not hasattr(collections, "dp") and not hasattr(collections, "dp_cp"):
            raise GradientError(f"collections is {shown(collections)}; it must have the group `dp` or `dp_cp`")
        return collections
    if name not in by_name:
        raise GradientError(f"no process groups for module {name!r}; there are collections for {sorted(by_name)}")
    return by_name[name]


def collections_by_name(collections: Any) -> Mapping[str, Any] | None:
    """The collections of several modules by name; None where there is one for all."""
    if isinstance(collections, Mapping):
        return collections
    found = (getattr(collections, name, None) for name in ("modules", "module_pgs"))
    return next((by_name for by_name in found if isinstance(by_name, Mapping)), None)


def group_of(collections: Any, module: str, name: str) -> Any:
    """The process group ``name`` of ``module``; None where it has none of that name, or there are no collections."""
    return None if collections is None else getattr(collection_of(collections, module), name, None)


def replica_group(collections: Any, name: str) -> dist.ProcessGroup | None:
    """The group of a module's replicas, dp x cp; None where it has one replica."""
    collection = collection_of(collections, name)
    group = replica_group_or_none(collection)
    cp = size_of(getattr(collection, "cp", None))
    if group is None and cp > 1:
        raise GradientError(
            f'module {name!r} has {cp} cp ranks, but no dp_cp group; make it: grid.create_pg(["dp", "cp"])'
        )
    return group


def require_dims(name: str, grid: Any) -> None:
    """Raise where several ranks differ in a dim that is not known: gradients would not be summed over it."""
    unknown = [dim for dim, size in zip(grid.dim_names, grid.shape, strict=True) if size > 1 and dim not in _DIMS]
    if unknown:
        raise GradientError(
            f"module {name!r} has a grid of the dims {list(grid.dim_names)}, and {unknown[0]!r} is not known"
            f"{nearest(unknown[0], _DIMS)}; replicas are dp, parts of a sequence cp, of layers tp or ep, stages pp"
        )


def require_groups(collections: Any, name: str, dims: Iterable[str] = ()) -> None:
    """Raise unless the collection has the groups, of replicas and ``dims``, that its grid's sizes, if any, demand."""
    collection = collection_of(collections, name)
    if (grid := getattr(collection, "grid", None)) is None:
        return
    require_dims(name, grid)
    sizes = dict(zip(grid.dim_names, grid.shape, strict=True))
    absent: list[Any] = []
    if sizes.get("cp", 1) > 1:
        absent += [["dp", "cp"] if "dp" in sizes else "cp"] if getattr(collection, "dp_cp", None) is None else []
    elif sizes.get("dp", 1) > 1:
        absent += ["dp"] if replica_group_or_none(collection) is None else []
    absent += [dim for dim in dims if sizes.get(dim, 1) > 1 and getattr(collection, dim, None) is None]
    if absent := [each for place, each in enumerate(absent) if each not in absent[:place]]:
        shape = " x ".join(f"{dim} {size}" for dim, size in sizes.items())
        raise GradientError(
            f"module {name!r} has a grid of {shape}, and its process groups lack {absent}: replicas would drift apart, "
            "or count twice. Create them before ProcessGroupCollection.from_grid(grid), which takes those that exist: "
            f"grid.create_pgs({absent})"
        )


def replica_group_or_none(collection: Any) -> dist.ProcessGroup | None:
    """The group of a collection's replicas, dp x cp; None where it has none, or one over a part of them."""
    group: dist.ProcessGroup | None = getattr(collection, "dp_cp", None)
    if group is None and size_of(getattr(collection, "cp", None)) <= 1:
        group = getattr(collection, "dp", None)
    return group


def size_of(group: dist.ProcessGroup | None) -> int:
    """The number of ranks of ``group``; None is one rank."""
    return 1 if group is None else group.size()


def ranks_of(group: dist.ProcessGroup | None) -> frozenset[int]:
    """The global ranks of ``group``; none of None."""
    return frozenset() if group is None else frozenset(dist.get_process_group_ranks(group))


def device_of(modules: Modules, group: dist.ProcessGroup | None) -> torch.device:
    """The device of this rank's collectives: its parameters' or, on a rank without any, that of the group's backend."""
    for _, module in named_modules(modules):
        for parameter in module.parameters():
            return parameter.device
    return resolve_device(None, None, group)[1] if dist.is_initialized() else torch.device("cpu")
