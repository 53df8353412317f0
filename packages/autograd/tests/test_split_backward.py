"""I and W together are the whole backward, bit for bit, and nothing in them runs twice."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from autograd_kit.blocks import WIDTH, Residual
from autograd_kit.custom_functions import Scale
from autograd_kit.gradients import assert_same_gradients
from autograd_kit.operators import CountOps
from pipegrid.autograd.partition import divide, input_path_of, outline_of
from pipegrid.autograd.split_backward import WeightHalf, backward_inputs, backward_weights
from pipegrid.autograd.unsplittable import SplitBackwardError, require_splittable


class FusedLinear(torch.autograd.Function):
    """Accumulates into ``main_grad`` itself, and returns nothing for its weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        weight.main_grad += grad.t() @ x
        return grad @ weight, None


class Block(Residual):
    """A residual block with dropout, which counts how often its forward ran."""

    def __init__(self):
        super().__init__()
        self.dropout, self.forwards = nn.Dropout(0.25), 0

    def forward(self, x):
        self.forwards += 1
        return self.dropout(super().forward(x))


class Stage(nn.Module):
    """A function of the stage and ``inputs`` tensors to its outputs, which uses the stage's layers and parameters."""

    def __init__(self, function, *, inputs=1, **parts):
        super().__init__()
        self.function, self.inputs = function, inputs
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


again = partial(checkpoint, use_reentrant=False)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def plain(function=lambda stage, x: [stage.second(stage.first(x))]):
    return Stage(function, first=Block(), second=Block())


def checkpointed():
    return plain(lambda stage, x: [again(stage.second, again(stage.first, x))])


def nested_checkpoints():
    return plain(lambda stage, x: [again(lambda x: stage.second(again(stage.first, x)), x)])


def custom(*, run=lambda inner, x: inner(x)):
    """A custom Function between two layers."""

    def forward(stage, x):
        return [run(lambda x: stage.last(Scale.apply(stage.first(x), stage.weight)), x)]

    return Stage(forward, first=linear(), last=linear(), weight=nn.Parameter(torch.rand(WIDTH) + 1))


def custom_checkpointed():
    return custom(run=again)


def shared():
    """One layer used twice in a row, one norm used twice, and a weight that a custom Function shares."""

    def forward(stage, x):
        x = stage.norm(torch.tanh(stage.layer(x)))
        return [stage.norm(stage.layer(stage.own(Scale.apply(x, stage.norm.weight))))]

    return Stage(forward, layer=linear(), norm=nn.LayerNorm(WIDTH), own=linear())


def wide():
    """Several inputs, one of them unused and one of integers; several outputs, one an input and one without grad."""

    def forward(stage, x, y, unused):
        top, bottom = (stage.first(x) * stage.second(y)).chunk(2)
        out, (hidden, _) = stage.cell(x[None])
        return [top, out[0] + hidden.sum(), stage.slope(bottom), x, torch.zeros(2)]

    cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)
    return Stage(forward, inputs=3, first=linear(), second=linear(), cell=cell, slope=nn.PReLU(WIDTH))


def derived():
    """Weights that are computed from parameters, some of them by a custom Function."""

    def forward(stage, x):
        weight = Scale.apply(stage.direction, stage.size)
        return [torch.tanh(torch.nn.functional.linear(x, weight / weight.norm(), stage.size * 2))]

    direction, size = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.rand(WIDTH) + 1)
    return Stage(forward, direction=direction, size=size)


def in_place():
    """Parts of an activation are overwritten, by a parameter too."""

    def forward(stage, x):
        x = stage.layer(x) * 1
        x[:, 1] = stage.column
        x[:, 2].mul_(3)
        return [x.sin_()]

    return Stage(forward, layer=linear(), column=nn.Parameter(torch.randn(4)))


def mixed():
    """Convolution, batch norm, attention, a product of two tensors of the input path, a scatter."""

    def forward(stage, x, y):
        x = stage.norm(stage.convolution(x[None]))
        y, weights = stage.attention(x, y[None], y[None])
        z = stage.bilinear(x[0], y[0])
        return [torch.cat([z, (x[0] @ y[0].t()) @ z]), weights.amax(-1), z.index_select(0, torch.tensor([1, 1, 3]))]

    attention, bilinear = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Bilinear(WIDTH, WIDTH, WIDTH)
    convolution, norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)
    return Stage(forward, inputs=2, convolution=convolution, norm=norm, attention=attention, bilinear=bilinear)


