"""The way of values that several later stages use: which stage hands each of them to which. Pure; no torch.

A value is sent once to each position where stages use it: to the first of them, which keeps it for the others there.
These take it from one another, stage by stage. So each copy lives from its arrival to the backward of the stage that
received it, and gradients come back the same way: each stage adds its own to what has come, and one sum leaves the
position.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from attrs import frozen

from pipegrid.core.edge import Edge

Value = TypeVar("Value", bound=Hashable)
Places: TypeAlias = Sequence[Hashable]


@frozen
class Uses:
    """Where a value is made and used.

    Attributes:
        source: the stage that makes it.
        users: later stages, ascending, that it is to come to.
        held: later stages that have it anyway, as what the stage before them sends.
    """

    source: int
    users: tuple[int, ...]
    held: tuple[int, ...] = ()


def hops_of_value(uses: Uses, placement: Places, hosts: Places | None = None) -> tuple[Edge, ...]:
    """The edges by which a value comes to the stages that use it, ascending.

    One leads to each position that has not got it. With ``hosts``, what the position of each stage shares with those
    near it, it comes from the first stage on the same host that has it: as many bytes travel, and fewest of them
    between hosts, where links are slower and shared. So a value goes to each host once, and is forwarded there; on the
    host of its source, and without ``hosts``, it goes directly. The others stay on their position: ``placement`` has
    that of each stage, or its positions.

    Examples:
        >>> [str(edge) for edge in hops_of_value(Uses(0, (2, 3, 4, 5)), placement=(0, 1, 0, 1, 0, 1))]
        ['0>2', '0>3', '2>4', '3>5']
        >>> [str(edge) for edge in hops_of_value(Uses(0, (1, 2, 3)), range(4), hosts=(0, 0, 1, 1))]
        ['0>1', '0>2', '2>3']
    """
    last: dict[Hashable, int] = {}
    near: dict[Hashable, int] = {}
    edges: list[Edge] = []
    for stage in sorted({uses.source, *uses.users, *uses.held}):
        if stage != uses.source and stage not in uses.held:
            nearest = uses.source if hosts is None else near.get(hosts[stage], uses.source)
            edges.append(Edge(last.get(placement[stage], nearest), stage))
        last[placement[stage]] = stage
        if hosts is not None:
            near.setdefault(hosts[stage], stage)
    return tuple(edges)


def values_by_edge(
    uses: Mapping[Value, Uses], placement: Places, hosts: Places | None = None
) -> dict[Edge, tuple[Value, ...]]:
    """The values that travel along each edge, ascending, in the order of ``uses``.

    An edge from a stage to the next is one of the chain, and the values go beside what that carries; all others skip
    stages (`skips_among`).
    """
    found: dict[Edge, list[Value]] = {}
    for value, one in uses.items():
        for edge in hops_of_value(one, placement, hosts):
            found.setdefault(edge, []).append(value)
    return {edge: tuple(found[edge]) for edge in sorted(found)}


def skips_among(edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """Those of ``edges`` that lead past a stage, for `ModuleGraph`."""
    return tuple([edge for edge in edges if edge.destination > edge.source + 1])


def messages_naive(uses: Uses) -> int:
    """The boundaries between stages at which a value is sent besides, where each passes it on to the next."""
    return max(uses.users, default=uses.source) - uses.source - len(uses.held)
