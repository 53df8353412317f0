"""torch's own schedules, read from its live objects: proved for pipegrid's lanes and for one group of torch's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from pipegrid.schedules import PlanError, verify
from pipegrid.schedules.orders import orders_of_plan, plan_of_torch, prove_order
from pipegrid.transport.order import ORDER_MODELS

LOOPED = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
RANKS, MICROBATCHES = 4, 8


@pytest.fixture
def one_of_four():
    """A rank of a group of four whose other members are not there."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def made(name):
    stages = {**dict.fromkeys(LOOPED, (0, RANKS)), **dict.fromkeys(V_SHAPED, (0, 2 * RANKS - 1))}.get(name, (0,))
    count = RANKS * len(stages)
    own = [
        PipelineStage(
            nn.Linear(2, 2),
            stage,
            count,
            torch.device("cpu"),
            input_args=torch.ones(1, 2),
            output_args=torch.ones(1, 2),
        )
        for stage in stages
    ]
    schedule = getattr(schedules, name)
    return schedule(own if len(own) > 1 else own[0], MICROBATCHES, loss_fn=lambda y, _: y.sum())


# From torch 2.15 on schedules also wait for their sends.
WAITS = hasattr(schedules._ComputationType, "WAIT_SEND_F")


@pytest.mark.skipif(not WAITS, reason="schedules of torch before 2.15 have no waits for sends")
@pytest.mark.parametrize("name", LOOPED + V_SHAPED)
def test_a_schedule_that_waits_for_its_sends_is_an_error(one_of_four, name):
    with pytest.raises(PlanError, match="'WAIT_SEND_F' is not a kind of action"):
        plan_of_torch(made(name))


@pytest.mark.skipif(WAITS, reason="schedules of torch from 2.15 on wait for their sends, which plans do not")
@pytest.mark.parametrize("name", LOOPED + V_SHAPED)
def test_a_schedule_of_several_stages_is_proved_with_the_messages_that_it_has(one_of_four, name):
    plan = plan_of_torch(made(name))
    assert plan.has_communication
    assert (plan.num_positions, plan.num_stages, plan.num_microbatches) == (RANKS, 2 * RANKS, MICROBATCHES)
    verify(plan)
    for model in ORDER_MODELS.values():
        prove_order(orders_of_plan(plan), model, drains=True)


@pytest.mark.parametrize("name", SINGLE)
def test_a_schedule_of_one_stage_runs_a_loop_of_its_own(one_of_four, name):
    with pytest.raises(PlanError, match=f"{name} runs a loop of its own"):
        plan_of_torch(made(name))


def test_an_object_that_tells_no_order_is_an_error():
    with pytest.raises(PlanError, match="object tells no order"):
        plan_of_torch(object())
