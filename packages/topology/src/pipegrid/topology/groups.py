"""Process groups as data (`GroupSpec`), the one order of their creation, and their creation by members alone.

No torch until a group is created.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from attrs import field, frozen

from pipegrid.core.fields import Index, Name, Rule, checked, checked_fields
from pipegrid.topology.addresses import gloo_interface, server_of
from pipegrid.topology.bounded_calls import SilentStoreError, bounded, reason_to_give_up
from pipegrid.topology.ending import discard_groups
from pipegrid.topology.errors import GridError, GroupConnectionError, GroupCreationTimeoutError, GroupStoreError
from pipegrid.topology.rendezvous import Rendezvous
from pipegrid.topology.world import require_default_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_CONNECT = timedelta(seconds=60)


def _as_ranks(ranks: Iterable[int]) -> tuple[int, ...]:
    # A range has only integers, and a group of a large world has very many.
    return tuple(ranks) if isinstance(ranks, range) else checked(ranks, tuple[Index, ...], "ranks", GridError)


@frozen(field_transformer=checked_fields(GridError))
class GroupSpec:
    """A process group to create.

    Specs with the same ranks in the same order share one real group, unless ``shared`` is False: lanes and bridges need
    traffic that nothing else can delay, so each of those has a group of its own, identified by its label.

    Attributes:
        ranks: global, in group-rank order.
        label: the group's purpose.
        shared: whether equal ranks are one group.
    """

    ranks: tuple[int, ...] = field(converter=_as_ranks)
    label: Name
    shared: bool = True

    def __attrs_post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0 or len(set(self.ranks)) != len(self.ranks):
            raise GridError(f"group {self.label!r} has ranks {self.ranks!r:.80}; give global ranks, each once")

    @property
    def order_key(self) -> tuple[tuple[int, ...], tuple[int, ...], bool, str]:
        """The place of this group in the order of creation: a function of the spec and of nothing else."""
        return (tuple(sorted(self.ranks)), self.ranks, not self.shared, self.label)


def creation_order(specs: Iterable[GroupSpec]) -> tuple[GroupSpec, ...]:
    """``specs`` without repetition, in the one order in which every rank creates them.

    Creating a group blocks until all its members do so, and only members take part. Such creation cannot deadlock when
    every rank creates its groups in an order that is a restriction of one total order: suppose some ranks were stuck
    for ever, and let ``g`` be the smallest group, in that order, at which any rank is stuck. Some member of ``g`` never
    reaches it, so it is stuck at another group; it has not passed ``g``, and it creates in ascending order, so that
    other group is smaller than ``g``. But ``g`` was the smallest. Without a common order there is a deadlock of three
    ranks and three pairs: rank 0 makes {0,1} then {0,2}, rank 1 makes {1,2} then {0,1}, rank 2 makes {0,2} then {1,2}.

    The order compares specs by themselves (ranks, whether shared, label), never by their position in
    ``specs``, so a rank that knows only its own groups agrees with one that knows all of them.
    """
    return tuple(sorted(set(specs), key=lambda spec: spec.order_key))


def _duration(value: Any) -> timedelta:
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ValueError
    return value


Timeout: TypeAlias = Annotated[timedelta, Rule(_duration, "a datetime.timedelta above zero")]


@frozen(eq=False, slots=False)
class GroupOptions:
    """The options of a group besides its ranks, with all defaults filled in.

    Attributes:
        timeout: of the group's operations.
        creation_timeout: for all members to arrive and, again, for all of them to connect.
        group_desc: description in torch's logs; None is the group's label.
    """

    backend: str
    timeout: timedelta
    creation_timeout: timedelta
    pg_options: Any
    group_desc: str | None

    @cached_property
    def text(self) -> str:
        """The options as text: equal on the ranks whose groups have the same options, and only there."""
        from pipegrid.topology.torch_compat import describe_options

        return f"{self.backend}|{self.timeout}|{describe_options(self.pg_options)}|{self.group_desc}"


def group_options(
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    creation_timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> GroupOptions:
    """The options, with the defaults of the default process group filled in."""
    require_default_group()
    from pipegrid.topology import torch_compat as compat

    timeout = checked(timeout, Timeout | None, "timeout", GridError)
    creation_timeout = checked(creation_timeout, Timeout | None, "creation_timeout", GridError)
    backend = compat.resolve_backend(backend)
    timeout = compat.resolve_timeout(backend, timeout)
    return GroupOptions(backend, timeout, creation_timeout or timeout, pg_options, group_desc)


def create_groups(
    specs: Iterable[GroupSpec],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    creation_timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> dict[GroupSpec, ProcessGroup]:
    """Create those groups of ``specs`` that this rank is in; the others cost nothing.

    Every member of a group calls this with an equal spec and equal options; which other specs it gives does not
    matter, since each rank creates its own ones in `creation_order`. Shared specs with the same ranks get one group.
    The groups work with every public function of `torch.distributed`, and the group rank of ``spec.ranks[i]`` is
    ``i``. When this returns, every member has the group: it is connected, and a member may destroy it at once.

    Args:
        specs: groups, in any order.
        backend: as for `torch.distributed.new_group`; None is the default group's.
        timeout: of the group's operations; None is the backend's default.
        creation_timeout: for all members to arrive and, again, for all of them to connect; None is ``timeout``.
        pg_options: the backend's options; one object serves many groups.
        group_desc: description in torch's logs; None is each group's label.

    Returns:
        The specs that this rank is in, in creation order, each with its group.

    Raises:
        WorldError: there is no default process group.
        GridError: a rank past the world, or no such backend.
        GroupCreationTimeoutError: some members did not arrive, or did not connect, before the deadline. The groups
            that this call had created are gone again.
        GroupConnectionError: the backend did not connect the members, or the store failed; likewise.
    """
    options = group_options(
        backend=backend,
        timeout=timeout,
        creation_timeout=creation_timeout,
        pg_options=pg_options,
        group_desc=group_desc,
    )
    ordered = creation_order(specs)
    made = create_each((spec, options) for spec in ordered)
    return {spec: made[spec, options.text] for spec in ordered if (spec, options.text) in made}


def create_each(wanted: Iterable[tuple[GroupSpec, GroupOptions]]) -> dict[tuple[GroupSpec, str], ProcessGroup]:
    """Create this rank's groups of ``wanted``, each with options of its own; keyed by spec and options' text.

    The order is `creation_order` with ties broken by the options, so it is total here as well.
    """
    here, world_size = require_default_group()
    from pipegrid.topology import torch_compat as compat

    ordered = sorted(wanted, key=lambda item: (item[0].order_key, item[1].text))
    for spec, _ in ordered:
        if max(spec.ranks) >= world_size:
            raise GridError(f"group {spec.label!r} has rank {max(spec.ranks)}, the world has {world_size} ranks")
    for spec, options in ordered if compat.is_dry() else ():  # ranks and a store that do not exist
        if not compat.is_fake(options.backend):
            raise GridError(
                f"group {spec.label!r} has backend {options.backend!r}, but the default group's is 'fake', a dry run: "
                "no other rank exists. Leave the backend to the default group"
            )
    made: dict[tuple[GroupSpec, str], ProcessGroup] = {}
    shared: dict[tuple[tuple[int, ...], str], ProcessGroup] = {}
    try:
        for spec, options in ordered:
            if here not in spec.ranks or (spec, options.text) in made:
                continue
            group = shared.get((spec.ranks, options.text)) if spec.shared else None
            if group is None:
                members = Rendezvous(compat.default_store(), spec.ranks, here, spec.label, options.creation_timeout)
                try:
                    group = _create(spec, options, members)
                except (GroupCreationTimeoutError, GroupConnectionError):
                    raise
                except RuntimeError as error:  # of torch, which names keys and addresses
                    raise GroupConnectionError(
                        f"rank {here} could not create group {spec.label!r} of ranks {members.members}: "
                        f"{(str(error).splitlines() or [''])[0]}. Where a member or the process of the store has "
                        "ended, look there"
                    ) from error
            if spec.shared:
                shared[spec.ranks, options.text] = group
            made[spec, options.text] = group
    except BaseException:
        discard_groups(made.values())
        raise
    return made


def unconnected_group(ranks: Sequence[int], label: str) -> ProcessGroup:
    """A group of ``ranks`` that this one makes without the others, some of which may be dead.

    It maps places to ranks. It connects to none of them until something is sent, which should never happen.
    """
    from pipegrid.topology import torch_compat as compat

    options = group_options()
    with compat.unconnected():
        return compat.make_group(
            ranks=ranks,
            name=compat.free_name(f"pipegrid/places/{label} from rank {ranks[0]}"),
            backend=options.backend,
            timeout=options.timeout,
            creation_timeout=options.creation_timeout,
            pg_options=compat.unconnected_options(options.backend),
            group_desc=label,
            connects=False,
        )


def _create(spec: GroupSpec, options: GroupOptions, members: Rendezvous) -> ProcessGroup:
    """Wait at a barrier for the other members, connect, and return when all of them are connected."""
    from pipegrid.topology import torch_compat as compat

    alone = compat.is_fake(options.backend)  # a fake group has no peers, and its store cannot count
    name = _name(spec, options)
    interface = ""
    if alone:
        name = compat.free_name(name)
    else:
        key, number = name, members.meet(name)
        name = f"{name}#{number}"
        if len(spec.ranks) > 1 and "gloo" in options.backend:
            interface = gloo_interface(server_of(members.store), lambda: members.hosts(key, number), spec.label)
    connected = f"{name}/connected"
    try:
        with compat.over(interface):
            group = compat.make_group(
                ranks=spec.ranks,
                name=name,
                backend=options.backend,
                timeout=options.timeout,
                creation_timeout=options.creation_timeout,
                pg_options=options.pg_options,
                group_desc=options.group_desc or spec.label,
            )
    except SilentStoreError:
        if reason := reason_to_give_up()():
            raise GroupConnectionError(f"rank {members.rank} gave up group {spec.label!r}: {reason}") from None
        raise members.not_connected(connected) from None
    if len(spec.ranks) > 1 and not alone:
        try:
            # A member that went on and destroyed the group would cut off those that still connect to it.
            members.meet(connected, step="connect")
        except BaseException:
            discard_groups([group])
            raise
    return group


def _name(spec: GroupSpec, options: GroupOptions) -> str:
    """The group's name without its sequence number: the same on all members, whatever else they have created."""
    own = "" if spec.shared else f"/{spec.label}"
    text = f"{','.join(map(str, spec.ranks))}|{options.text}|{spec.label}"
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return f"pipegrid/{len(spec.ranks)}r{min(spec.ranks)}-{max(spec.ranks)}/{digest}{own}"


