"""A backward in two halves: the gradients of a stage's inputs, which others wait for, and of its weights, later.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2, which names the halves B and W; here they are
I and W. The model is not changed: the graph that autograd recorded is cut.

The graph's *trunk* is every node from which an input of the stage can be reached. Beside it hang the parameters. A
node of the trunk with an edge that leaves the trunk *owns* what lies behind that edge::

    output <- tanh <- addmm <- layer_norm <- input        tanh: trunk
                        |           |                     addmm owns what leads to its weight and bias
                     weight       scale                   layer_norm owns its scale

I runs the trunk. Of every owner the engine then computes only what flows on to the inputs, and the gradients that
arrive at an owner are kept. W runs each owner once more, from those gradients to its own parameters and nowhere else:
it computes the other half. So nothing is computed twice (but by the few operators of torch that make both halves in one
kernel: PReLU, recurrent cells), and the engine itself accumulates into the parameters, so that their hooks fire as they
do in a whole backward.

Two kinds of owner cannot be run in halves, and run whole at I:

- a custom `torch.autograd.Function` computes both halves whenever it runs (or accumulates into a ``main_grad`` itself);
- nodes that share a parameter: from the upper of the two, the engine would go down the trunk to the other one.

A stage without inputs that need a gradient has no trunk. Nobody waits for anything there, so all of it runs at W.

Tensor hooks may run more often than in a whole backward, to the same effect on gradients: one on an activation that an
owner made runs in each half, one on a parameter that several nodes of the trunk read directly runs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from attrs import field, frozen
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import GraphExecGroup

from pipegrid.schedules.saved_tensors import keep_recomputed, release_saved

Edges: TypeAlias = tuple[tuple[Node | None, int], ...]


@frozen
class Owner:
    """A node whose weight half waits for W.

    Attributes:
        outputs: the outputs of the node's forward that were used; a gradient arrives for each.
        sinks: where the gradients of its own parameters end: their accumulators.
        height: nodes on the longest way to an input. Owners of one height cannot reach each other.
    """

    node: Node
    outputs: tuple[int, ...]
    sinks: tuple[Node, ...]
    height: int


@frozen
class Whole:
    """A node that runs whole at I; ``entries`` are its edges that leave the trunk, by their index."""

    node: Node
    entries: tuple[tuple[int, GradientEdge], ...]


@frozen
class Cut:
    """A graph, divided. ``trunk`` has all of the trunk's nodes; without any there are no owners either."""

    trunk: tuple[Node, ...]
    deferred: tuple[Owner, ...]
    whole: tuple[Whole, ...]


@frozen
class WeightHalf:
    """What is left for W: calls of the engine, each from some edges to some sinks (None: wherever it leads)."""

    calls: tuple[tuple[Sequence[GradientEdge], Sequence[torch.Tensor], Sequence[GradientEdge] | None], ...] = ()
    group: GraphExecGroup = field(factory=GraphExecGroup)


def backward_inputs(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | None], WeightHalf]:
    """I: the gradients of ``inputs`` (None for one that was not used), and what is left for W.

    Args:
        roots: what the stage made (`torch.autograd.graph.get_gradient_edge`); the tensors may be gone.
        gradients: one for each root.
        inputs: leaves that require grad. Nothing is accumulated into their ``grad``.
    """
    targets = [get_gradient_edge(tensor) for tensor in inputs]
    parts = cut(roots, targets)
    if not parts.trunk:
        return [None] * len(inputs), WeightHalf(((roots, gradients, None),) if roots else ())
    arriving = [GradientEdge(owner.node, output) for owner in parts.deferred for output in owner.outputs]
    # A node of torch's own computes the weight half only if somebody asks for it.
    asked = [edge for part in parts.whole if not _is_custom(part.node) for _, edge in part.entries]
    leaving: list[tuple[GradientEdge, torch.Tensor]] = []
    for part in parts.whole:
        part.node.register_hook(_collector(part.entries, leaving))
    for owner in parts.deferred:
        keep_recomputed(owner.node)
    group = GraphExecGroup()
    with group:
        found = torch.autograd.grad(
            roots,
            [*targets, *arriving, *asked],
            gradients,
            retain_graph=bool(parts.deferred),
            allow_unused=True,
        )
        if leaving:
            torch.autograd.backward([edge for edge, _ in leaving], [gradient for _, gradient in leaving])
    if parts.deferred:
        waiting = {owner.node for owner in parts.deferred}
        for node in parts.trunk:
            if node not in waiting:
                release_saved(node)
    arrived = dict(zip(arriving, found[len(targets) : len(targets) + len(arriving)], strict=True))
    return list(found[: len(targets)]), WeightHalf(_calls(parts.deferred, arrived), group)