def frozen():
    """One of two layers is not trained."""
    layer = linear().requires_grad_(False)
    return Stage(lambda stage, x: [stage.head(stage.layer(x).sin())], layer=layer, head=linear())


def empty():
    return Stage(lambda stage, x: [x])


def first():
    """A first stage: nothing to send back."""
    words = torch.tensor([0, 3, 3, 1])
    return Stage(lambda stage: [stage.block(stage.table(words))], inputs=0, table=nn.Embedding(4, WIDTH), block=Block())


KINDS = [
    *(plain, checkpointed, nested_checkpoints, custom, custom_checkpointed),
    *(shared, wide, derived, in_place, mixed, frozen, empty, first),
]


def made(kind):
    torch.manual_seed(5)
    return kind().double()


def forwarded(model):
    """The model's outputs that require grad, a gradient for each, and its inputs."""
    torch.manual_seed(7)
    inputs = [torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(model.inputs)]
    outputs = [tensor for tensor in model(*inputs) if tensor.requires_grad]
    return outputs, [torch.randn_like(tensor) for tensor in outputs], inputs


def whole(kind):
    model = made(kind)
    outputs, gradients, inputs = forwarded(model)
    with CountOps() as ops:
        torch.autograd.backward(outputs, gradients)
    return model, [tensor.grad for tensor in inputs], ops.counts


