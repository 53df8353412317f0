"""A backward in two halves: the gradients of a stage's inputs, which others wait for, and of its weights, later.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2, which names the halves B and W; here they are
I and W. The model is not changed: the graph that autograd recorded is cut.

The graph's *input path* is every node from which an input of the stage can be reached. Beside it hang the parameters. A
node of the input path with an edge that leaves the input path *owns* what lies behind that edge::

    output <- tanh <- addmm <- layer_norm <- input        tanh: input path
                        |           |                     addmm owns what leads to its weight and bias
                     weight       scale                   layer_norm owns its scale

I runs the input path. Of every owner the engine then computes only what flows on to the inputs, and the gradients that
arrive at an owner are kept. W runs each owner once more, from those gradients to its own parameters and nowhere else:
it computes the other half. So nothing is computed twice (but by the few operators of torch that make both halves in one
kernel: PReLU, recurrent cells), and the engine itself accumulates into the parameters, so that their hooks fire as they
do in a whole backward.

Two kinds of owner cannot be run in halves, and run whole at I:

- a custom `torch.autograd.Function` computes both halves whenever it runs (or accumulates into a ``main_grad`` itself);
- nodes that share a parameter: from the upper of the two, the engine would go down the input path to the other one.

A stage that ``fully_shard`` has sharded runs whole at I: its gradients are reduced, and its weights freed, as soon as
those of its inputs are there. Where the plan does both (``REDUCE_GRAD``, ``RESHARD``), it runs in halves. A stage with
a compiled region between its outputs and its inputs runs whole at I, too: the region's backward is one node, which may
reuse the memory of the tensors that it saved, so no part of that graph can be kept for W. Regions of `compile_split`
have a node for each half.

A stage without inputs that need a gradient has no input path. No other stage waits for it, so all of it runs at W.

Tensor hooks may run more often than in a whole backward, to the same effect on gradients: one on an activation that an
owner made runs in each half, one on a parameter that several nodes of the input path read directly runs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from attrs import field, frozen
from torch.autograd.graph import GradientEdge, Node
from torch.utils.checkpoint import GraphExecGroup

from pipegrid.autograd.engine import run_backward
from pipegrid.autograd.partition import divide, outline_of
from pipegrid.autograd.saved_tensors import keep_recomputed, release_saved


class Call(NamedTuple):
    """A call of the engine: from some edges to some sinks (none: wherever it leads)."""

    edges: Sequence[GradientEdge]
    gradients: Sequence[torch.Tensor]
    sinks: Sequence[GradientEdge]


@frozen
class WeightHalf:
    """The rest of a backward, for W.

    Attributes:
        calls: the calls that are left to run.
        group: the one in which all of the backward runs.
        roots: of the backward: they hold the graph, as edges to nodes of Python functions do not before torch 2.13.

    Examples:
        >>> import torch
        >>> from torch.autograd.graph import get_gradient_edge
        >>> stage, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
        >>> _, rest = backward_inputs([get_gradient_edge(stage(x))], [torch.ones(2, 4)], [x])
        >>> isinstance(rest, WeightHalf), len(rest.calls)
        (True, 1)
    """

    calls: tuple[Call, ...] = ()
    group: GraphExecGroup = field(factory=GraphExecGroup)
    roots: Sequence[GradientEdge] = ()


def backward_inputs(
    roots: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    on_unsplittable: Callable[[Iterable[Node]], None] | None = None,
    on_compiled: Callable[[], None] | None = None,
    whole: bool | None = None,
) -> tuple[Sequence[torch.Tensor | None], WeightHalf]:
    """Run the input half (I): the gradients of ``inputs`` (None for an unused one), and the weight half left for W.

    Args:
        roots: edges of the stage's outputs (`torch.autograd.graph.get_gradient_edge`); the tensors may be gone.
        gradients: one for each root.
        inputs: leaves that require grad. Nothing is accumulated into their ``grad``.
        on_unsplittable: called before anything runs with the nodes that cannot run in halves; it raises.
        on_compiled: called where a compiled region runs all at I.
        whole: whether all runs at I, where there is an input path; None: where ``fully_shard`` reduces in the graph.

    Examples:
        >>> import torch
        >>> from torch.autograd.graph import get_gradient_edge
        >>> stage, x = torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        >>> (to_send,), rest = backward_inputs([get_gradient_edge(stage(x))], [torch.ones(2, 4)], [x])
        >>> to_send.shape, stage.weight.grad
        (torch.Size([2, 4]), None)
    """
    if not inputs:
        return [], WeightHalf((Call(roots, gradients, ()),) if roots else ())
    nodes, outline = outline_of(roots, inputs)
    parts = divide(outline)
    if parts.unsplittable and on_unsplittable is not None:
        on_unsplittable([nodes[node] for node in parts.unsplittable])
    if not parts.input_path:
        return [None] * len(inputs), WeightHalf((Call(roots, gradients, ()),) if roots else ())
    if parts.compiled and on_compiled is not None:
        on_compiled()
    if parts.compiled or (parts.reduced if whole is None else whole):
        run_backward(roots, gradients)
        whole_gradients = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        return whole_gradients, WeightHalf()
    arriving = [GradientEdge(nodes[node], output) for node, output in parts.arrivals]
    asked: list[GradientEdge] = []
    leaving: list[tuple[GradientEdge, torch.Tensor]] = []
    later: list[tuple[GradientEdge, torch.Tensor]] = []
    for part in parts.whole:
        entries = [(index, GradientEdge(nodes[node], output)) for index, node, output in part.entries]
        nodes[part.node].register_hook(_collector(entries, later if part.apart else leaving))
        if not part.custom:  # it computes the weight half only if its gradient is asked for
            asked += [edge for _, edge in entries]
    for owner in parts.owners:
        keep_recomputed(nodes[owner.node])
    keep = bool(parts.owners) or parts.reruns
    group, began = GraphExecGroup(), roots
    calls: list[Call] = []
    if parts.apart:
        apart = [roots[index] for index in parts.apart], [gradients[index] for index in parts.apart]
        if parts.apart_at_i:
            leaving += zip(*apart, strict=True)
        else:
            calls.append(Call(*apart, ()))
        onto = [index for index in range(len(roots)) if index not in parts.apart]
        roots, gradients = [roots[index] for index in onto], [gradients[index] for index in onto]
    with group:
        found = run_backward(roots, gradients, inputs=(*inputs, *arriving, *asked), keep_graph=keep, accumulate=False)
        if leaving:
            run_backward([edge for edge, _ in leaving], [gradient for _, gradient in leaving])
    if keep:
        for node in parts.spent:
            release_saved(nodes[node])
    arrived = found[len(inputs) : len(inputs) + len(arriving)]
    for at, sinks in parts.levels:  # from the gradients that arrived at the weights' parts to their parameters
        there = zip(arriving[at], arrived[at], strict=True)
        flowing = [(edge, gradient) for edge, gradient in there if gradient is not None]
        if flowing:
            edges, flown = zip(*flowing, strict=True)
            calls.append(Call(edges, flown, [GradientEdge(nodes[sink], 0) for sink in sinks]))
    if later:
        calls.append(Call([edge for edge, _ in later], [gradient for _, gradient in later], ()))
    return found[: len(inputs)], WeightHalf(tuple(calls), group, began)


def backward_weights(half: WeightHalf) -> None:
    """Run a weight half (W), once: accumulate its gradients into the parameters.

    Examples:
        >>> import torch
        >>> from torch.autograd.graph import get_gradient_edge
        >>> stage, x = torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        >>> backward_weights(backward_inputs([get_gradient_edge(stage(x))], [torch.ones(2, 4)], [x])[1])
        >>> stage.weight.grad.shape
        torch.Size([4, 4])
    """
    with half.group:
        for call in half.calls:
            run_backward(call.edges, call.gradients, inputs=call.sinks)


def _collector(
    entries: Iterable[tuple[int, GradientEdge]], leaving: list[tuple[GradientEdge, torch.Tensor]]
) -> Callable[[Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]], None]:

    def collect(grad_inputs: Sequence[torch.Tensor | None], _: Sequence[torch.Tensor | None]) -> None:
        for index, edge in entries:
            gradient = grad_inputs[index]
            if gradient is not None:
                leaving.append((edge, gradient))

    return collect