def backward_weights(half: WeightHalf) -> None:
    """W: accumulate into the parameters what I left. Once."""
    with half.group:
        for edges, gradients, sinks in half.calls:
            torch.autograd.backward(edges, gradients, inputs=sinks)


def _calls(
    owners: Iterable[Owner], arrived: Mapping[GradientEdge, torch.Tensor | None]
) -> tuple[tuple[Sequence[GradientEdge], Sequence[torch.Tensor], Sequence[GradientEdge] | None], ...]:
    """One call of the engine for all owners of one height, the highest first, as in a whole backward."""
    levels: dict[int, tuple[list[GradientEdge], list[torch.Tensor], list[GradientEdge]]] = {}
    for owner in sorted(owners, key=lambda owner: -owner.height):
        edges, gradients, sinks = levels.setdefault(owner.height, ([], [], []))
        sinks += [GradientEdge(sink, 0) for sink in owner.sinks]
        for output in owner.outputs:
            edge = GradientEdge(owner.node, output)
            gradient = arrived[edge]
            if gradient is not None:
                edges.append(edge)
                gradients.append(gradient)
    return tuple(level for level in levels.values() if level[0])


def cut(roots: Iterable[GradientEdge], inputs: Iterable[GradientEdge]) -> Cut:
    """Divide the graph above ``roots`` into its trunk, which leads to ``inputs``, and what the trunk's nodes own."""
    children, heights = _heights([root.node for root in roots], {edge.node for edge in inputs})
    trunk = tuple(node for node, height in heights.items() if height)
    outputs: dict[Node, set[int]] = {node: set() for node in trunk}
    entries: dict[Node, list[tuple[int, GradientEdge]]] = {}
    for root in roots:
        if root.node in outputs:
            outputs[root.node].add(root.output_nr)
    for node in trunk:
        for index, (child, output) in enumerate(children[node]):
            if child is None:
                continue
            if heights[child]:
                outputs[child].add(output)
            else:
                entries.setdefault(node, []).append((index, GradientEdge(child, output)))
    sinks, sharing = _claims(entries, children)
    whole = {node for node in entries if node in sharing or _is_custom(node)}
    return Cut(
        trunk,
        tuple(
            Owner(node, tuple(sorted(outputs[node])), tuple(sinks[node]), heights[node])
            for node in entries
            if node not in whole
        ),
        tuple(Whole(node, tuple(entries[node])) for node in entries if node in whole),
    )


def _heights(roots: Iterable[Node], targets: set[Node]) -> tuple[dict[Node, Edges], dict[Node, int]]:
    """Per node its edges, and its height: nodes on the longest way to a target, 0 where none is reached."""
    children: dict[Node, Edges] = {}
    heights: dict[Node, int] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node not in children:
            children[node] = edges = node.next_functions
            for child, _ in edges:
                if child is not None and child not in children:
                    stack.append(child)
            continue
        stack.pop()
        if node not in heights:
            height = 1 if node in targets else 0
            for child, _ in children[node]:
                if child is not None and heights[child] >= height and heights[child]:
                    height = heights[child] + 1
            heights[node] = height
    return children, heights


def _claims(
    entries: dict[Node, list[tuple[int, GradientEdge]]], children: dict[Node, Edges]
) -> tuple[dict[Node, list[Node]], set[Node]]:
    """Per owner the sinks behind its entries, and those owners of which two reach the same node."""
    claimed: dict[Node, Node] = {}
    sinks: dict[Node, list[Node]] = {}
    sharing: set[Node] = set()
    for owner, edges in entries.items():
        sinks[owner] = []
        stack = [edge.node for _, edge in edges]
        while stack:
            node = stack.pop()
            if node in claimed:
                if claimed[node] is not owner:
                    sharing |= {owner, claimed[node]}
                continue
            claimed[node] = owner
            below = [child for child, _ in children[node] if child is not None]
            if below:
                stack += below
            else:
                sinks[owner].append(node)
    return sinks, sharing


def _collector(
    entries: Iterable[tuple[int, GradientEdge]], leaving: list[tuple[GradientEdge, torch.Tensor]]
) -> Callable[[Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]], None]:
    """A hook that notes what a node hands to its entries."""

    def collect(grad_inputs: Sequence[torch.Tensor | None], grad_outputs: Sequence[torch.Tensor | None]) -> None:
        del grad_outputs
        for index, edge in entries:
            gradient = grad_inputs[index]
            if gradient is not None:
                leaving.append((edge, gradient))

    return collect


def _is_custom(node: Node) -> bool:
    """Whether the node is a custom Function: of Python, or of C++, whose nodes have no class of their own."""
    return isinstance(node, FunctionCtx) or type(node).__name__ == "CppFunction"
