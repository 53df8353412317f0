"""Division of a recorded graph for a backward in two halves (terms: see `split_backward`).

Every microbatch records nodes of its own, nearly always in the same pattern. The graph is first reduced to plain
numbers, its *outline*; its *division* follows from the outline alone and is computed once per outline. A graph of
another pattern has another outline, so a remembered division always fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from attrs import frozen
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, Node

from pipegrid.autograd.fsdp import POST_BACKWARD
from pipegrid.autograd.unsplittable import COMPILED, SPLIT_REGION, UNSPLITTABLE

_DIVISIONS_KEPT = 32  # remembered patterns; stages whose shapes or branches vary have several
_NOWHERE = -1  # the target of an edge without a node
_APART = -2  # in place of an owner: the roots off the input path


class GraphOutline(NamedTuple):
    """A graph without its nodes, which are numbered in the order in which they are found."""

    kinds: tuple[type, ...]  # each node's class
    edges: tuple[tuple[tuple[int, int], ...], ...]  # of each node: where each leads to, and to which of its outputs
    roots: tuple[tuple[int, int], ...]  # edges into the graph
    inputs: tuple[int, ...]  # the nodes of the inputs that were used


@frozen
class Owner:
    """A node whose weight half waits for W."""

    node: int
    outputs: tuple[int, ...]  # the outputs of the node's forward that were used; a gradient arrives for each
    sinks: tuple[int, ...]  # the accumulators of its own parameters, in which their gradients end


@frozen
class WholeNode:
    """A node that runs whole at I."""

    node: int
    entries: tuple[tuple[int, int, int], ...]  # edges out of the input path: index, node that it leads to, output
    custom: bool  # whether it computes both halves anyway; a node of torch's own does so only where it is asked
    apart: bool  # whether the weight half is that of nodes behind its entries, which run at W (`compile_split`)


@frozen
class Division:
    """The part of I and of W in the nodes of a graph."""

    input_path: tuple[int, ...]  # all nodes of the input path; without any there are no owners either
    owners: tuple[Owner, ...]  # in the order in which W runs them: the highest first, as in a whole backward
    whole: tuple[WholeNode, ...]  # the nodes with edges out of the input path that are no owners
    arrivals: tuple[tuple[int, int], ...]  # outputs of owners, as node and output, whose gradients I keeps
    levels: tuple[tuple[slice, tuple[int, ...]], ...]  # owners of one height: their slice of ``arrivals``, their sinks
    reruns: bool  # whether nodes behind shared parameters run a second time within I, so that the first run keeps them
    spent: tuple[int, ...]  # nodes of the input path that W does not run again
    unsplittable: tuple[int, ...]  # nodes of the input path that cannot run while others are kept for later
    reduced: bool  # whether ``fully_shard`` reduces gradients in the graph, when those of a module's inputs are there
    compiled: bool  # whether a compiled region is on the input path, so that all of it runs at I
    apart: tuple[int, ...]  # indices of roots off the input path: their whole backward is weight half
    apart_at_i: bool  # whether that runs at I, since it shares nodes with others that do


def outline_of(roots: Sequence[GradientEdge], inputs: Iterable[torch.Tensor]) -> tuple[list[Node], GraphOutline]:
    """The nodes above ``roots``, and their pattern; ``inputs`` are leaves that require grad, used or not."""
    identities = {id(tensor) for tensor in inputs}
    numbers = {node: number for number, node in enumerate(dict.fromkeys(root.node for root in roots))}
    nodes = list(numbers)
    edges: list[tuple[tuple[int, int], ...]] = []
    found: list[int] = []
    for number, node in enumerate(nodes):  # which grows meanwhile
        children = node.next_functions
        if not children:
            # An accumulator knows the tensor that it is for.
            if id(getattr(node, "variable", None)) in identities:
                found.append(number)
            edges.append(())
            continue
        below: list[tuple[int, int]] = []
        for child, output in children:
            if child is None:
                below.append((_NOWHERE, output))
                continue
            place = numbers.get(child)
            if place is None:
                place = numbers[child] = len(nodes)
                nodes.append(child)
            below.append((place, output))
        edges.append(tuple(below))
    starts = tuple((numbers[root.node], root.output_nr) for root in roots)
    return nodes, GraphOutline(tuple(map(type, nodes)), tuple(edges), starts, tuple(found))


@lru_cache(maxsize=_DIVISIONS_KEPT)
def divide(outline: GraphOutline) -> Division:
    """Divide a graph into its input path, which leads to the inputs, and what the input path's nodes own."""
    heights = _heights(outline)
    path = tuple(node for node, height in heights.items() if height)
    outputs: dict[int, set[int]] = {node: set() for node in path}
    entries: dict[int, list[tuple[int, int, int]]] = {}
    for node, output in outline.roots:
        if node in outputs:
            outputs[node].add(output)
    for node in path:
        for index, (child, output) in enumerate(outline.edges[node]):
            if child == _NOWHERE:
                continue
            if heights[child]:
                outputs[child].add(output)
            else:
                entries.setdefault(node, []).append((index, child, output))
    apart = tuple(index for index, (node, _) in enumerate(outline.roots) if not heights[node])
    below = {node: [entry for _, entry, _ in edges] for node, edges in entries.items()}
    sinks, sharing = _claims(outline, {**below, _APART: [outline.roots[index][0] for index in apart]})
    names = [kind.__name__ for kind in outline.kinds]
    # Custom Functions of Python, or of C++, whose nodes have no class of their own:
    custom = {node for node in entries if issubclass(outline.kinds[node], FunctionCtx) or names[node] == "CppFunction"}
    owners = [
        Owner(node, tuple(sorted(outputs[node])), tuple(sinks[node]))
        for node in entries
        if node not in custom and node not in sharing
    ]
    owners.sort(key=lambda owner: -heights[owner.node])
    arrivals: list[tuple[int, int]] = []
    levels: list[tuple[slice, tuple[int, ...]]] = []
    for _, each in groupby(owners, key=lambda owner: heights[owner.node]):  # those of one cannot reach each other
        same, start = list(each), len(arrivals)
        arrivals += [(owner.node, output) for owner in same for output in owner.outputs]
        levels.append((slice(start, len(arrivals)), tuple(sink for owner in same for sink in owner.sinks)))
    waiting = {owner.node for owner in owners}
    whole = tuple(
        WholeNode(node, tuple(entries[node]), node in custom, names[node] == SPLIT_REGION and node not in sharing)
        for node in entries
        if node not in waiting
    )
    # To have a node of `whole` compute its weight half, the engine is asked for the gradients at its entries. What lies
    # between two such entries (the norm of a weight, above the weight) then runs as well, ahead of its time.
    asks = any(not part.custom for part in whole)
    return Division(
        input_path=path,
        owners=tuple(owners),
        whole=whole,
        arrivals=tuple(arrivals),
        levels=tuple(levels),
        reruns=asks and any(outline.edges[entry] for part in whole for _, entry, _ in part.entries),
        spent=tuple(node for node in path if node not in waiting),
        unsplittable=tuple(node for node in path if names[node] == UNSPLITTABLE),
        reduced=any(names[node] == POST_BACKWARD for node in path),
        compiled=any(names[node] == COMPILED for node in path),
        apart=apart,
        apart_at_i=_APART in sharing,
    )


