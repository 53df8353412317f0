"""A warm-up leaves no trace: the first step after it is bit for bit the one without it."""

import pytest
import torch
from torch import nn

from pipegrid.schedules import (
    Monitor,
    PipelineRuntime,
    StepArgumentError,
    accumulate_in_main_grad,
    lower,
    one_f_one_b,
    seq1f1b,
    warm_up,
)
from pipegrid.topology import control_store
from pipegrid.transport import Direction, Edge, P2PCommunicator, P2PConfig

from ..kit.stages import stage_of

WIDTH = 4


def stage_on(plan, number):
    """A stage that draws its data and drops some of it, and keeps running statistics."""
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    return stage_of(
        plan.graph, number, model, data=lambda _: torch.randn(8, WIDTH), loss=lambda output, _: output.square().mean()
    )


def state(module):
    grads = {f"{name}.grad": one.grad for name, one in module.named_parameters()}
    main = {f"{name}.main": getattr(one, "main_grad", None) for name, one in module.named_parameters()}
    values = {**module.state_dict(), **grads, **main, "rng": torch.get_rng_state()}
    return {name: None if value is None else value.clone() for name, value in values.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value is None) == (other[name] is None), name
        assert value is None or torch.equal(value, other[name]), name


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_a_module_is_as_before(main_grad, held):
    stage = stage_on(one_f_one_b(1, 1), 0)
    if main_grad:
        accumulate_in_main_grad(stage.model, dtype=torch.float64)
    if held:
        stage.forward(0, {}).loss.backward()
    before, grads = state(stage.model), [one.grad for one in stage.model.parameters()]
    ran = []
    warm_up(stage.model, lambda: ran.append(stage.forward(0, {})) or ran[0])
    assert ran[0].loss is not None
    assert_same(before, state(stage.model))
    assert all(one.grad is other for one, other in zip(stage.model.parameters(), grads, strict=True))


def test_a_module_is_as_before_after_a_forward_that_raises():
    stage = stage_on(one_f_one_b(1, 1), 0)
    before = state(stage.model)

    def fails():
        stage.forward(0, {})
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        warm_up([stage.model], fails)
    assert_same(before, state(stage.model))


def test_a_backward_runs_unless_it_is_not_wanted():
    model, seen = nn.Linear(WIDTH, WIDTH), []
    model.register_full_backward_hook(lambda *_: seen.append(1))
    for backward in (True, False):
        warm_up(model, lambda: {"y": model(torch.ones(1, WIDTH, requires_grad=True))}, backward=backward)
    assert seen == [1]


@pytest.mark.ranks(2)
def test_the_first_step_is_the_one_without_a_warm_up(ranks):
    plan, found = lower(one_f_one_b(2, 4)), []
    edge = Edge(0, 1)
    for warm in (True, False):
        stage = stage_on(plan, ranks.rank)
        communicator = P2PCommunicator(None, P2PConfig(deadline=60.0))
        runtime = PipelineRuntime(plan, {ranks.rank: stage}, communicator)
        torch.manual_seed(7)
        sent = [lane.stats.messages for lane in communicator.lanes.values()]
        if warm:
            runtime.warm_up({edge: torch.ones(8, WIDTH)} if ranks.rank else None)
            assert [lane.stats.messages for lane in communicator.lanes.values()] == sent
        runtime.step()
        found.append(state(stage.model))
        communicator.close()
    assert_same(*found)


def test_what_a_stage_receives_must_be_given(network):
    plan = lower(one_f_one_b(2, 1))
    runtime = PipelineRuntime(plan, {1: stage_on(plan, 1)}, network.communicator(2, 1))
    with pytest.raises(StepArgumentError, match="no payload for edge 0>1, which stage 1 receives"):
        runtime.warm_up()


def test_a_plan_with_slices_asks_for_a_forward_of_the_callers_own():
    class Sliced:
        def forward(self, microbatch, inputs, part):
            raise AssertionError

    runtime = PipelineRuntime(lower(seq1f1b(1, 2, num_slices=2)), {0: Sliced()}, None)
    with pytest.raises(StepArgumentError, match=r"a plan with slices; call warm_up\(modules, forward\)"):
        runtime.warm_up()


def test_messages_of_a_first_step_on_an_accelerator_have_half_an_hour(network, monkeypatch):
    monkeypatch.setattr("pipegrid.transport.streams.types", frozenset({"cpu"}))
    plan, waits = lower(one_f_one_b(2, 1)), []
    runtime = PipelineRuntime(plan, {1: stage_on(plan, 1)}, network.communicator(2, 1), deadline=5.0)
    (edge,) = plan.graph.stage_edges
    (queue,) = [one for way, one in runtime._bound.receives.items() if way.direction is Direction.FORWARD]
    queue.hooks = [type("Seen", (), {"completed": lambda self, action: waits.append(queue.deadline)})()]
    for _ in range(2):
        network.lane(edge, Direction.FORWARD).put(torch.ones(8, WIDTH, requires_grad=True))
        runtime.step()
    assert waits == [1800.0, 5.0]


@pytest.mark.ranks(1)
def test_a_monitor_of_an_accelerator_gives_the_first_step_half_an_hour(ranks):
    given = {"rank": 0, "ranks": [0], "deadline": 5.0}
    with_device = Monitor(control_store("a"), **given, device=torch.device("meta"))
    assert with_device.first_deadline == 1800.0
    assert Monitor(control_store("b"), **given).first_deadline == 60.0
