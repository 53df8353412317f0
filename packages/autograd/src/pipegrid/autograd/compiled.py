"""A `torch.compile` backend whose regions run their backward in two halves, as eager layers do.

AOTAutograd's own region is one autograd node, which a split plan runs whole at I. Here the joint graph of forward and
backward is cut in three: the forward, the gradients of inputs and those of parameters. Two autograd nodes run the
halves::

    output <- region <- input              region: on the input path; its backward is the input half
                 |
              weights <- parameters        weights: its backward is the weight half, from what the input half has left

In a whole backward the engine runs one after the other; in a split one `partition` leaves ``weights`` to W. What the
halves share is computed once, at I. Each of the three graphs is compiled by the backend asked for.

A region that writes to its inputs, returns a view of one, or has tensor subclasses (DTensor) among them has no such
joint graph: it raises `SplitBackwardError` at its first call.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from importlib import import_module
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from pipegrid.autograd.unsplittable import SplitBackwardError

GraphFunction = Callable[..., Sequence[Any]]
_AS_TRACED = ("eager", "aot_eager")  # backends that run the graph's operators as they are


def compile_split(module: nn.Module, *, backend: str = "inductor", dynamic: bool | None = False) -> None:
    """Compile ``module`` in place, so that its backward can be run in halves.

    Args:
        module: a layer, before its first forward.
        backend: of `torch.compile`; it compiles the forward and both halves of the backward.
        dynamic: as of `torch.compile`; False compiles once for each shape.

    Raises:
        SplitBackwardError: this torch has no joint graphs.

    Examples:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 4)
        >>> compile_split(layer, backend="eager")
        >>> layer(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """
    for owner, name in (_JOINT, _PARTITION, _STORAGE):
        _part(owner, name)
    if not hasattr(Tensor, "_is_view"):
        raise _lacking("torch.Tensor._is_view")
    module.compile(backend=SplitBackend(type(module).__name__, backend), dynamic=dynamic)


@frozen
class SplitBackend:
    """A backend for `torch.compile`."""

    name: str  # of what is compiled, for errors
    inner: str  # the backend that compiles the forward and both halves of the backward

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """The function that runs a region."""
        differentiated = any(isinstance(each, Tensor) and each.requires_grad for each in examples)
        if not torch.is_grad_enabled() or not differentiated:
            return self._compiled(graph)
        try:
            return _split(graph, examples, self._compiled)
        except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            failure = SplitBackwardError(
                f'a compiled region of {self.name} cannot be split, as compile="split" asks: {reason}. It must not '
                "write to its inputs, return a view of one or have DTensors among them; use "
                'compile="whole", or eager mode'
            )

            def fails(*_: Any) -> Any:  # when the region runs: Dynamo wraps what a backend raises in pages of its own
                raise failure

            return fails

    def _compiled(self, graph: fx.GraphModule) -> GraphFunction:
        if self.inner in _AS_TRACED:
            return graph
        compiled: GraphFunction = torch.compile(graph, backend=self.inner)
        return compiled


@frozen
class _Graphs:
    """The compiled graphs of a region."""

    forward: GraphFunction  # from the region's arguments to its outputs and what the backward needs
    input_half: GraphFunction  # from that and tangents to gradients of inputs, and what the weight half needs of it
    weight_half: GraphFunction  # from what the two before have left to the gradients of parameters
    outputs: int  # number of the region's outputs
    inputs: tuple[int, ...]  # indices of arguments with a gradient at I
    parameters: tuple[int, ...]  # indices of arguments with a gradient at W
    kept: tuple[int, ...]  # indices of the saved values and tangents that the weight half needs
    differentiable: tuple[int, ...]  # indices of outputs with a tangent
    formats: tuple[torch.memory_format, ...]  # of each tangent's memory, as traced
    order: tuple[int, ...]  # of what the forward has saved, as the backward takes it


@define(eq=False)
class _Call:
    """One run of a region: its arguments until the forward has run; what its input half leaves to its weight half."""

    graphs: _Graphs
    arguments: tuple[Any, ...] = ()
    left: list[Any] | None = field(default=None, init=False)


def _split(
    graph: fx.GraphModule, examples: Sequence[Any], compiled: Callable[[fx.GraphModule], GraphFunction]
) -> Callable[..., Any]:
    _copy_views(graph)
    outputs = _outputs_of(graph)
    differentiable = tuple(index for index, node in enumerate(outputs) if _has_gradient(node))
    forward, backward = forward_and_backward(joint_graph(graph, examples), examples, outputs=len(outputs))
    found = [node for node in backward.graph.nodes if node.op == "placeholder"]
    saved = [node.name for node in _outputs_of(forward)[len(outputs) :]]
    tangents = found[len(saved) :]
    gradients = _outputs_of(backward)
    if len(tangents) != len(differentiable) or len(gradients) != len(examples):
        raise RuntimeError(f"it has {len(tangents)} tangents for {len(differentiable)} differentiable outputs")
    wanted = [index for index, gradient in enumerate(gradients) if gradient is not None]
    parameters = [index for index in wanted if isinstance(examples[index], nn.Parameter)]
    inputs = [index for index in wanted if index not in parameters]
    input_half, weight_half, kept = halves(
        backward, [gradients[index] for index in inputs], [gradients[index] for index in parameters]
    )
    graphs = _Graphs(
        compiled(forward),
        compiled(input_half),
        compiled(weight_half),
        len(outputs),
        tuple(inputs),
        tuple(parameters),
        kept,
        differentiable,
        tuple(_format_of(node.meta["val"]) for node in tangents),
        _order(saved, [node.name for node in found[: len(saved)]]),
    )

    def run(*args: Any) -> Any:
        call = _Call(graphs, args)
        weights = _Weights.apply(call, *(args[index] for index in parameters))  # type: ignore[no-untyped-call]
        return SplitRegion.apply(call, weights, *(args[index] for index in inputs))  # type: ignore[no-untyped-call]

    return run


def _order(saved: Sequence[str], read: Sequence[str]) -> tuple[int, ...]:
    """The indices in ``saved``, the forward's outputs, of the inputs ``read`` of the backward.

    Generator states, with which a checkpoint draws again, have other names in each, and are matched by order.
    """
    states = iter([name for name in saved if name not in read])
    return tuple(saved.index(next(states) if name.startswith(RANDOM_STATE) else name) for name in read)


class _Weights(torch.autograd.Function):
    """The weight half: its result takes the parameters' place in the region's graph, and has no value."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *parameters: Tensor) -> Tensor:
        ctx.call = call
        return parameters[0].new_zeros(()) if parameters else torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        left, ctx.call.left = ctx.call.left, None
        return None, *_run(ctx.call.graphs.weight_half, left)


class SplitRegion(torch.autograd.Function):
    """The forward of a region, and the input half of its backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, weights: Tensor, *_: Tensor) -> Any:
        """The region's outputs; ``weights``, the result of `_Weights`, takes the place of its parameters."""
        graphs = call.graphs
        arguments = [each.detach() if isinstance(each, Tensor) else each for each in call.arguments]
        call.arguments = ()
        made = _run(graphs.forward, arguments)
        returned, left = made[: graphs.outputs], made[graphs.outputs :]
        saved = [left[place] for place in graphs.order]
        ctx.call, ctx.weights = call, (weights.dtype, weights.device)
        ctx.numbers = {place: value for place, value in enumerate(saved) if not isinstance(value, Tensor)}
        ctx.save_for_backward(*(value for value in saved if isinstance(value, Tensor)))
        others = (each for index, each in enumerate(returned) if index not in graphs.differentiable)
        ctx.mark_non_differentiable(*(each for each in others if isinstance(each, Tensor)))
        return tuple(returned)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradients of ``inputs``; what the weight half needs is kept for it."""
        call, graphs = ctx.call, ctx.call.graphs
        arrived = [gradients[index] for index in graphs.differentiable]
        tangents = [each.contiguous(memory_format=kind) for each, kind in zip(arrived, graphs.formats, strict=True)]
        saved = list(ctx.saved_tensors)
        for place, number in ctx.numbers.items():
            saved.insert(place, number)
        have = [*saved, *tangents]
        made = _run(graphs.input_half, have)
        count = len(graphs.inputs)
        call.left = [*(have[index] for index in graphs.kept), *made[count:]]
        dtype, device = ctx.weights
        return None, torch.zeros((), dtype=dtype, device=device), *made[:count]


def _run(function: GraphFunction, arguments: Sequence[Any]) -> list[Any]:
    """Run a graph, whose casts are in it, whatever the autocast around."""
    kinds = {each.device.type for each in arguments if isinstance(each, Tensor)}
    kind = next((kind for kind in kinds if kind != "cpu"), "cpu")
    if not torch.is_autocast_enabled(kind):
        return list(function(*arguments))
    with torch.autocast(kind, enabled=False):
        return list(function(*arguments))


def _format_of(tangent: Tensor) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for kind in (torch.contiguous_format, formats.get(tangent.dim())):
        if kind is not None and tangent.is_contiguous(memory_format=kind):
            return kind
    raise RuntimeError("it has an output that is neither contiguous nor channels last")


def halves(
    backward: fx.GraphModule, inputs: Sequence[fx.Node], parameters: Sequence[fx.Node]
) -> tuple[fx.GraphModule, fx.GraphModule, tuple[int, ...]]:
    """A backward's graph in two: nodes that ``inputs`` need, and the others that ``parameters`` need.

    Returns:
        The input half, from all placeholders to ``inputs`` and those of its nodes that the weight half reads; the
        weight half, from the placeholders that it reads and those nodes to ``parameters``; and which placeholders.
    """
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    first = _needed(inputs)
    late = _needed(parameters) - first
    read = {node for one in late for node in one.all_input_nodes} | (set(parameters) & first)
    given = ("placeholder", "get_attr")
    shared = [node for node in backward.graph.nodes if node in read & first and node.op not in given]
    kept = [node for node in placeholders if node in read or node in parameters]
    input_half = _extracted(backward, placeholders, [*inputs, *shared])
    weight_half = _extracted(backward, [*kept, *shared], parameters)
    return input_half, weight_half, tuple(placeholders.index(node) for node in kept)


def _needed(outputs: Iterable[fx.Node], given: Container[fx.Node] = ()) -> set[fx.Node]:
    """The nodes that ``outputs`` are computed from, up to those ``given``."""
    found: set[fx.Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node not in found and node not in given:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _extracted(module: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    needed = _needed(outputs, made)
    for node in module.graph.nodes:
        if node in needed and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in outputs))
    return fx.GraphModule(module, graph)


def _copy_views(module: fx.GraphModule) -> None:
    """Outputs that are views of what the region has computed become copies; views of inputs stay."""
    given = {_storage_of(node) for node in module.graph.nodes if node.op == "placeholder"}
    for node in dict.fromkeys(each for each in _outputs_of(module) if isinstance(each, fx.Node)):
        value = _value_of(node)
        if isinstance(value, Tensor) and is_view(value) and _storage_of(node) not in given:
            (end,) = (user for user in module.graph.nodes if user.op == "output")
            with module.graph.inserting_before(end):
                copy = module.graph.call_function(torch.clone, (node,))
            copy.meta = dict(node.meta)
            end.replace_input_with(node, copy)
    module.recompile()


def _storage_of(node: fx.Node) -> Any:
    value = _value_of(node)
    return storage_key(value) if isinstance(value, Tensor) else node


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _outputs_of(module: fx.GraphModule) -> Sequence[Any]:
    (returned,) = next(node for node in module.graph.nodes if node.op == "output").args
    return returned if isinstance(returned, (tuple, list)) else (returned,)


def _has_gradient(node: Any) -> bool:
    value = _value_of(node) if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.requires_grad


# ---- Parts of torch without a public form; tests pin what each does. A torch that lacks one fails at `compile_split`.

RANDOM_STATE = "rng_state_output"  # how the backward of `forward_and_backward` names the states of generators
_JOINT = "torch._functorch.aot_autograd", "aot_export_joint_simple"
_PARTITION = "functorch.compile", "min_cut_rematerialization_partition"
_STORAGE = "torch.multiprocessing.reductions", "StorageWeakRef"


def joint_graph(region: fx.GraphModule, examples: Sequence[Any]) -> fx.GraphModule:
    """The graph from ``(examples, tangents)`` to the outputs of ``region`` and one gradient (or None) per example.

    Raises:
        RuntimeError, AssertionError, NotImplementedError, ValueError: the region has no such graph.
    """
    made: fx.GraphModule = _part(*_JOINT)(region, tuple(examples), trace_joint=True)
    return made


def forward_and_backward(
    joint: fx.GraphModule, examples: Sequence[Any], *, outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph where the least is saved: forward (outputs, saved values), backward from saved and tangents."""
    made: tuple[fx.GraphModule, fx.GraphModule] = _part(*_PARTITION)(joint, examples, num_fwd_outputs=outputs)
    return made


def is_view(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a view of another, as autograd counts views."""
    return tensor._is_view()  # noqa: SLF001


def storage_key(tensor: Tensor) -> Any:
    """Equal for tensors over one memory, fake ones as well."""
    return _part(*_STORAGE)(tensor.untyped_storage())


def _part(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _lacking(f"{module}.{name}") from error


def _lacking(name: str) -> SplitBackwardError:
    return SplitBackwardError(
        f'torch {torch.__version__} has no {name}, by which compile="split" cuts a compiled backward in halves; '
        'compile layers whole (compile="whole"), or leave them in eager mode'
    )
