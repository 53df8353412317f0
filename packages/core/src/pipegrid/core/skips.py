"""The way of values that several later stages use: which stage hands each of them to which. Pure; no torch.

A value is sent once to each position where stages use it: to the first of them, which keeps it for the others there.
These take it from one another, stage by stage. So each copy lives from its arrival to the backward of the stage that
received it, and gradients come back the same way: each stage adds its own to what has come, and one sum leaves the
position.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from pipegrid.core.edge import Edge

Value = TypeVar("Value", bound=Hashable)


def ways_of_value(
    source: int, users: Iterable[int], placement: Sequence[Hashable], hosts: Sequence[Hashable] | None = None
) -> tuple[Edge, ...]:
    """The edges by which a value of stage ``source`` comes to the stages ``users``, ascending.

    One leads to each position but the source's own: from the source itself or, with ``hosts``, from the last stage
    before it on the same host, so that a value comes to each host once. The others stay on their position.

    Args:
        source: the stage that makes it.
        users: later stages.
        placement: the position of each stage, or its positions.
        hosts: of each stage, what its position shares with those near it; None: all are alike, and values go directly.

    Examples:
        >>> [str(edge) for edge in ways_of_value(0, [2, 3, 4, 5], placement=(0, 1, 0, 1, 0, 1))]
        ['0>2', '0>3', '2>4', '3>5']
        >>> [str(edge) for edge in ways_of_value(0, [2, 3], range(4), hosts=(0, 0, 1, 1))]
        ['0>2', '2>3']
    """
    last, near, edges = {placement[source]: source}, {}, []
    if hosts is not None:
        near[hosts[source]] = source
    for user in sorted(set(users)):
        giver = last.get(placement[user])
        if giver is None:
            giver = source if hosts is None else near.get(hosts[user], source)
        edges.append(Edge(giver, user))
        last[placement[user]] = user
        if hosts is not None:
            near[hosts[user]] = user
    return tuple(edges)


def values_by_edge(
    uses: Mapping[Value, tuple[int, Iterable[int]]],
    placement: Sequence[Hashable],
    hosts: Sequence[Hashable] | None = None,
) -> dict[Edge, tuple[Value, ...]]:
    """The values that travel along each edge, ascending, in the order of ``uses``: by value, its source and its users.

    An edge from a stage to the next is one of the chain, and the values go beside what that carries; all others skip
    stages (`ModuleGraph.skips`).
    """
    found: dict[Edge, list[Value]] = {}
    for value, (source, users) in uses.items():
        for edge in ways_of_value(source, users, placement, hosts):
            found.setdefault(edge, []).append(value)
    return {edge: tuple(found[edge]) for edge in sorted(found)}


def messages_naive(source: int, users: Iterable[int]) -> int:
    """The boundaries that a value crosses from its source to its last user, each with a message, without skips."""
    return max(users, default=source) - source
