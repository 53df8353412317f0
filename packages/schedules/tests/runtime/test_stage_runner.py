"""What a stage holds and for how long, what may travel between stages, and what is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autograd_kit.blocks import Residual
from autograd_kit.custom_functions import Scale
from pipegrid.core.edge import Direction, Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.generators import (
    gpipe,
    interleaved_1f1b,
    multi_module_1f1b,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)
from pipegrid.plans.generators.registry import SCHEDULES
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan.actions import Action, ActionKind
from pipegrid.plans.verify.verify import verify
from pipegrid.schedules.runtime import PipelineError, PipelineRuntime
from pipegrid.schedules.runtime.stages.deallocation import PendingFree
from pipegrid.schedules.runtime.stages.edge_queues import SendQueue
from pipegrid.transport import P2PCommunicator
from pipegrid.transport.base import Communicator
from plan_kit.plans import in_halves

from ..kit.live import WIDTH, Watch, weighty_stages
from ..kit.stages import Function
from ..kit.threads import MemoryCommunicator, Network


def step(plan, functions, network, *, hooks=None, **options):
    stages = [Function(plan.graph, stage, function) for stage, function in enumerate(functions)]
    network.run(plan, stages, hooks=hooks and [[hook] for hook in hooks], **options)


# How much is live


@pytest.mark.parametrize(
    "name", [name for name, schedule in SCHEDULES.items() if schedule.trains and not schedule.sliced]
)
def test_as_many_bytes_are_live_as_the_plan_predicts(name, network):
    plan = lower(SCHEDULES[name].plan(3, 7))
    proof = verify(plan)
    stages, watches = weighty_stages(plan)
    network.run(plan, stages, hooks=[[watch] for watch in watches])
    # A stage counts for its share of a position.
    sizes = [8 * WIDTH * WIDTH * len(held) for held in plan.stages_at]
    assert [watch.most[0] / size for watch, size in zip(watches, sizes, strict=True)] == list(proof.peak_live)
    # The first stage has no input to differentiate: all of it waits for W.
    inputs = [watch.most[1] / size for watch, size in zip(watches, sizes, strict=True)]
    assert inputs[1:] == list(proof.peak_live_inputs)[1:]


def test_an_output_that_nothing_saved_goes_when_its_send_has_ended(network):
    plan = lower(gpipe(2, 6))
    watches = [Watch(), Watch()]
    weight = torch.ones(20_000, requires_grad=True)  # more than 64 KB: see `SendQueue`

    def first(microbatch):
        output = (torch.ones_like(weight) * weight).neg()
        watches[0].note(0, output)
        return output

    step(plan, [first, lambda m, x: x.sum()], network, hooks=watches)
    assert watches[0].most[0] <= 3 * weight.nbytes, "two sends that were not waited for, one being made"


# Deallocation


FAN_OUT = ModuleGraph({"images": 1, "one": 1, "two": 1}, {"images": ["one", "two"]})


@pytest.mark.parametrize("placement", [[0, 1, 2], [0, 0, 1]], ids=["all sent", "one handed over"])
def test_an_output_for_several_stages_is_freed_once_all_have_it(placement, network):
    plan = lower(multi_module_1f1b(FAN_OUT, 3, placement=placement))
    weight = torch.full((WIDTH,), 2.0, dtype=torch.float64, requires_grad=True)
    held = []

    def images(microbatch):
        held.append(torch.ones(WIDTH, dtype=torch.float64) * weight)
        return held[-1]

    functions = [images, lambda m, x: (x**2).sum(), lambda m, x: 3 * x.sum()]
    step(plan, functions, network, deallocate_outputs=True)
    assert [tensor.numel() for tensor in held] == [1, 1, 1]
    assert torch.equal(weight.grad, torch.full_like(weight, 3 * (2 * 2 + 3)))


def test_a_view_cannot_be_freed(network):
    plan = lower(gpipe(2, 1))
    weight = torch.ones(4, 4, requires_grad=True)
    runtime = PipelineRuntime(
        plan,
        {0: Function(plan.graph, 0, lambda m: (weight * 2)[0])},
        network.communicator(2, 0),
        deallocate_outputs=True,
    )
    with pytest.raises(
        PipelineError, match=r"stage 0, microbatch 0: StepArgumentError: an output of shape \(4,\) is a view"
    ):
        runtime.step()


# What is not differentiated


FROZEN = ModuleGraph({"encoder": 2, "head": 2}, {"encoder": ["head"]})


def test_nothing_is_differentiated_for_stages_that_run_no_backward(network):
    plan = lower(multi_module_1f1b(FROZEN, 4, forward_only=["encoder"]))
    weights = [torch.full((WIDTH,), 1.5, requires_grad=True) for _ in range(4)]
    received = []

    def first(microbatch):
        return torch.ones(WIDTH) * weights[0]

    def stage(number):
        def function(microbatch, x):
            received.append((number, x.requires_grad, torch.is_grad_enabled()))
            return x * weights[number] if number < 3 else (x * weights[number]).sum()

        return function

    step(plan, [first, *map(stage, (1, 2, 3))], network)
    assert set(received) == {(1, False, False), (2, False, True), (3, True, True)}
    assert [weight.grad is None for weight in weights] == [True, True, False, False]


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1"])
def test_a_frozen_stage_passes_gradients_on(name, network):
    plan = lower(SCHEDULES[name].plan(3, 4))
    weights = [torch.full((WIDTH,), 2.0, requires_grad=stage != 1) for stage in range(3)]
    functions = [
        lambda m: torch.ones(WIDTH) * weights[0],
        lambda m, x: x * weights[1],
        lambda m, x: (x * weights[2]).sum(),
    ]
    step(plan, functions, network)
    assert weights[0].grad.tolist() == [4 * 2.0 * 2.0] * WIDTH
    assert weights[1].grad is None


# What travels


def pack(weight, microbatch):
    """A payload of everything: gradient flows through "x" and the list; rows differ between microbatches."""
    x = torch.ones(2 + microbatch, WIDTH, dtype=torch.float64)
    return {
        "x": x * weight,
        "ids": torch.arange(2 + microbatch),
        "mask": torch.tensor([True, False]),
        "nothing": None,
        "list": [weight.sum() * 2, (x.detach() * 3,)],
    }


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "zero_bubble_v"])
def test_payloads_of_many_tensors_whose_lengths_vary(name, network):
    plan = lower(SCHEDULES[name].plan(2, 5))
    last = plan.num_stages - 1

    def build():
        weights = [torch.full((WIDTH,), 1.5 + s, dtype=torch.float64, requires_grad=True) for s in range(last + 1)]

        def function(stage):
            def forward(microbatch, payload=None):
                if payload is None:
                    return pack(weights[0], microbatch)
                assert payload["ids"].tolist() == list(range(2 + microbatch))
                assert payload["mask"].dtype is torch.bool
                assert payload["nothing"] is None
                x = (payload["x"] * weights[stage] * payload["list"][0]).sin()
                if stage == last:
                    return x[payload["ids"]].sum() + payload["list"][1][0].sum()
                return {**payload, "x": x}

            return forward

        return weights, [function(stage) for stage in range(last + 1)]

    weights, functions = build()
    step(plan, functions, network)
    expected, others = build()
    for microbatch in range(5):
        payload = others[0](microbatch)
        for other in others[1:]:
            payload = other(microbatch, payload)
        payload.backward()
    for weight, other in zip(weights, expected, strict=True):
        assert torch.allclose(weight.grad, other.grad, rtol=1e-12)


# Checkpointing and randomness


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "split"])
def test_dropout_is_the_same_in_the_recomputation(halves):
    def gradients(*, checkpointed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        entry = nn.Linear(WIDTH, WIDTH).double()
        plan = multi_module_1f1b(ModuleGraph({"model": 2}), 3, placement=[0, 0])
        plan = lower(in_halves(plan) if halves else plan)

        def last(microbatch, x):
            y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            return (nn.functional.dropout(y, 0.3) ** 2).sum()

        torch.manual_seed(1)
        functions = [lambda m: entry(torch.ones(3, WIDTH, dtype=torch.float64) * (m + 1)), last]
        PipelineRuntime(plan, {s: Function(plan.graph, s, functions[s]) for s in range(2)}, None).step()
        return [parameter.grad for parameter in (*entry.parameters(), *model.parameters())]

    for checkpointed, plain in zip(gradients(checkpointed=True), gradients(checkpointed=False), strict=True):
        assert torch.equal(checkpointed, plain)


# What is refused


def test_a_stage_that_cannot_be_split_is_refused_at_its_first_forward(network):
    plan = lower(zero_bubble_h1(2, 2))
    model = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    stage = Function(plan.graph, 1, lambda m, x: checkpoint(model[1], x, use_reentrant=True).sum(), model)
    (edge,) = plan.graph.stage_edges
    network.lane(edge, Direction.FORWARD).put(torch.ones(WIDTH, requires_grad=True))
    with pytest.raises(
        PipelineError,
        match=r"stage 1, microbatch 0: SplitBackwardError: stage 1: module '1' \(Linear\) is checkpointed",
    ):
        PipelineRuntime(plan, {1: stage}, network.communicator(2, 1)).step()
    assert network.messages == 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_reentrant_checkpoint_that_would_train_nothing_is_an_error(reentrant):
    """The part behind it has a graph, so nothing else would tell."""
    plan = lower(gpipe(1, 1))
    model = nn.Sequential(Residual(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(microbatch):
        hidden = checkpoint(model[0], torch.ones(WIDTH), use_reentrant=reentrant)
        return model[1](hidden).sum()

    runtime = PipelineRuntime(plan, {0: Function(plan.graph, 0, forward, model)}, None)
    if reentrant:
        with pytest.raises(
            PipelineError, match=r"stage 0: LayerNorm \(its parameter 'weight' requires grad\) is checkp"
        ):
            runtime.step()
        model[0].requires_grad_(False)
        runtime = PipelineRuntime(plan, {0: Function(plan.graph, 0, forward, model)}, None)
    runtime.step()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
def test_compiled_stages_run_whole_at_i_and_the_runtime_says_what_that_costs():
    plan = lower(zero_bubble_v(1, 3))
    torch.manual_seed(0)
    models = [Residual(WIDTH), Residual(WIDTH)]
    models[1].compile(backend="aot_eager")
    x = torch.arange(1.0, 1 + WIDTH)
    stages = {
        0: Function(plan.graph, 0, lambda microbatch: models[0](x), models[0]),
        1: Function(plan.graph, 1, lambda microbatch, y: models[1](y).sum(), models[1]),
    }
    runtime = PipelineRuntime(plan, stages, None)
    assert "compiled" not in runtime.describe()
    runtime.step()
    text = runtime.describe()
    assert "stage 1: a compiled region runs whole at I ('the whole stage' (Residual)), and W computes nothing" in text
    assert re.search(r"with whole backwards there, a step takes \S+ forwards in place of 9", text)
    torch.manual_seed(0)
    whole = nn.Sequential(Residual(WIDTH), Residual(WIDTH))
    (3 * whole(x).sum()).backward()
    for mine, other in zip(nn.ModuleList(models).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_an_output_made_by_a_python_function_is_differentiated_after_it_is_gone():
    """Before torch 2.13 such a node lives no longer than its tensor, unless the edge to it holds the graph."""
    plan = lower(zero_bubble_v(1, 2))
    weight = nn.Parameter(torch.randn(3, dtype=torch.float64))
    stages = {
        0: Function(
            plan.graph, 0, lambda microbatch: Scale.apply(weight, torch.ones_like(weight)), nn.ParameterList([weight])
        ),
        1: Function(plan.graph, 1, lambda microbatch, y: y.square().sum()),
    }
    PipelineRuntime(plan, stages, None).step()
    torch.testing.assert_close(weight.grad, 4 * weight.detach())


def test_messages_wait_longer_while_neighbours_compile(network):
    plan = lower(one_f_one_b(2, 1))
    model = Residual(WIDTH)
    model.compile(backend="eager")
    waits = []

    stage = Function(plan.graph, 1, lambda m, x: model(x).sum(), model)
    runtime = PipelineRuntime(plan, {1: stage}, network.communicator(2, 1), deadline=5.0)
    (edge,) = plan.graph.stage_edges
    (queue,) = [one for way, one in runtime._bound.receives.items() if way.direction is Direction.FORWARD]
    queue.hooks = [type("Seen", (), {"completed": lambda self, action: waits.append(queue.deadline)})()]
    for _ in range(2):
        network.lane(edge, Direction.FORWARD).put(torch.ones(WIDTH, requires_grad=True))
        runtime.step()
    assert waits == [600.0, 5.0]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            torch.ones(2),
            (
                "stage 0, microbatch 0: StageOutputError: the loss of stage 0 for microbatch 0 is a tensor of shape "
                r"\(2,\)"
            ),
        ),
        (None, r"stage 0, microbatch 0: StageOutputError: the loss of stage 0 for microbatch 0 is None; a loss is"),
    ],
)
def test_a_loss_is_one_number(loss, message):
    plan = gpipe(1, 1)
    with pytest.raises(PipelineError, match=message):
        PipelineRuntime(plan, {0: Function(plan.graph, 0, lambda m: loss)}, None).step()


@pytest.mark.parametrize("shape", [(3,), (2, WIDTH), (1, WIDTH)])  # the engine would add up the rows of the second
def test_a_gradient_of_the_wrong_shape_names_the_action(shape, network):
    plan = lower(gpipe(2, 1))
    weight = torch.ones(WIDTH, requires_grad=True)
    runtime = PipelineRuntime(
        plan, {0: Function(plan.graph, 0, lambda m: torch.ones(WIDTH) * weight)}, network.communicator(2, 0)
    )
    (edge,) = plan.graph.stage_edges
    network.lane(edge, Direction.BACKWARD).put(torch.ones(shape))
    found = re.escape(str(shape))
    message = rf"microbatch 0: StepArgumentError: edge 0>1 carried .* \({WIDTH},\) forward .* {found} came back"
    with pytest.raises(PipelineError, match=message):
        runtime.step()
    assert weight.grad is None


FREED = {name: lower(SCHEDULES[name].plan(2, 6)) for name in ("gpipe", "1f1b", "zero_bubble_h2")}
MADE_FROM_IT = {
    "its square": lambda h, head: h * h,
    "a linear layer of it": lambda h, head: head(h),
    "a sum with it, which keeps nothing": lambda h, head: h + 1.0,
}


@pytest.mark.parametrize("made", MADE_FROM_IT)
@pytest.mark.parametrize("name", FREED)
def test_an_output_that_another_output_was_made_from_is_not_freed(name, made, network):
    plan = FREED[name]

    def gradients(*, deallocate):
        torch.manual_seed(0)
        first, head, last = (nn.Linear(WIDTH, WIDTH).double() for _ in range(3))

        def outputs(microbatch):
            h = first(torch.full((2, WIDTH), 1.0 + microbatch, dtype=torch.float64))
            return {"h": h, "more": MADE_FROM_IT[made](h, head)}

        functions = [outputs, lambda microbatch, x: (last(x["h"]) * x["more"]).sum()]
        step(plan, functions, network, deallocate_outputs=deallocate)
        return [p.grad for layer in (first, head, last) for p in layer.parameters() if p.grad is not None]

    freed, kept = gradients(deallocate=True), gradients(deallocate=False)
    assert [torch.equal(one, other) for one, other in zip(freed, kept, strict=True)] == [True] * len(kept)


def test_an_output_of_several_edges_is_freed_after_its_last_message():
    output = torch.ones(4, requires_grad=True) * 2
    pending = PendingFree(2, [output])
    pending.sent()
    assert output.tolist() == [2.0] * 4
    pending.sent()
    assert output.numel() == 1


@pytest.mark.parametrize("number", [1, 4])
def test_an_output_is_freed_where_it_is_the_only_one(number, network):
    plan = lower(gpipe(2, 2))
    made = []

    def two(microbatch):
        x = torch.full((2, WIDTH), 1.0 + microbatch, requires_grad=True)
        made.extend([torch.tanh(x), torch.sigmoid(x), torch.exp(x)])
        made.append(made[-1] * made[-1])
        return made[-4 : -3 if number == 1 else None]

    functions = [two, lambda microbatch, x: sum(part.sum() for part in x)]
    step(plan, functions, network, deallocate_outputs=True)
    assert [tensor.numel() for tensor in made[::4]] == [1 if number == 1 else 2 * WIDTH] * 2
    assert [tensor.numel() for tensor in made[3::4]] == [2 * WIDTH] * 2


# What goes back


FIRST_OPERATORS = {
    "transpose": lambda x, model: model(x.transpose(0, 1)),
    "mean of an axis": lambda x, model: model(x.mean(1)),
    "sum": lambda x, model: x.sum(0) * model.bias,
    "attention, batch first": lambda x, model: nn.MultiheadAttention(WIDTH, 2, batch_first=True)(x, x, x)[0],
    "gru, batch first": lambda x, model: nn.GRU(WIDTH, WIDTH, batch_first=True)(x)[0],
    "conv after a transpose": lambda x, model: nn.Conv1d(WIDTH, WIDTH, 1)(x.transpose(1, 2)),
}


@pytest.mark.parametrize("name", FIRST_OPERATORS)
@pytest.mark.parametrize("schedule", [gpipe, zero_bubble_h1])
def test_the_gradient_of_a_stage_whose_first_operator_is_a_view_is_contiguous(schedule, name, network):
    plan = lower(schedule(2, 2))
    model = nn.Linear(WIDTH, WIDTH)

    class Strict(MemoryCommunicator):
        def isend(self, payload, *, edge, direction):
            assert payload.is_contiguous()
            return super().isend(payload, edge=edge, direction=direction)

    functions = [
        lambda m: model(torch.ones(3, 2, WIDTH)),
        lambda m, x: FIRST_OPERATORS[name](x, model).square().mean(),
    ]
    step(plan, functions, Network(Strict))


def test_the_verbs_of_a_subclass_are_called():
    """Only a `P2PCommunicator` itself is passed over for its lanes."""
    edge, sent = Edge(0, 1), []

    class Counting(P2PCommunicator):
        def isend(self, payload, *, edge, direction):
            sent.append((payload, edge, direction))

        def irecv(self, *, edge, direction, shapes=None):
            raise NotImplementedError

    queue = SendQueue(edge, Direction.FORWARD, Counting.__new__(Counting))
    queue.put(0, None)
    queue.send(0, Action(ActionKind.SEND_F, 0, 0, edge=edge))
    assert sent == [(None, edge, Direction.FORWARD)]


LOST = {
    "detached": lambda model, x: model(x).detach(),
    "under no_grad": lambda model, x: torch.no_grad()(model)(x),
    "reentrant checkpoint": lambda model, x: checkpoint(
        torch.nn.functional.linear, x, model.weight.detach(), use_reentrant=True
    ),
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("schedule", [gpipe, zero_bubble_h1])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_an_output_without_a_graph_on_a_stage_with_parameters_is_an_error(schedule, name, network):
    plan = lower(schedule(2, 3))
    model = nn.Linear(WIDTH, WIDTH)
    forwards = []

    def first(microbatch):
        forwards.append(microbatch)
        return LOST[name](model, torch.ones(2, WIDTH))

    communicator = network.communicator(2, 0)
    for _ in range(3):  # the gradients that stage 1 would send back
        network.communicator(2, 1).isend(
            torch.ones(2, WIDTH), edge=plan.graph.stage_edges[0], direction=Direction.BACKWARD
        )
    stage = Function(plan.graph, 0, first, model=model)
    with pytest.raises(PipelineError, match=r"stage 0 has parameters that require grad \(model\.weight\), but none"):
        PipelineRuntime(plan, {0: stage}, communicator).step()
    assert forwards == [0, 1, 2]


@pytest.mark.parametrize("payload", ["None", "frozen", "one with a graph"])
def test_an_output_without_a_graph_may_be_right(payload, network):
    plan = lower(gpipe(2, 3))
    model = nn.Linear(WIDTH, WIDTH).requires_grad_(payload != "frozen")

    def first(microbatch):
        if payload == "None":
            return None
        output = model(torch.ones(2, WIDTH))
        return output if microbatch == 1 else output.detach()

    weight = torch.ones((), requires_grad=True)
    positions = [
        Function(plan.graph, 0, first, model=model),
        Function(plan.graph, 1, lambda m, x: weight * (1.0 if x is None else x.sum())),
    ]
    network.run(plan, positions)
    assert (model.weight.grad is not None) == (payload == "one with a graph")


NO_IMAGES = {
    "zeros": lambda model, x: torch.zeros(2, WIDTH),
    "nothing": lambda model, x: torch.zeros(0, WIDTH),
}


@pytest.mark.parametrize("name", [*LOST, *NO_IMAGES])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_outputs_that_lose_their_graph_later_are_an_error_where_the_model_runs(name):
    """Not where it does not run: whole steps may have no image for an encoder."""
    plan = lower(interleaved_1f1b(1, 3, num_chunks=2))
    model, way = nn.Linear(WIDTH, WIDTH), [torch.nn.Module.__call__]
    weight = torch.ones((), requires_grad=True)
    first = Function(plan.graph, 0, lambda m: way[0](model, torch.ones(2, WIDTH)), model=model)
    last = Function(plan.graph, 1, lambda m, x: weight * x.sum())
    runtime = PipelineRuntime(plan, {0: first, 1: last}, None)
    runtime.step()
    way[0] = (LOST | NO_IMAGES)[name]
    runtime.step()
    runtime.eval()
    if name in ("detached", "under no_grad"):
        with pytest.raises(
            PipelineError, match=r"stage 0 has parameters that require grad \(Linear\.weight\), but none"
        ):
            runtime.step()
        return
    runtime.step()
    way[0] = torch.nn.Module.__call__
    model.zero_grad()
    runtime.step()
    assert model.weight.grad is not None


# How many sends are under way

HEARS = SimpleNamespace(completed=lambda action: None)


class Counting(Communicator):
    """A communicator whose sends count how many of them no caller has waited for."""

    def __init__(self):
        self.under_way = self.most = 0

    def isend(self, payload, *, edge, direction):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return self

    def irecv(self, *, edge, direction, shapes=None):
        raise NotImplementedError

    def wait(self, timeout=None):
        self.under_way -= 1


@pytest.mark.parametrize(("elements", "hooks", "most"), [(16, (), 16), (2**15, (), 2), (16, (HEARS,), 2)])
def test_two_sends_of_an_edge_are_under_way_or_sixteen_small_ones_that_no_hook_follows(elements, hooks, most):
    communicator = Counting()
    queue = SendQueue(Edge(0, 1), Direction.FORWARD, communicator, hooks=hooks)
    for microbatch in range(40):
        queue.put(microbatch, torch.zeros(elements))
        queue.send(microbatch, Action(ActionKind.SEND_F, 0, microbatch, Edge(0, 1)))
    assert communicator.most == most
    queue.settle()
    assert communicator.under_way == 0


@pytest.mark.parametrize("batches", [True, False])
def test_a_batch_is_one_where_the_communicator_says_that_it_is_more_than_its_messages(batches, network):
    entered = []

    class Batching(MemoryCommunicator):
        def batch(self):
            entered.append(self.current_stage)
            return super().batch()

    Batching.batches = batches
    plan = lower(interleaved_1f1b(2, 4), receives="late")
    weights = [torch.ones(WIDTH, requires_grad=True) for _ in range(plan.num_stages)]
    last = plan.num_stages - 1
    functions = [
        lambda m, x=None, stage=stage: (
            (torch.ones(WIDTH) if x is None else x) * weights[stage] if stage < last else (x * weights[stage]).sum()
        )
        for stage in range(plan.num_stages)
    ]
    step(plan, functions, Network(Batching))
    assert bool(entered) == batches
    for weight in weights:
        assert torch.equal(weight.grad, torch.full((WIDTH,), 4.0))
