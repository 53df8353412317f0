"""Compiled regions whose backward runs in halves: forward, input gradients and weight gradients of one joint graph."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch._dynamo
import torch._functorch.aot_autograd
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing import reductions
from torch.utils.checkpoint import checkpoint

from pipegrid.autograd import SplitBackwardError, backward_inputs, backward_weights, compile_split
from pipegrid.autograd.compiled import halves
from pipegrid.schedules import PipelineError, PipelineRuntime, lower, zero_bubble_v

from ..kit.stages import Function

WIDTH = 6
# Dynamo looks at the gradient of what arrived, which is no leaf of its graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _new_compiler():
    """Dynamo compiles a forward a few times only, then leaves it in eager mode."""
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return x + (y if mask is None else y.masked_fill(mask, 0.0))


class Model(nn.Module):
    """An eager layer, two compiled ones, an eager one."""

    def __init__(self, kind, *, tied=False, checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        if tied:
            self.blocks[2].up.weight = self.blocks[1].up.weight
        self.checkpointed = checkpointed

    def forward(self, x, *args):
        for block in self.blocks:
            x = checkpoint(block, x, *args, use_reentrant=False) if self.checkpointed else block(x, *args)
        return x


def pair(kind=Block, **options):
    """Two equal models, of one of which the middle is compiled."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Model(kind, **options).double())
    for block in made[0].blocks[1:3]:
        compile_split(block, backend="aot_eager")
    return made


def require_equal(compiled, eager, x, *args):
    """I leaves parameters of split layers without a gradient; after W all are those of a whole backward."""
    outputs = []
    for model in (compiled, eager):
        given = x.clone().requires_grad_()
        torch.manual_seed(5)
        outputs.append((model(given, *args), given))
    (mine, own), (other, theirs) = outputs
    assert torch.equal(mine, other)
    gradient = torch.randn_like(other)
    other.backward(gradient)
    fired = []
    for name, parameter in compiled.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: fired.append(name))
    (found,), half = backward_inputs([get_gradient_edge(mine)], [gradient], [own])
    torch.testing.assert_close(found, theirs.grad, rtol=1e-12, atol=1e-14)
    at_i = list(fired)
    backward_weights(half)
    for (name, parameter), same in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, same.grad, rtol=1e-12, atol=1e-14, msg=name)
    return at_i, fired


@pytest.mark.parametrize("mask", [False, True])
def test_a_region_runs_in_halves_between_eager_layers(mask):
    compiled, eager = pair()
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    at_i, fired = require_equal(compiled, eager, x, *([x > 1] if mask else []))
    assert not at_i
    assert sorted(fired) == sorted(name for name, _ in compiled.named_parameters())


def test_a_whole_backward_of_a_split_region_is_that_of_an_eager_layer():
    compiled, eager = pair()
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    for _ in range(2):
        for model in (compiled, eager):
            model(x).square().sum().backward()
    for mine, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        assert torch.equal(compiled(x), eager(x))


def test_a_parameter_of_two_regions_and_a_frozen_one():
    compiled, eager = pair(tied=True)
    for model in (compiled, eager):
        model.blocks[2].down.requires_grad_(False)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    outputs = [model(x) for model in (compiled, eager)]
    outputs[1].sum().backward()
    outputs[0].sum().backward()
    for mine, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-14)
    compiled, eager = pair(tied=True)
    require_equal(compiled, eager, x)


def test_a_checkpointed_region_is_recomputed_at_i():
    compiled, eager = pair(checkpointed=True)
    at_i, _ = require_equal(compiled, eager, torch.randn(3, WIDTH, dtype=torch.float64))
    assert not at_i


def test_dropout_in_a_region_has_one_mask_for_both_halves():
    class Drops(Block):
        def forward(self, x):
            return x + nn.functional.dropout(self.down(x), 0.5)

    require_equal(*pair(Drops), torch.randn(3, WIDTH, dtype=torch.float64))


def test_dropout_in_a_checkpoint_in_a_region_is_drawn_again_alike():
    class Checkpointed(Block):
        """Draws inside what is computed again."""

        def forward(self, x):
            def run(x):
                return x + nn.functional.dropout(self.down(nn.functional.dropout(x, 0.3)), 0.5)

            return checkpoint(run, x, use_reentrant=False) + nn.functional.dropout(x, 0.5)

    for rows in (3, 5):
        require_equal(*pair(Checkpointed), torch.randn(rows, WIDTH, dtype=torch.float64))