def control_store(label: str, *, timeout: timedelta = _CONNECT) -> Store:
    """A store for what ranks tell each other beside their groups: small keys and values.

    Every rank that gives ``label`` sees the same keys; another label is another key space, so give each attempt of a
    job its own. The store has a connection of its own: a thread may use it while others wait on the default store.
    In a dry run (backend ``fake``) no other rank exists: the store is new with each call, and of this process alone.

    Args:
        label: of the key space.
        timeout: for the connection to the process that has the default group's store, which may have ended.

    Raises:
        GroupStoreError: that process did not answer in time.
        GroupConnectionError: the connection failed.
    """
    rank, _ = require_default_group()
    from pipegrid.topology import torch_compat as compat

    prefix = f"pipegrid/control/{checked(label, Name, 'label', GridError)}"
    seconds = timeout.total_seconds()
    try:
        return bounded(compat.own_store, prefix, seconds=seconds, name="pipegrid-connect")
    except SilentStoreError:
        raise GroupStoreError(
            f"rank {rank}: cannot connect to the default group's store for {label!r} within {seconds:g} s; the "
            "process that holds it may have ended"
        ) from None
    except RuntimeError as error:
        raise GroupConnectionError(
            f"rank {rank}: cannot connect to the default group's store for {label!r}: {str(error).splitlines()[0]}"
        ) from error
