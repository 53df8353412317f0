"""Create and destroy process groups: members only, in one order, under names of our own."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from attrs import frozen
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipegrid.topology import torch_compat as compat
from pipegrid.topology._checks import as_integer, as_kind, as_text, as_timeout, as_tuple
from pipegrid.topology.errors import GroupSpecError, WorldSizeUnknownError
from pipegrid.topology.group_spec import GroupSpec, creation_order
from pipegrid.topology.rendezvous import meet


@frozen(eq=False, slots=False)
class GroupOptions:
    """What torch is told about a group besides its ranks. Needs the default process group."""

    backend: str
    timeout: timedelta
    pg_options: Any
    group_desc: str | None

    @cached_property
    def text(self) -> str:
        """The options in words: equal on all ranks that gave the same ones, and only there."""
        options = compat.describe_options(self.pg_options)
        return f"{self.backend}|{self.timeout}|{options}|{self.group_desc}"


def group_options(
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> GroupOptions:
    """The options, with the defaults of the default process group filled in."""
    _require_world()
    timeout = as_timeout(timeout, "timeout", error=GroupSpecError)
    if group_desc is not None:
        as_text(group_desc, "group_desc", error=GroupSpecError)
    backend = compat.resolve_backend(backend)
    return GroupOptions(backend, compat.resolve_timeout(backend, timeout), pg_options, group_desc)


def _require_world() -> None:
    if not dist.is_initialized():
        raise WorldSizeUnknownError(
            "process groups need the default process group; call torch.distributed.init_process_group first"
        )


def control_store(label: str) -> Store:
    """A store of one's own, for what ranks tell each other beside their groups: small keys and values.

    Every rank that gives ``label`` sees the same keys, and nobody else's. It has a connection of its own, so a
    thread may use it while others wait on the default group's store. Another ``label`` makes another store: give
    each attempt of a job one.

    Raises:
        WorldSizeUnknownError: there is no default process group.
        GroupSpecError: the label is no text.
    """
    _require_world()
    as_text(label, "the label of a control store", error=GroupSpecError)
    return PrefixStore(f"pipegrid/control/{label}", compat.default_store().clone())


def create_groups(
    specs: Iterable[GroupSpec],
    *,
    rank: int | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> dict[GroupSpec, ProcessGroup]:
    """Create those groups of ``specs`` that this rank is in; the others cost nothing.

    Every member of a group must call this with an equal spec and equal options; which other specs it gives
    does not matter, since each rank creates its own ones in `creation_order`. Shared specs with the same
    ranks get one group. The groups work with every public function of `torch.distributed`, and the group
    rank of ``spec.ranks[i]`` is ``i``.

    Args:
        specs: groups, in any order.
        rank: this rank, where the caller knows it; anything else than the process's own rank is refused.
        backend: as for `torch.distributed.new_group`; None is the default group's.
        timeout: deadline of the creation and of the group's operations; None is the backend's default.
        pg_options: the backend's options; one object serves many groups.
        group_desc: what torch's logs call the groups; None is each group's label.

    Returns:
        the specs that this rank is in, in creation order, each with its group.

    Raises:
        WorldSizeUnknownError: there is no default process group.
        GroupSpecError: a rank past the world, ``rank`` is not this process's, no such backend, or an argument of
            another kind.
        GroupCreationTimeoutError: some members did not come before the deadline. The groups that this call
            had made are destroyed again.
    """
    options = group_options(backend=backend, timeout=timeout, pg_options=pg_options, group_desc=group_desc)
    if rank is not None and as_integer(rank, "rank", least=0, error=GroupSpecError) != dist.get_rank():
        raise GroupSpecError(
            f"rank {rank} cannot create groups in the process of rank {dist.get_rank()}; each process makes its own"
        )
    ordered = creation_order(specs)
    made = create_each((spec, options) for spec in ordered)
    return {spec: made[spec, options.text] for spec in ordered if (spec, options.text) in made}


def create_each(
    wanted: Iterable[tuple[GroupSpec, GroupOptions]],
) -> dict[tuple[GroupSpec, str], ProcessGroup]:
    """Create this rank's groups of ``wanted``, each with options of its own; keyed by spec and options' text.

    The order is `creation_order` with ties broken by the options, so it is total here as well.
    """
    here, world_size = dist.get_rank(), dist.get_world_size()
    ordered = sorted(wanted, key=lambda item: (item[0].order_key, item[1].text))
    for spec, _ in ordered:
        if max(spec.ranks) >= world_size:
            raise GroupSpecError(
                f"group {spec.label!r} has rank {max(spec.ranks)}, but the world has {world_size} ranks; "
                f"start more processes or place the group lower"
            )
    made: dict[tuple[GroupSpec, str], ProcessGroup] = {}
    shared: dict[tuple[tuple[int, ...], str], ProcessGroup] = {}
    try:
        for spec, options in ordered:
            if here not in spec.ranks or (spec, options.text) in made:
                continue
            group = shared.get((spec.ranks, options.text)) if spec.shared else None
            if group is None:
                group = _create(spec, options, here)
            if spec.shared:
                shared[spec.ranks, options.text] = group
            made[spec, options.text] = group
    except BaseException:
        destroy_groups(made.values())
        raise
    return made


def _create(spec: GroupSpec, options: GroupOptions, rank: int) -> ProcessGroup:
    name = _name(spec, options)
    return compat.make_group(
        ranks=spec.ranks,
        name=f"{name}#{_sequence(spec, name, options, rank)}",
        backend=options.backend,
        timeout=options.timeout,
        pg_options=options.pg_options,
        group_desc=options.group_desc or spec.label,
    )


def _name(spec: GroupSpec, options: GroupOptions) -> str:
    """The group's name without its sequence number: the same on all members, whatever else they have made."""
    own = "" if spec.shared else f"/{spec.label}"
    text = f"{','.join(map(str, spec.ranks))}|{options.text}|{own}"
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return f"pipegrid/{len(spec.ranks)}r{min(spec.ranks)}-{max(spec.ranks)}/{digest}{own}"


def _sequence(spec: GroupSpec, name: str, options: GroupOptions, rank: int) -> int:
    """Meet the other members; how many groups of this name there have been."""
    if compat.is_fake(options.backend):
        # A fake group talks to nobody, and its store cannot count.
        return next(number for number in itertools.count() if not compat.is_name_taken(f"{name}#{number}"))
    return meet(
        compat.default_store(),
        name,
        ranks=spec.ranks,
        rank=rank,
        label=spec.label,
        timeout=options.timeout,
    )


def destroy_groups(groups: Mapping[GroupSpec, ProcessGroup] | Iterable[ProcessGroup]) -> None:
    """Destroy each group once, latest first. Groups that are gone already are left alone.

    Raises:
        GroupSpecError: something that is no process group; then none is destroyed.
    """
    listed = groups.values() if isinstance(groups, Mapping) else groups
    given = as_tuple(listed, "groups", "process groups", error=GroupSpecError, ordered=False)
    for group in given:
        as_kind(group, "a group to destroy", ProcessGroup, "what create_groups returned", error=GroupSpecError)
    for group in reversed(given):
        if compat.is_alive(group):
            dist.destroy_process_group(group)
