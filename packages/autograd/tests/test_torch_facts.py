"""What the split backward takes for granted about torch, so that a new torch says so here."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import checkpoint

from pipegrid.autograd import is_compiled_in_place
from pipegrid.autograd.compiled import forward_and_backward, is_view, joint_graph, storage_key
from pipegrid.autograd.engine import run_backward


def product(rows=3, width=4):
    """``(x @ weight).tanh()``, and the node of the matrix product."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((rows, width), (width, width))
    )
    output = (x @ weight).tanh()
    return x, weight, output, output.grad_fn.next_functions[0][0]


def test_a_gradient_can_be_taken_in_the_middle_while_it_flows_on():
    x, weight, output, node = product()
    ones = torch.ones_like(output)
    flowed, taken = torch.autograd.grad([output], [x, GradientEdge(node, 0)], [ones], retain_graph=True)
    assert torch.allclose(taken, 1 - output**2)
    assert torch.equal(flowed, taken @ weight.t())


def test_it_is_taken_before_the_hooks_of_the_tensor_there():
    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    middle = x * weight
    middle.register_hook(lambda grad: 3 * grad)
    flowed, taken = torch.autograd.grad(
        [middle * 1], [x, GradientEdge(middle.grad_fn, 0)], [torch.ones(2)], retain_graph=True
    )
    assert flowed.tolist() == [3, 3]
    assert taken.tolist() == [1, 1]


def test_a_backward_from_a_node_to_some_leaves_leaves_the_others_alone():
    x, weight, output, node = product()
    sink = get_gradient_edge(weight)
    torch.autograd.backward([GradientEdge(node, 0)], [torch.ones_like(output)], inputs=[sink])
    assert torch.equal(weight.grad, x.detach().t() @ torch.ones_like(output))
    assert x.grad is None


def test_an_edge_is_enough_of_a_freed_output_to_start_a_backward():
    x, _, output, _ = product()
    expected = torch.autograd.grad(output, x, torch.ones_like(output), retain_graph=True)
    edge, ones = get_gradient_edge(output), torch.ones_like(output)
    del output
    assert torch.equal(torch.autograd.grad([edge], [x], [ones])[0], expected[0])


def test_the_engine_ends_at_the_inputs_it_is_given_and_says_what_was_not_reached():
    x, weight, output, node = product()
    unused, ones = torch.ones(2, requires_grad=True), torch.ones_like(output)
    taken, flowed, nothing = run_backward(
        [get_gradient_edge(output)],
        [ones],
        inputs=[GradientEdge(node, 0), x, unused],
        keep_graph=True,
        accumulate=False,
    )
    assert torch.equal(flowed, taken @ weight.t())
    assert nothing is None
    assert x.grad is weight.grad is None
    run_backward([GradientEdge(node, 0)], [taken], inputs=[get_gradient_edge(weight)])
    assert torch.equal(weight.grad, x.detach().t() @ taken)
    assert x.grad is None


def test_the_engine_adds_to_every_leaf_where_it_is_given_no_inputs():
    x, weight, output, _ = product()
    expected = torch.autograd.grad(output, [x, weight], torch.ones_like(output), retain_graph=True)
    run_backward([output], [torch.ones_like(output)])
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_the_engine_sums_up_a_gradient_that_is_too_large():
    """So whoever calls it sees to the shapes."""
    x = torch.ones(4, requires_grad=True)
    run_backward([x * 2], [torch.ones(3, 4)])
    assert x.grad.tolist() == [6] * 4


def test_torch_s_wrapper_of_the_engine_gives_the_same_and_logs_nodes_where_it_is_asked_to(caplog):
    def gradients():
        x, weight, output, _ = product()
        run_backward([output], [torch.ones_like(output)])
        return x.grad, weight.grad

    logger = logging.getLogger("torch.autograd.graph")
    logger.addHandler(caplog.handler)  # torch's loggers pass nothing up once they are set up
    try:
        plain = gradients()
        assert not caplog.records
        caplog.set_level(logging.DEBUG, logger=logger.name)
        assert all(map(torch.equal, plain, gradients()))
        assert any("TanhBackward" in record.getMessage() for record in caplog.records)
    finally:
        logger.removeHandler(caplog.handler)


def test_an_accumulator_knows_its_tensor():
    x, weight, _, node = product()
    accumulators = [child for child, _ in node.next_functions]
    assert accumulators[0].variable is x
    assert accumulators[1].variable is weight


def test_a_node_knows_the_shape_of_each_output_after_it_was_freed():
    rows = torch.ones(3, 4, requires_grad=True) * 2
    parts = [part.clone() for part in rows.split([1, 2])]
    columns = rows.split([1, 2, 1], dim=1)
    for output, shape in zip([*parts, *columns], [(1, 4), (2, 4), (3, 1), (3, 2), (3, 1)], strict=True):
        output.data = torch.empty(1)
        assert tuple(output.grad_fn._input_metadata[output.output_nr].shape) == shape