def test_a_view_of_what_a_region_computed_is_an_output():
    class Turned(Block):
        """Returns a view of what it has computed."""

        def forward(self, x):
            return (
                (x + self.down(x)).reshape(-1, 2, WIDTH // 2).transpose(0, 1).transpose(0, 1).flatten(1).unsqueeze(0)[0]
            )

    require_equal(*pair(Turned), torch.randn(3, WIDTH, dtype=torch.float64))


def test_a_region_that_ends_at_a_graph_break_has_outputs_without_gradients():
    class Broken(Block):
        """Its first region returns a mask beside the activation."""

        def forward(self, x):
            mask, y = x > 0, self.up(x)
            torch._dynamo.graph_break()
            return x + self.down(y.masked_fill(mask, 0.0))

    at_i, _ = require_equal(*pair(Broken), torch.randn(3, WIDTH, dtype=torch.float64))
    assert not at_i


def test_a_region_of_dynamic_shapes_is_compiled_once():
    torch.manual_seed(0)
    compiled, eager = Block().double(), Block().double()
    eager.load_state_dict(compiled.state_dict())
    compile_split(compiled, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (3, 5, 8):
            x = torch.randn(length, WIDTH, dtype=torch.float64, requires_grad=True)
            mine, other = (model(x * 1.0) for model in (compiled, eager))
            torch.autograd.backward((mine.square().sum(), other.square().sum()))
    for mine, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_autocast_is_that_of_the_forward():
    torch.manual_seed(0)
    compiled, eager = Block(), Block()
    eager.load_state_dict(compiled.state_dict())
    compile_split(compiled, backend="aot_eager")
    x = torch.randn(3, WIDTH)
    for model in (compiled, eager):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().sum()
            loss.backward()  # inside, as some scripts do
    for mine, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=2e-2, atol=2e-2)


def test_each_node_of_a_backward_is_in_one_half():
    """A product for the gradient of the input, one for that of the weight; the tangent's chain is at I alone."""
    graph = torch.fx.Graph()
    x, weight, tangent = (graph.placeholder(name) for name in ("x", "weight", "tangent"))
    chain = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, 2.0))
    of_input = graph.call_function(torch.ops.aten.mm.default, (chain, weight))
    turned = graph.call_function(torch.ops.aten.t.default, (chain,))
    of_weight = graph.call_function(torch.ops.aten.mm.default, (turned, x))
    graph.output((of_input, of_weight))
    first, second, kept = halves(torch.fx.GraphModule(nn.Module(), graph), [of_input], [of_weight])
    names = [[node.name for node in half.graph.nodes if node.op == "call_function"] for half in (first, second)]
    assert names == [["mul_tensor", "mm_default"], ["t_default", "mm_default_1"]]
    assert kept == (0,)
    values = torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 5)
    gradient, left = first(*values)
    assert torch.equal(gradient, 2 * values[2] @ values[1])
    assert torch.equal(second(values[0], left)[0], (2 * values[2]).t() @ values[0])


class Counts(Block):
    """Writes to a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps.add_(1)
        return self.down(x)


class Views(Block):
    def forward(self, x):
        return self.down(x), x.view(-1)


@pytest.mark.parametrize(("kind", "reason"), [(Counts, "input mutations"), (Views, "outputs that alias inputs")])
def test_a_region_that_cannot_be_split_is_one_line(kind, reason):
    block = kind()
    compile_split(block, backend="aot_eager")
    text = rf'^a compiled region of {kind.__name__} cannot be split, as compile="split" asks: .*{reason}.*'
    with pytest.raises(SplitBackwardError, match=text) as raised:
        block(torch.ones(2, WIDTH, requires_grad=True))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch._functorch.aot_autograd, "aot_export_joint_simple"), (reductions, "StorageWeakRef")],
)
def test_a_torch_without_joint_graphs_is_one_error_before_anything_runs(monkeypatch, owner, name):
    importlib.import_module("functorch.compile")  # which imports the name, too
    monkeypatch.delattr(owner, name)
    block = Block()
    with pytest.raises(SplitBackwardError, match=rf'has no torch\.\S+\.{name}, by which compile="split" cuts'):
        compile_split(block)
    assert block(torch.ones(2, WIDTH)).shape == (2, WIDTH)


@pytest.mark.nightly
@pytest.mark.ranks(2)
def test_a_tensor_parallel_region_cannot_be_split(ranks):
    block = Block()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, init_device_mesh(ranks.device.type, (2,)), plan)
    compile_split(block, backend="aot_eager")
    with pytest.raises(SplitBackwardError, match="a compiled region of Block cannot be split.*tensor subclass"):
        block(torch.ones(2, WIDTH, requires_grad=True))


def test_a_step_says_which_region_cannot_be_split():
    block = Counts()
    compile_split(block, backend="aot_eager")
    plan = lower(zero_bubble_v(1, 2))
    stages = {
        0: Function(plan.graph, 0, lambda microbatch: torch.ones(2, WIDTH, requires_grad=True) * 1.0, block),
        1: Function(plan.graph, 1, lambda microbatch, x: block(x).sum(), block),
    }
    with pytest.raises(PipelineError, match="SplitBackwardError: a compiled region of Counts cannot be split"):
        PipelineRuntime(plan, stages, None).step()


def test_a_region_lives_until_its_weight_half_has_run():
    """Before torch 2.13 nothing but the graph holds it: neither the tensors, which are gone, nor the edges to it."""
    compiled, eager = pair()
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    given = x.clone().requires_grad_()
    y = compiled.blocks[2](compiled.blocks[1](given))
    roots, gradient = [get_gradient_edge(y)], torch.ones_like(y)
    del y
    (found,), half = backward_inputs(roots, [gradient], [given])
    del roots
    backward_weights(half)
    other = x.clone().requires_grad_()
    eager.blocks[2](eager.blocks[1](other)).backward(gradient)
    torch.testing.assert_close(found, other.grad)
    for mine, theirs in zip(compiled.blocks[1:3].parameters(), eager.blocks[1:3].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_stages_of_split_regions_run_in_halves():
    plan = lower(zero_bubble_v(1, 3))
    models = pair()
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    for model in models:
        stages = {
            0: Function(plan.graph, 0, lambda microbatch, model=model: model.blocks[1](model.blocks[0](x)), model),
            1: Function(
                plan.graph, 1, lambda microbatch, y, model=model: model.blocks[3](model.blocks[2](y)).sum(), model
            ),
        }
        runtime = PipelineRuntime(plan, stages, None)
        runtime.step()
        assert "runs whole at I" not in runtime.describe()
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-14)