def input_path_of(roots: Sequence[GradientEdge], inputs: Iterable[torch.Tensor]) -> list[Node]:
    """The nodes that lead from ``roots`` to ``inputs``.

    Examples:
        >>> import torch
        >>> from torch.autograd.graph import get_gradient_edge
        >>> x = torch.ones(2, requires_grad=True)
        >>> [node.name() for node in input_path_of([get_gradient_edge((x * 2).exp())], [x])]
        ['torch::autograd::AccumulateGrad', 'MulBackward0', 'ExpBackward0']
    """
    nodes, outline = outline_of(roots, inputs)
    return [nodes[number] for number in divide(outline).input_path]


def _heights(outline: GraphOutline) -> dict[int, int]:
    """The height of each node, children first: nodes on the longest path to an input, 0 where none is reached."""
    inputs = set(outline.inputs)
    heights: dict[int, int] = {}
    seen: set[int] = set()
    stack = [node for node, _ in outline.roots]
    while stack:
        node = stack[-1]
        below = [child for child, _ in outline.edges[node] if child != _NOWHERE]
        if node not in seen:
            seen.add(node)
            stack += [child for child in below if child not in seen]
            continue
        stack.pop()
        if node not in heights:
            highest = max((heights[child] for child in below), default=0)
            heights[node] = highest + 1 if highest or node in inputs else 0
    return heights


def _claims(outline: GraphOutline, entries: dict[int, list[int]]) -> tuple[dict[int, list[int]], set[int]]:
    """The sinks behind the entries of each owner, and the owners that share a node with another owner."""
    claimed: dict[int, int] = {}
    sinks: dict[int, list[int]] = {}
    sharing: set[int] = set()
    for owner, starts in entries.items():
        sinks[owner] = []
        stack = list(starts)
        while stack:
            node = stack.pop()
            if node in claimed:
                if claimed[node] != owner:
                    sharing |= {owner, claimed[node]}
                continue
            claimed[node] = owner
            below = [child for child, _ in outline.edges[node] if child != _NOWHERE]
            if below:
                stack += below
            else:
                sinks[owner].append(node)
    return sinks, sharing