def first_half(model):
    outputs, gradients, inputs = forwarded(model)
    roots = [get_gradient_edge(tensor) for tensor in outputs]
    del outputs
    return backward_inputs(roots, gradients, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_both_halves_are_the_whole_backward_bit_for_bit(kind):
    expected, expected_inputs, _ = whole(kind)
    model = made(kind)
    gradients, half = first_half(model)
    backward_weights(half)
    torch.testing.assert_close(gradients, expected_inputs, rtol=0, atol=0)
    assert_same_gradients(model, expected, rtol=0, atol=0)


# An LSTM and a PReLU compute both halves in one operator; gradients of a shared parameter are added up twice.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (wide, shared)])
def test_nothing_is_computed_twice(kind):
    _, _, expected = whole(kind)
    model = made(kind)
    outputs, gradients, inputs = forwarded(model)
    with CountOps() as ops:
        _, half = backward_inputs([get_gradient_edge(tensor) for tensor in outputs], gradients, inputs)
        backward_weights(half)
    # The engine's accumulators clone what others still hold; sums and products are what counts.
    for counts in (ops.counts, expected):
        for name in [
            name for name in counts if name.split(".")[1] in ("detach", "clone", "new_empty_strided", "copy_")
        ]:
            del counts[name]
    assert ops.counts == expected


def test_each_half_has_half_of_the_matrix_products():
    model = made(plain)
    outputs, gradients, inputs = forwarded(model)
    roots = [get_gradient_edge(tensor) for tensor in outputs]
    with CountOps() as of_inputs:
        _, half = backward_inputs(roots, gradients, inputs)
    with CountOps() as of_weights:
        backward_weights(half)
    for half in (of_inputs, of_weights):
        assert half.count("aten.mm.", "aten.addmm.") == 4
    assert of_weights.count("tanh") == 0


def test_at_i_no_parameter_that_waits_has_a_gradient():
    model = made(plain)
    _, half = first_half(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    backward_weights(half)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("kind", [custom, custom_checkpointed])
def test_a_custom_function_runs_once_and_whole_at_i(kind):
    model = made(kind)
    Scale.runs = 0
    _, half = first_half(model)
    assert Scale.runs == 1
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"weight"}
    backward_weights(half)
    assert Scale.runs == 1
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_function_that_accumulates_by_itself_leaves_nothing_for_w():
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    weight.main_grad = torch.zeros_like(weight)
    x = torch.randn(3, WIDTH, requires_grad=True)
    output = FusedLinear.apply(x, weight)
    gradient = torch.randn_like(output)
    _, half = backward_inputs([get_gradient_edge(output)], [gradient], [x])
    assert half.calls == ()
    backward_weights(half)
    assert torch.equal(weight.main_grad, gradient.t() @ x.detach())
    assert weight.grad is None


def test_a_shared_layer_is_computed_at_i_and_the_others_wait():
    model = made(shared)
    _, half = first_half(model)
    waiting = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert waiting == {"own.weight", "own.bias"}
    backward_weights(half)
    assert model.own.weight.grad is not None


def test_without_inputs_everything_waits_for_w():
    model = made(first)
    gradients, half = first_half(model)
    assert gradients == []
    assert all(parameter.grad is None for parameter in model.parameters())
    backward_weights(half)
    assert all(parameter.grad is not None for parameter in model.parameters())


def both_of(gate, x, w):
    return [x * gate, gate @ w]


APART = {
    "an output that no input reaches": lambda x, w, v: [torch.tanh(x @ w), torch.tanh(v)],
    "of a parameter of the input path": lambda x, w, v: [torch.tanh(x @ w @ v), torch.tanh(w)],
    "behind one node of two": lambda x, w, v: both_of(torch.sigmoid(v), x, w),
    "beside an input passed on": lambda x, w, v: [x, torch.tanh(w @ v)],
    "a parameter": lambda x, w, v: [x @ w, v],
}


@pytest.mark.parametrize("name", APART)
def test_an_output_off_the_input_path_has_its_gradient(name):
    torch.manual_seed(0)
    leaves = [torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    twins = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    outputs, expected = APART[name](*leaves), APART[name](*twins)
    gradients = [torch.randn_like(output) for output in outputs]
    found, half = backward_inputs([get_gradient_edge(output) for output in outputs], gradients, leaves[:1])
    backward_weights(half)
    torch.autograd.backward(expected, gradients)
    for mine, twin in zip([found[0], leaves[1].grad, leaves[2].grad], twins, strict=True):
        assert (mine is None) == (twin.grad is None)
        assert mine is None or torch.allclose(mine, twin.grad, rtol=1e-12)


@pytest.mark.parametrize("kind", [checkpointed, nested_checkpoints])
def test_a_checkpointed_region_is_recomputed_once_for_both_halves(kind):
    _, expected, _ = whole(kind)
    once = made(kind)
    outputs, gradients, _ = forwarded(once)
    torch.autograd.backward(outputs, gradients)
    model = made(kind)
    _, half = first_half(model)
    assert min(model.first.forwards, model.second.forwards) >= 2
    backward_weights(half)
    assert (model.first.forwards, model.second.forwards) == (once.first.forwards, once.second.forwards)
    assert len(expected) == 1


def test_hooks_on_parameters_fire_once_as_in_a_whole_backward():
    model = made(custom)
    fired = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: fired.append(("tensor", name)))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(("accumulated", name)))
    keep = [get_gradient_edge(parameter).node for parameter in model.parameters()]
    for node, (name, _) in zip(keep, model.named_parameters(), strict=True):
        node.register_hook(lambda *_, name=name: fired.append(("node", name)))
    _, half = first_half(model)
    kinds = ["tensor", "accumulated", "node"]
    assert fired == [(kind, "weight") for kind in kinds]
    backward_weights(half)
    assert Counter(fired) == {(kind, name): 1 for kind in kinds for name, _ in model.named_parameters()}


def test_a_hook_that_changes_an_activations_gradient_counts_once():
    def run(split):
        torch.manual_seed(0)
        layer, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        x = torch.randn(3, WIDTH, requires_grad=True)
        hidden = layer(x)
        hidden.register_hook(lambda grad: 3 * grad)
        output = head(hidden.tanh())
        if split:
            _, half = backward_inputs([get_gradient_edge(output)], [torch.ones_like(output)], [x])
            backward_weights(half)
        else:
            torch.autograd.backward(output, torch.ones_like(output))
        return layer.weight.grad

    assert torch.equal(run(split=True), run(split=False))


def storage(tensor):
    return StorageWeakRef(tensor.untyped_storage())


