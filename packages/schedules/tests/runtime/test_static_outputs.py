"""Outputs in memory that a stage writes again: the step raises, or with ``clone_outputs`` all arrive as returned."""

from __future__ import annotations

import contextlib
import gc
import time

import pytest
import torch

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.plan import compute_plan, parse_action
from pipegrid.schedules import PipelineError, PipelineRuntime, StageOutputError, gpipe, lower, verify
from pipegrid.schedules.runtime.stages.edge_queues import SendQueue
from pipegrid.schedules.runtime.stages.reused import is_shared
from pipegrid.transport import Direction, Edge, P2PCommunicator, P2PConfig

from ..kit.stages import Function

COUNT, CONSTANT = 8, 5.0
EDGE = Edge(0, 1)
PAIR = ModuleGraph({"model": 2})


def last(arrived):
    """A stage that notes what arrives, and sends its ones back as gradients."""

    def note(microbatch, payload):
        leaves = list(payload.values()) if isinstance(payload, dict) else [payload]
        arrived.append([leaf.detach().double().mean().item() for leaf in leaves])
        return sum(leaf.sum() for leaf in leaves) if leaves[0].requires_grad else None

    return Function(PAIR, 1, note)


def of_data(memory, value):
    memory[0].data.fill_(value)
    return memory[0]


def written_later(memory, value):
    memory[0].data.fill_(100.0)
    memory[0] = torch.full_like(memory[0], value)
    return memory[0]