def test_what_a_node_saved_can_be_seen_and_freed():
    _, _, output, _ = product()
    saved = output.grad_fn._raw_saved_result
    assert torch.equal(saved.data, output)
    assert saved.unpack_hook is None
    saved.register_hooks(lambda tensor: None, lambda packed: pytest.fail("unpacked"))
    assert saved.data is None


def test_what_was_not_saved_shows_as_none():
    x = torch.randn(3, 4, requires_grad=True)
    saved = (x @ torch.ones(4, 4)).grad_fn._raw_saved_self
    assert saved.data is None
    with pytest.raises(RuntimeError, match="value None is forbidden"):
        saved.register_hooks(lambda tensor: None, lambda packed: None)


def test_a_hooked_tensor_shows_what_its_hook_packed():
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: "packed", lambda packed: None):
        _, _, output, _ = product()
    assert output.grad_fn._raw_saved_result.data == "packed"
    assert output.grad_fn._raw_saved_result.unpack_hook is not None


def test_a_group_recomputes_a_checkpoint_once_and_gives_each_tensor_once():
    runs = []

    def region(x, weight):
        runs.append(1)
        return (x @ weight).tanh()

    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    output = checkpoint.checkpoint(region, x, weight, use_reentrant=False)
    node = output.grad_fn.next_functions[0][0]
    holder = node._raw_saved_self.data
    assert type(holder) is checkpoint._Holder
    assert holder.handles == {}
    group = checkpoint.GraphExecGroup()
    ones = torch.ones_like(output)
    with group:
        torch.autograd.grad([output], [x], [ones], retain_graph=True)
    assert holder.handles == {group: None}
    with group, pytest.raises(checkpoint.CheckpointError, match="already unpacked once"):
        torch.autograd.backward([GradientEdge(node, 0)], [ones], inputs=[weight])
    assert len(runs) == 2


def test_a_custom_function_always_computes_all_its_gradients():
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert ctx.needs_input_grad == (True, True)
            return grad, grad

    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    output = Both.apply(x, weight)
    assert isinstance(output.grad_fn, torch.autograd.function.FunctionCtx)
    seen = []
    output.grad_fn.register_hook(lambda grad_inputs, grad_outputs: seen.append(grad_inputs))
    torch.autograd.grad([output], [x], [torch.ones(2)])
    assert [grad.tolist() for grad in seen[0]] == [[1, 1], [1, 1]]


def test_a_joint_graph_gives_outputs_and_a_gradient_for_each_example_and_can_be_cut_between_them():
    x, weight, expected, _ = product()
    mask = torch.ones_like(expected)
    region = torch.fx.symbolic_trace(lambda x, mask, weight: ((x @ weight).tanh(), mask * 2))
    joint = joint_graph(region, (x, mask, weight))
    tangent = torch.randn_like(expected)
    (output, doubled_mask), (of_x, of_mask, of_weight) = joint([x, mask, weight], [tangent])
    torch.testing.assert_close((output, doubled_mask), (expected, mask * 2))
    torch.testing.assert_close((of_x, of_weight), torch.autograd.grad(expected, (x, weight), tangent))
    assert of_mask is None
    forward, backward = forward_and_backward(joint, (x, mask, weight), outputs=2)
    made = forward(x, mask, weight)
    kept = dict(zip([node.name for node in _outputs(forward)], made, strict=True))
    saved = [kept[node.name] for node in _inputs(backward)[:-1]]
    torch.testing.assert_close(tuple(made[:2]), (output, doubled_mask))
    torch.testing.assert_close(tuple(backward(*saved, tangent)), (of_x, None, of_weight))


def _inputs(graph):
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _outputs(graph):
    return next(node for node in graph.graph.nodes if node.op == "output").args[0]


def test_fake_tensors_over_one_memory_are_known_and_a_copy_is_no_view():
    with FakeTensorMode():
        whole = torch.ones(3, 4)
        parts = [whole.view(-1), whole[1:]]
        others = [whole.clone(), torch.ones(3, 4), whole + 1]
    assert {storage_key(part) for part in parts} == {storage_key(whole)}
    assert storage_key(whole) not in {storage_key(other) for other in others}
    assert all(map(is_view, parts))
    assert not any(map(is_view, [whole, *others]))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_node_of_cpp_without_a_class_of_its_own_shows_as_cpp_function():
    function = torch.jit.script(doubled)
    x = torch.ones(2, requires_grad=True)
    outputs = [function(x) for _ in range(3)]  # the profiled graph comes after the first runs
    assert type(outputs[-1].grad_fn).__name__ == "CppFunction"


def doubled(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).tanh()


def test_a_module_tells_of_its_compilation_in_place_only():
    layer = torch.nn.Linear(2, 2)
    assert not is_compiled_in_place(layer)
    assert not is_compiled_in_place(torch.compile(layer, backend="eager"))
    layer.compile(backend="eager")
    assert is_compiled_in_place(layer)