def test_i_frees_what_only_the_input_half_needed_and_w_the_rest():
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    x = torch.randn(3, WIDTH, requires_grad=True)
    hidden = first(x).exp()  # saved by exp for its input half, and by nothing else
    bent = hidden.sin()  # saved by the last layer for its weight
    output = last(bent)
    root, gradient = get_gradient_edge(output), torch.ones_like(output)
    of_hidden, of_bent, of_output = storage(hidden), storage(bent), storage(output)
    del hidden, bent, output
    assert of_output.expired(), "nothing saved the output; its root is enough to start from"
    assert not of_hidden.expired()
    _, half = backward_inputs([root], [gradient], [x])
    del root
    assert of_hidden.expired()
    assert not of_bent.expired()
    backward_weights(half)
    del half
    assert of_bent.expired()


def test_recomputed_tensors_are_kept_for_w_and_then_go():
    seen = []

    def region(x):
        hidden = first(x).exp()
        bent = hidden.sin()
        seen.append((storage(hidden), storage(bent)))
        return last(bent)

    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    x = torch.randn(3, WIDTH, requires_grad=True)
    output = checkpoint(region, x, use_reentrant=False).sum()
    assert all(ref.expired() for ref in seen[0]), "a checkpointed forward keeps nothing inside"
    _, half = backward_inputs([get_gradient_edge(output)], [torch.ones_like(output)], [x])
    del output
    of_hidden, of_bent = seen[1]
    assert of_hidden.expired()
    assert not of_bent.expired()
    backward_weights(half)
    del half
    assert of_bent.expired()
    assert len(seen) == 2


def test_layers_side_by_side_take_one_call_of_the_engine():
    parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    x = torch.randn(3, WIDTH, requires_grad=True)
    output = parts[0](x) * parts[1](x) * parts[2](x).exp()
    root = get_gradient_edge(output)
    owners = divide(outline_of([root], [x])[1]).owners
    assert len(owners) == 3
    assert {len(owner.sinks) for owner in owners} == {2}
    _, half = backward_inputs([root], [torch.ones_like(output)], [x])
    assert len(half.calls) == 1


def test_w_of_nothing_does_nothing():
    backward_weights(WeightHalf())


def refused(model):
    outputs, _, inputs = forwarded(model)
    path = input_path_of([get_gradient_edge(tensor) for tensor in outputs], inputs)
    require_splittable(path, 3, model)


def test_reentrant_checkpointing_is_refused_by_name():
    model = plain(lambda stage, x: [checkpoint(stage.second, stage.first(x), use_reentrant=True)]).double()
    with pytest.raises(SplitBackwardError, match=r"stage 3: module 'second' \(Block\) is checkpointed with use_re"):
        refused(model)
    x = torch.randn(2, requires_grad=True)
    output = checkpoint(torch.sin, x, use_reentrant=True)
    path = input_path_of([get_gradient_edge(output)], [x])
    with pytest.raises(SplitBackwardError, match=r"stage 0: function 'sin' is checkpointed"):
        require_splittable(path, 0, None)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
@pytest.mark.parametrize("part", ["whole", "layer"])
def test_a_compiled_region_runs_whole_at_i(part):
    """Its backward may reuse what it saved, so nothing of its graph is kept: one run, and nothing is left for W."""
    model, reference = made(plain).eval(), made(plain).eval()
    if part == "whole":
        model = torch.compile(model, backend="aot_eager")
    else:
        model.second.compile(backend="aot_eager")
    outputs, gradients, inputs = forwarded(model)  # torch.compile's wrapper has the attributes of the model
    compiled = []
    found, half = backward_inputs(
        [get_gradient_edge(tensor) for tensor in outputs],
        gradients,
        inputs,
        on_compiled=lambda: compiled.append(True),
    )
    assert compiled
    assert not half.calls
    others, same, leaves = forwarded(reference)
    torch.autograd.backward(others, same)
    for mine, other in zip(found, leaves, strict=True):
        torch.testing.assert_close(mine, other.grad, rtol=1e-12, atol=1e-14)
    assert_same_gradients(model, reference, rtol=1e-12, atol=1e-14)


def test_what_can_be_split_is_not_refused():
    for kind in KINDS:
        refused(made(kind))
