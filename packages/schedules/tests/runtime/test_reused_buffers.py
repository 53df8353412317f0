"""Memory of received messages, used again over all lanes and directions: the slots of the plan, and right gradients."""

from __future__ import annotations

import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.plans import lower
from pipegrid.plans.generators.registry import SCHEDULES
from pipegrid.schedules.runtime import PipelineRuntime
from pipegrid.transport import Direction, Edge, P2PCommunicator, P2PConfig

from ..kit.stages import differentiate, stages_of

WIDTH = 5
BYTES = 2 * WIDTH * 8


class Layer(nn.Module):
    """A linear layer; every third one passes its input on as a view, every fourth adds a parameter of its shape.

    Autograd hands the gradient that came on to the stage before, and a view of it to that parameter.
    """

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.kind = {2: "passes", 3: "adds"}.get(number % 4, "linear")
        shape = (2 * WIDTH,) if self.kind == "adds" else (WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))

    def forward(self, x):
        if self.kind == "adds":
            return x + self.weight.view(2, WIDTH)
        return x.view(2, WIDTH) if self.kind == "passes" else (x @ self.weight).tanh()


def stages(plan, kind=Layer):
    def data(microbatch):
        return torch.arange(1.0 + microbatch, 1 + microbatch + WIDTH, dtype=torch.float64).expand(2, WIDTH).sin()

    models = [kind(number) for number in range(plan.num_stages)]
    return stages_of(plan.graph, models, data=data, loss=lambda output, _: (output * output).sum())


def communicator_of(plan, **config):
    placement = [positions[0] for positions in plan.placement]
    return P2PCommunicator(
        dist.group.WORLD, P2PConfig(pipeline_dtype=torch.float64, **config), placement=placement, graph=plan.graph
    )


def incoming(communicator, rank):
    return [lane for spec, lane in communicator.lanes.items() if spec.destination == rank]


def watch(held):
    """The addresses of what comes to the stages by message: by stage and microbatch, of each step."""
    addresses = {}

    def watched(number, forward):
        def run(microbatch, inputs):
            for edge, payload in inputs.items():
                if edge.source not in held:
                    addresses.setdefault((number, microbatch), []).append(payload.data_ptr())
            return forward(microbatch, inputs)

        return run

    for number, stage in held.items():
        held[number] = types.SimpleNamespace(model=stage.model, forward=watched(number, stage.forward))
    return addresses


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strict", [False, True], ids=["buffered", "strict"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zero_bubble_v", "dualpipe_v", "zero_bubble_h1", "gpipe"])
@pytest.mark.pairs
def test_as_many_slots_as_the_plan_says_in_the_same_memory_in_each_step_and_the_same_gradients(ranks, name, strict):
    plan, steps = lower(SCHEDULES[name].plan(3, 7)), 3
    every, expected = stages(plan), differentiate(plan, stages(plan))
    held = {stage: every[stage] for stage in plan.stages_at[ranks.rank]}
    addresses = watch(held)
    with communicator_of(plan, strict=strict) as communicator:
        runtime = PipelineRuntime(plan, held, communicator, reuse_buffers=True)
        for step in range(steps):
            runtime.step()
            for number, stage in held.items():
                if stage.model.kind != "passes":
                    wanted = (step + 1) * expected[number].model.weight.grad
                    assert torch.allclose(stage.model.weight.grad, wanted, rtol=1e-10, atol=0), (step, number)
        planned = runtime.buffers
        assert len(planned.arrivals) == sum(action.kind.is_receive for action in plan.actions(ranks.rank))
        lanes = incoming(communicator, ranks.rank)
        # Measured: what the lanes have allocated is what the plan says, and every message was given back.
        assert sum(lane.stats.allocations for lane in lanes) == planned.num_slots
        assert sum(lane.stats.live for lane in lanes) == 0
        assert f"in {planned.num_slots} slots, {planned.num_slots * BYTES:,} bytes" in runtime.describe()
    assert all(len(set(seen)) == 1 and len(seen) == steps for seen in addresses.values())
    if len(addresses) > planned.num_slots:
        assert len({seen[0] for seen in addresses.values()}) < len(addresses)