WAYS = {  # of a stage to return the number of a microbatch in ``memory``: two tensors, there before its first forward
    "filled anew": lambda memory, value: memory[0].fill_(value),
    "written past the version counter, as a captured graph does": of_data,
    "a new tensor over the same memory each time, as captured graphs return it": (
        lambda memory, value: of_data(memory, value).detach()
    ),
    "a part of a larger buffer": lambda memory, value: memory[0].fill_(value)[: len(memory[0]) // 2],
    "two in turn": lambda memory, value: memory[int(value) % 2].fill_(value),
    "in a dict, with a constant and a tensor of its own": (
        lambda memory, value: {
            "new": torch.full_like(memory[0], value),
            "again": memory[0].fill_(value),
            "constant": memory[1],
        }
    ),
    "a new one, and the next forward writes into it": written_later,
}
AGAIN = [way for way in WAYS if WAYS[way] is not written_later]


def writing(way, size, device):
    """A stage that returns the number of each microbatch, from 1, in one of these ways."""
    memory = [torch.full((size,), CONSTANT, device=device) for _ in range(2)]
    return Function(PAIR, 0, lambda microbatch: WAYS[way](memory, microbatch + 1.0))


def expected(way):
    """The mean of each tensor of each microbatch."""
    numbers = map(float, range(1, COUNT + 1))
    return [[number, number, CONSTANT] if "constant" in way else [number] for number in numbers]


@contextlib.contextmanager
def runtime_of(ranks, *stages, plan=None, **options):
    """That of one of two ranks, whose lanes are open until both have left."""
    plan = lower(gpipe(2, COUNT)) if plan is None else plan
    config, placement = P2PConfig(deadline=30, shapes="header"), [place for (place,) in plan.placement]
    communicator = P2PCommunicator(torch.distributed.group.WORLD, config, placement=placement)
    yield PipelineRuntime(verify(plan), {stage.stage: stage for stage in stages}, communicator, **options)
    ranks.barrier()
    communicator.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", WAYS)
def test_copies_arrive_as_they_were_returned(ranks, way, mode):
    for size in (4, 100_000):
        arrived = []
        stage = last(arrived) if ranks.rank else writing(way, size, ranks.device)
        with runtime_of(ranks, stage, clone_outputs=True) as runtime, mode():
            runtime.eval()
        assert arrived == (expected(way) if ranks.rank else [])


def outcomes_of(ranks, runtime, run):
    """The texts of both ranks' failures in a run; None where there is none."""
    error = ""
    try:
        run(runtime)
    except PipelineError as failure:
        error = str(failure)
    ranks.store.set(f"outcome of {ranks.rank}", error)
    return [ranks.store.get(f"outcome of {rank}").decode() or None for rank in range(2)]


@pytest.mark.ranks(2, backend="gloo")  # the fake NCCL fails a test that writes into a message
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", AGAIN)
def test_an_output_where_one_is_under_way_raises(ranks, way, mode):
    stage = last([]) if ranks.rank else writing(way, 100_000, ranks.device)
    with runtime_of(ranks, stage) as runtime, mode():
        outcomes = outcomes_of(ranks, runtime, PipelineRuntime.eval)
    assert "StageOutputError: stage 0 wrote again into its output of microbatch 0 before edge 0>1 had" in outcomes[0]
    assert "or set clone_outputs=True" in outcomes[0]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_stage_on_the_same_rank_gets_what_was_returned(ranks, way):
    """All forwards of the first stage come before those of the second."""
    orders = [f"{stage}F{m}" for stage in range(2) for m in range(COUNT)]
    plan = compute_plan(
        [[*map(parse_action, orders)]], graph=2, placement=[0, 0], num_microbatches=COUNT, forward_only=[0, 1]
    )
    arrived = []
    stages = {0: writing(way, 4, ranks.device), 1: last(arrived)}
    PipelineRuntime(verify(lower(plan)), stages, None, clone_outputs=True).eval()
    assert arrived == expected(way)
    if way in AGAIN:
        with pytest.raises(PipelineError, match="stage 0 wrote again into its output of microbatch 0 before edge 0>1"):
            PipelineRuntime(verify(lower(plan)), stages, None).eval()


def in_one_process(orders, functions, *, clone_outputs=True, **options):
    """A run of stages that are all on one position, in this order of actions."""
    plan = compute_plan([[*map(parse_action, orders.split())]], graph=3, placement=[0, 0, 0], **options)
    graph = ModuleGraph({"model": 3})
    stages = {number: Function(graph, number, function) for number, function in enumerate(functions)}
    return PipelineRuntime(verify(lower(plan)), stages, None, clone_outputs=clone_outputs)


def test_what_another_stage_of_the_rank_writes_is_not_what_arrives():
    """Two stages share memory, as captured graphs of one memory pool: the last one writes the output of the first."""
    memory, arrived = torch.zeros(4), []

    def middle(microbatch, x):
        arrived.append(x.mean().item())
        return x.clone()

    functions = [lambda m: memory.fill_(m + 1.0), middle, lambda m, x: memory.fill_(99.0).sum()]
    orders, options = "0F0 1F0 0F1 2F0 1F1 2F1", {"num_microbatches": 2, "forward_only": [0, 1, 2]}
    in_one_process(orders, functions, **options).eval()
    assert arrived == [1.0, 2.0]
    with pytest.raises(PipelineError, match="stage 0 wrote again into its output of microbatch 1 before edge 0>1 had"):
        in_one_process(orders, functions, clone_outputs=False, **options).eval()


class Backwards(torch.autograd.Function):
    """The identity, whose backward is ``function`` of the gradient."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, flowing):
        return ctx.function(flowing), None


def test_what_the_weight_half_writes_is_not_the_gradient_that_arrives():
    """Gradients of inputs lie in memory that the W of the same stage uses, before the stage before it reads them."""
    scratch, weights = torch.zeros(4), [torch.ones(4, requires_grad=True) for _ in range(3)]

    def using_scratch(gradient):
        scratch.data.fill_(7.0)
        return gradient

    def second(microbatch, x):
        return Backwards.apply(x, scratch.copy_) * Backwards.apply(weights[1], using_scratch)

    functions = [lambda m: weights[0] * 1.0, second, lambda m, x: (x * weights[2]).sum()]
    orders = "0F0 1F0 2F0 0F1 1F1 2F1 2I0 1I0 0I0 0W0 2I1 1I1 1W0 0I1 0W1 1W1 2W0 2W1"
    in_one_process(orders, functions, num_microbatches=2).step()
    assert weights[0].grad.tolist() == [2.0] * 4


class Captured(torch.autograd.Function):
    """A captured graph as torch makes it: static memory of the output and of the gradient, written at each replay."""

    @staticmethod
    def forward(ctx, x, output, gradient, value):
        ctx.gradient = gradient
        output.data.copy_(x.detach() * value)
        return output.detach()

    @staticmethod
    def backward(ctx, flowing):
        ctx.gradient.data.add_(1.0)
        return ctx.gradient.detach(), None, None, None


def trained(ranks, makes, plan=None, **options):
    """Arrived values at rank 1, the gradient of rank 0's weight, and both ranks' errors.

    ``makes(x, microbatch)`` of each rank computes, of the first with the weight for ``x``.
    """
    arrived = []
    weight = torch.ones(4, device=ranks.device, requires_grad=True)
    make = makes[ranks.rank]

    def second(microbatch, payload):
        x = payload["x"] if isinstance(payload, dict) else payload
        arrived.append(x.detach().double().mean().item())
        if x.requires_grad:
            x.register_hook(lambda gradient: None)
        return (make(x, microbatch) * weight).sum()

    function = second if ranks.rank else lambda microbatch: make(weight, microbatch)
    with runtime_of(ranks, Function(PAIR, ranks.rank, function), plan=plan, **options) as runtime:
        outcomes = outcomes_of(ranks, runtime, PipelineRuntime.step)
    return arrived, weight.grad, outcomes


def replaying(ranks):
    """Functions of two stages, of which the second has a captured graph."""
    output, gradient = torch.zeros(4, device=ranks.device), torch.zeros(4, device=ranks.device)
    return [lambda weight, m: weight * 1.0, lambda x, m: Captured.apply(x, output, gradient, 1.0).clone()]


@pytest.mark.ranks(2)
def test_gradients_in_static_memory_are_those_of_each_microbatch(ranks):
    """What the replay of a captured backward writes again: each microbatch sends its own, 1 to 8."""
    _, found, outcomes = trained(ranks, replaying(ranks))
    assert outcomes == [None, None]
    if ranks.rank == 0:
        assert found.tolist() == [sum(range(1, COUNT + 1))] * 4


@pytest.mark.ranks(2, backend="gloo")  # the fake NCCL fails a test that writes into a message
@pytest.mark.parametrize("form", [lambda x: x, lambda x: {"x": x}], ids=["a tensor", "a tree"])
def test_an_output_in_static_memory_with_a_graph_raises_while_an_earlier_one_is_under_way(ranks, form):
    """Whether its message has left by the time the stage returns says nothing of what it carried: see `Captured`."""
    output, gradient = torch.zeros(100_000, device=ranks.device), torch.zeros(100_000, device=ranks.device)

    def written_slowly(weight, microbatch):
        captured = Captured.apply(weight.mean(), output, gradient, microbatch + 1.0)
        time.sleep(0.1)  # the message before it is read meanwhile
        return form(captured)

    _, _, outcomes = trained(ranks, [written_slowly, lambda x, m: x])
    assert "StageOutputError: stage 0 wrote again into its output of microbatch 0 before edge 0>1 had" in outcomes[0]


@pytest.mark.ranks(2, backend="gloo")  # the fake NCCL fails a test that writes into a message
def test_an_output_in_static_memory_with_a_graph_raises_while_that_of_another_stage_is_under_way(ranks):
    """Two stages of a rank captured in one pool of memory: the third writes its first output where the first one's
    second message lies."""
    pool, gradient = torch.zeros(2, 100_000, device=ranks.device), torch.zeros(100_000, device=ranks.device)
    weight, graph = torch.ones(100_000, device=ranks.device, requires_grad=True), ModuleGraph({"model": 4})
    orders = [["0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1"], ["2B0 2B1 0B0 0B1", "3B0 3B1 1B0 1B1"]]
    actions = [[*map(parse_action, f"{one} {other}".split())] for one, other in zip(*orders, strict=True)]
    plan = lower(compute_plan(actions, graph=4, placement=[0, 1, 0, 1], num_microbatches=2))

    def captured(number):
        def function(microbatch, x=weight):
            place = microbatch if number == 0 else 1 - microbatch
            return Captured.apply(x, pool[place], gradient, microbatch + 1.0)

        return Function(graph, number, function)

    others = [Function(graph, 1, lambda m, x: x * 2.0), Function(graph, 3, lambda m, x: x.sum())]
    with runtime_of(ranks, *(others if ranks.rank else map(captured, (0, 2))), plan=plan) as runtime:
        outcome = None
        try:
            runtime.step()
        except PipelineError as failure:
            outcome = str(failure)
    if ranks.rank == 0:
        assert "StageOutputError: stage 0 wrote again into its output of microbatch 1 before edge 0>1 had" in outcome


@pytest.mark.ranks(2)
def test_an_output_in_static_memory_with_a_graph_whose_gradient_has_come_back_is_no_fault(ranks):
    output, gradient = torch.zeros(4, device=ranks.device), torch.zeros(4, device=ranks.device)
    makes = [lambda weight, m: Captured.apply(weight, output, gradient, m + 1.0), lambda x, m: x * 1.0]
    # Each microbatch runs backward before the next one runs forward.
    orders = [[parse_action(f"{stage}{kind}{m}") for m in range(COUNT) for kind in "FB"] for stage in range(2)]
    plan = lower(compute_plan(orders, graph=2, placement=[0, 1], num_microbatches=COUNT))
    arrived, _, outcomes = trained(ranks, makes, plan)
    assert outcomes == [None, None]
    assert arrived == ([float(m + 1) for m in range(COUNT)] if ranks.rank else [])


@pytest.mark.ranks(2, backend="gloo")  # the fake NCCL fails a test that writes into a message
def test_an_output_with_a_graph_that_is_written_later_raises(ranks):
    held = []

    def written_again(weight, microbatch):
        with torch.no_grad():
            for tensor in held:
                tensor.fill_(100.0)
        held[:] = [weight + microbatch]
        return held[0]

    _, _, outcomes = trained(ranks, [written_again, lambda x, m: x * 1.0])
    assert "StageOutputError: stage 0 wrote again into its output of microbatch 0 before edge 0>1 had" in outcomes[0]


@pytest.mark.ranks(2)
def test_views_of_a_parameter_and_inputs_passed_on_are_no_fault(ranks):
    """The same memory each time, unchanged."""
    makes = [lambda weight, m: weight[:2], lambda x, m: x.repeat(2)]
    arrived, _, outcomes = trained(ranks, makes)
    assert outcomes == [None, None]
    assert arrived == ([1.0] * COUNT if ranks.rank else [])


# The parts


def test_a_tensor_is_shared_where_anything_else_holds_its_memory():
    """Pins the count of holders that torch has no public name for."""
    alone = torch.zeros(3).data
    assert not is_shared(alone)
    part = torch.zeros(3, 3)[:2].data
    assert not is_shared(part), "the base of the view is gone"
    with torch.inference_mode():
        part = torch.zeros(3, 3).view(9).data
        assert not is_shared(part)
    held = torch.zeros(3, 3)
    alias = held[:1].data
    assert is_shared(alias)
    del held
    gc.collect()
    assert not is_shared(alias)
    weight = torch.ones(3, requires_grad=True)
    saved = weight.tanh()
    alias = saved.detach()
    del saved
    assert not is_shared(alias), "the graph is gone"
    saved = weight.tanh()
    node, alias = saved.grad_fn, saved.detach()
    del saved
    assert is_shared(alias)
    del node


def queues(*edges, direction=Direction.FORWARD, **options):
    """The queues of a position."""
    pending = {}
    return [SendQueue(edge, direction, None, places=pending, **options) for edge in edges]


@pytest.mark.parametrize("clones", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_a_copy_is_made_where_it_is_asked_for_alone(graph, clones):
    (queue,) = queues(EDGE, clones=clones)
    held = torch.ones(3, requires_grad=graph) * 2
    for microbatch in range(2):
        queue.put(microbatch, held)
        payload = queue.end(microbatch)
        assert not payload.requires_grad
        assert (payload.data_ptr() == held.data_ptr()) is not clones


def test_a_gradient_that_autograd_has_given_to_a_parameter_as_well_is_copied():
    bias, (queue,) = torch.ones(2, 2, requires_grad=True), queues(EDGE, direction=Direction.BACKWARD)
    x = torch.ones(2, 2, requires_grad=True)
    for piece in range(2):
        x.grad = None
        ((x.view(4) + bias.view(4)) * (piece + 1.0)).sum().backward()
        assert piece or x.grad.data_ptr() == bias.grad.data_ptr()
        queue.put(piece, x.grad)
    assert [queue.end(piece).mean().item() for piece in range(2)] == [1.0, 2.0]
    assert bias.grad.mean() == 3.0


def test_memory_without_a_tensor_in_torch_is_seen_when_it_comes_again():
    memory = bytearray(12)  # of no tensor
    (queue,) = queues(Edge(2, 3), direction=Direction.BACKWARD, num_slices=2)
    queue.put(4, torch.frombuffer(memory, dtype=torch.float32))
    queue.payload(4)
    with pytest.raises(
        StageOutputError, match=r"stage 3 wrote again into the gradient of its input of microbatch 2\.0"
    ):
        queue.put(5, torch.frombuffer(memory, dtype=torch.float32))
    queue.end(4)
    queue.put(6, torch.frombuffer(memory, dtype=torch.float32))
    queue.payload(6)


@pytest.mark.parametrize("graph", [False, True])
def test_a_change_in_place_is_seen_at_the_send_and_at_its_end(graph):
    weight = torch.ones(3, requires_grad=graph)
    for sent in (False, True):
        (queue,) = queues(EDGE)
        output = weight * 2
        queue.put(0, output)
        if sent:
            queue.payload(0)
        output.detach().add_(1)
        for look in (queue.payload, queue.end):
            with pytest.raises(StageOutputError, match="stage 0 wrote again into its output of microbatch 0 before"):
                look(0)


def test_memory_is_compared_over_all_queues_of_a_position():
    """Two microbatches go to two replicas. A payload that two edges carry is no fault, nor is an input passed on."""
    weight, output = torch.ones(3, requires_grad=True), torch.zeros(3)
    first, second, skipping, further, local = queues(EDGE, EDGE, Edge(0, 2), Edge(1, 2), EDGE)
    local.local = object()  # its output gets a gradient of its own
    returned = weight * 2
    skipping.put(0, returned)
    local.put(0, returned)
    further.put(0, local.end(0).view(3))
    first.put(1, Captured.apply(weight, output, output, 1.0))
    with pytest.raises(StageOutputError, match=r"stage 0 wrote again into its output of microbatch 1 before edge 0>1"):
        second.put(2, Captured.apply(weight, output, output, 2.0))


def test_memory_that_two_edges_carry_is_pending_until_both_have_carried_it():
    weight, output = torch.ones(3, requires_grad=True), torch.zeros(3)
    first, second = queues(EDGE, Edge(0, 2))
    returned = Captured.apply(weight, output, output, 1.0)
    first.put(0, returned)
    second.put(0, returned)
    first.end(0)
    with pytest.raises(StageOutputError, match=r"microbatch 0 before edge 0>2 had carried it"):
        first.put(1, Captured.apply(weight, output, output, 2.0))
    second.end(0)
    second.put(2, Captured.apply(weight, output, output, 3.0))


@pytest.mark.parametrize("graph", [False, True])
def test_nothing_holds_the_memory_of_a_message_that_was_seen_to_have_left(graph):
    weight = torch.ones(3, requires_grad=graph)
    (queue,) = queues(EDGE)
    output = weight * 2
    storage = torch.multiprocessing.reductions.StorageWeakRef(output.untyped_storage())
    queue.put(0, output)
    del output
    assert not storage.expired()
    queue.end(0)
    assert storage.expired()


def test_zero_sized_and_unusual_tensors_are_left_to_the_communicator():
    (queue,) = queues(EDGE)
    for microbatch in range(3):
        queue.put(microbatch, [torch.zeros(0), None, torch.zeros(2).to_sparse(), torch.zeros(2, device="meta")])
    assert len(queue.end(0)) == 4
