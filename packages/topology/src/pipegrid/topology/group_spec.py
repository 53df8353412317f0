"""Which process groups exist, as plain data, and the one order in which every rank creates them. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen

from pipegrid.topology._checks import as_flag, as_kind, as_tuple, index_of, shown
from pipegrid.topology.errors import GroupSpecError


def _as_ranks(value: Iterable[int]) -> tuple[int, ...]:
    listed = as_tuple(value, "the list of a group's ranks", "integers, in group-rank order", error=GroupSpecError)
    if isinstance(value, range):
        return listed  # groups of a large world have very many
    ranks = tuple(map(index_of, listed))
    if None in ranks:
        wrong = listed[ranks.index(None)]
        raise GroupSpecError(
            f"the ranks of a group are integers in group-rank order, got {shown(wrong)} among them; "
            f"give a list, tuple or range of global ranks"
        )
    return tuple(rank for rank in ranks if rank is not None)


@frozen
class GroupSpec:
    """A process group to be: its global ``ranks`` in group-rank order, and a ``label`` that says what for.

    Specs with the same ranks (in the same order) share one real group, unless ``shared`` is False: lanes and
    bridges need traffic that nothing else can delay, so each of those has a group of its own, told apart by
    its label.

    Raises:
        GroupSpecError: no ranks, a rank twice, a negative rank, something that is no integer, or no label.
    """

    ranks: tuple[int, ...] = field(converter=_as_ranks)
    label: str
    shared: bool = True

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.label, str) or not self.label:
            raise GroupSpecError(
                f"the label of a group is a text that says what the group is for, got {self.label!r}; "
                f"name it, for example 'language/tp'"
            )
        as_flag(self.shared, f"shared of group {self.label!r}", error=GroupSpecError)
        if not self.ranks:
            raise GroupSpecError(f"group {self.label!r} has no ranks; a group has at least one member")
        if min(self.ranks) < 0:
            raise GroupSpecError(
                f"group {self.label!r} has the negative rank {min(self.ranks)}; ranks are global, counted from 0"
            )
        if len(set(self.ranks)) != len(self.ranks):
            twice = sorted({rank for rank in self.ranks if self.ranks.count(rank) > 1})
            raise GroupSpecError(f"group {self.label!r} has the ranks {twice} twice; list every member once")

    @property
    def order_key(self) -> tuple[tuple[int, ...], tuple[int, ...], bool, str]:
        """Where this group stands in the order of creation: a function of the spec and of nothing else."""
        return (tuple(sorted(self.ranks)), self.ranks, not self.shared, self.label)


def creation_order(specs: Iterable[GroupSpec]) -> tuple[GroupSpec, ...]:
    """``specs`` without repetition, in the one order in which every rank creates them.

    Creating a group blocks until all its members do so, and only members take part. Such creation cannot
    deadlock when every rank creates its groups in an order that is a restriction of one total order:
    suppose some ranks were stuck for ever, and let ``g`` be the smallest group, in that order, at which any
    rank is stuck. Some member of ``g`` never comes to it, so it is stuck at another group; it has not
    passed ``g``, and it creates in ascending order, so that other group is smaller than ``g``. But ``g`` was
    the smallest. Without a common order there is a deadlock of three ranks and three pairs: rank 0 makes
    {0,1} then {0,2}, rank 1 makes {1,2} then {0,1}, rank 2 makes {0,2} then {1,2}.

    The order compares specs by themselves (ranks, whether shared, label), never by their position in
    ``specs``, so a rank that knows only its own groups agrees with one that knows all of them.
    """
    listed = as_tuple(specs, "specs", "GroupSpecs", error=GroupSpecError, ordered=False)
    for spec in listed:
        as_kind(spec, "a spec", GroupSpec, "its ranks, and a label that says what for", error=GroupSpecError)
    return tuple(sorted(set(listed), key=lambda spec: spec.order_key))