class Keeps(Layer):
    """Keeps a view of all that it has taken, and of the gradient that it gets, against the rules."""

    def __init__(self, number):
        super().__init__(number)
        self.kept = []

    def forward(self, x):
        self.kept.append(x.detach().view(-1))
        out = super().forward(x) * 1.0
        out.register_hook(lambda gradient: self.kept.append(gradient.view(-1)))
        return out


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_v"])
def test_a_view_that_a_stage_keeps_is_not_written_and_the_slot_gets_new_memory(ranks, name):
    plan = lower(SCHEDULES[name].plan(2, 5))
    found = {}
    for reuse in (False, True):
        every = stages(plan, Keeps)
        held = {stage: every[stage] for stage in plan.stages_at[ranks.rank]}
        with communicator_of(plan) as communicator:
            runtime = PipelineRuntime(plan, held, communicator, reuse_buffers=reuse)
            runtime.step()
            runtime.step()
            ranks.barrier()
        models = [stage.model for stage in held.values()]
        found[reuse] = [
            tensor.clone() for one in models for tensor in (one.weight.grad, *one.kept) if tensor is not None
        ]
    assert len(found[True]) == len(found[False]) > 2
    assert all(torch.equal(*both) for both in zip(*found.values(), strict=True))


@pytest.mark.ranks(2)
def test_an_evaluation_gives_nothing_back_and_without_the_option_nothing_is(ranks):
    plan = lower(SCHEDULES["1f1b"].plan(2, 4))
    for reuse, verb, live in ((True, "eval", 4), (False, "step", 4), (True, "step", 0)):
        stage = dist.get_rank()
        with communicator_of(plan) as communicator:
            runtime = PipelineRuntime(plan, {stage: stages(plan)[stage]}, communicator, reuse_buffers=reuse)
            getattr(runtime, verb)()
            if stage == 1:
                assert communicator.lane(Edge(0, 1), Direction.FORWARD).stats.live == live
            ranks.barrier()


@pytest.mark.ranks(2)
def test_an_evaluation_between_steps_leaves_the_slots_as_they_were(ranks):
    plan = lower(SCHEDULES["interleaved_1f1b"].plan(2, 4))
    every = stages(plan)
    held = {stage: every[stage] for stage in plan.stages_at[ranks.rank]}
    with communicator_of(plan) as communicator:
        runtime = PipelineRuntime(plan, held, communicator, reuse_buffers=True)
        runtime.step()
        before = runtime.describe()
        runtime.eval()
        runtime.step()
        assert runtime.describe() == before
        expected = differentiate(plan, stages(plan))
        for number, stage in held.items():
            if stage.model.kind != "passes":
                assert torch.allclose(
                    stage.model.weight.grad, 2 * expected[number].model.weight.grad, rtol=1e-10, atol=0
                )
        ranks.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shapes", ["header", "learned"])
def test_where_shapes_vary_messages_have_memory_of_their_own_and_the_gradients_are_right(ranks, shapes):
    plan = lower(SCHEDULES["interleaved_1f1b"].plan(2, 4))
    every, expected = stages(plan), differentiate(plan, stages(plan))
    held = {stage: every[stage] for stage in plan.stages_at[ranks.rank]}
    with communicator_of(plan, variable_seq_lengths=True, shapes=shapes) as communicator:
        runtime = PipelineRuntime(plan, held, communicator, reuse_buffers=True)
        for _ in range(3):
            runtime.step(batch="same" if shapes == "learned" else None)
        assert runtime.buffers.num_slots == 0
        assert "slots" not in runtime.describe()
        for number, stage in held.items():
            if stage.model.kind != "passes":
                assert torch.allclose(
                    stage.model.weight.grad, 3 * expected[number].model.weight.grad, rtol=1e-10, atol=0
                )
        ranks.barrier()
