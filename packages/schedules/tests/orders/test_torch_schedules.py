"""torch's own schedules, read from its live objects: proved for pipegrid's lanes and for one group of torch's."""

import inspect
import re
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from pipegrid.core.order import ORDER_MODELS
from pipegrid.plans import (
    ActionKind,
    actions_of,
    dualpipe_v,
    from_csv,
    interleaved_zero_bubble,
    lower,
    one_f_one_b,
    to_torch,
    v_half,
    zero_bubble_v,
)
from pipegrid.plans.orders import Launch, orders_of_plan, orders_of_torch, plan_of_torch, prove_order
from pipegrid.schedules import PlanError, interleaved_1f1b, to_csv, torch_schedule, verify
from pipegrid.schedules.__main__ import main

LOOPED = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
RANKS, MICROBATCHES = 4, 8
PAGE = Path(__file__).parents[4] / "docs" / "museum" / "index.md"
COLUMNS = ("nccl-legacy", "nccl2", "nccl-lazy", "nccl-serial", "nccl-connecting", "gloo")


@pytest.fixture
def one_of_four():
    """A rank of a group of four whose other members are not there."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def made(name, microbatches=MICROBATCHES, **options):
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
    return schedule(own if len(own) > 1 else own[0], microbatches, loss_fn=lambda y, _: y.sum(), **options)


@pytest.mark.parametrize("name", LOOPED + V_SHAPED)
def test_a_schedule_of_several_stages_is_proved_with_the_messages_that_it_has(one_of_four, name):
    schedule = made(name)
    plan = plan_of_torch(schedule)
    assert plan.has_communication
    assert (plan.num_positions, plan.num_stages, plan.num_microbatches) == (RANKS, 2 * RANKS, MICROBATCHES)
    verify(plan)
    for model in ORDER_MODELS.values():
        prove_order(orders_of_plan(plan), model, drains=True)
        prove_order(orders_of_torch(schedule), model, drains=True)
        prove_order(orders_of_torch(schedule, batched=False), model, drains=True)


def round_of(microbatches):
    """The microbatches that pass through a chunk before the next one's turn, as torch divides them."""
    return microbatches // max(1, microbatches // RANKS)


OF_THE_SAME_NAME = {
    "ScheduleInterleaved1F1B": lambda m: interleaved_1f1b(RANKS, m, group_size=round_of(m)),
    "ScheduleInterleavedZeroBubble": lambda m: interleaved_zero_bubble(RANKS, m, group_size=round_of(m)),
    "ScheduleZBVZeroBubble": lambda m: zero_bubble_v(RANKS, m),
    "ScheduleDualPipeV": lambda m: dualpipe_v(RANKS, m, overlap=True),
}


@pytest.mark.parametrize("name", OF_THE_SAME_NAME)
def test_a_named_schedule_has_the_computes_of_torchs_class_action_by_action(one_of_four, name):
    for microbatches in (1, 3, 4, 5, 6, 8, 9, 10, 13, 16):
        if name == "ScheduleDualPipeV" and microbatches < 2 * RANKS:
            continue  # fewer than torch's class takes
        if name in LOOPED and microbatches % round_of(microbatches):
            continue
        theirs, ours = plan_of_torch(made(name, microbatches)), OF_THE_SAME_NAME[name](microbatches)
        for rank, steps in enumerate(theirs.positions):
            computes = [step for step in steps if all(action.kind.is_compute for action in actions_of(step))]
            assert computes == list(ours.positions[rank]), (microbatches, rank)


def waits_of(orders):
    return [launch.text for launches in orders.ranks for launch in launches if launch.waits]


@pytest.mark.parametrize("name", LOOPED + V_SHAPED)
def test_from_torch_2_15_on_a_schedule_waits_for_each_of_its_sends(one_of_four, name):
    orders = orders_of_torch(made(name))
    sends = sum(message.way == "send" for launches in orders.ranks for one in launches for message in one.messages)
    assert len(waits_of(orders)) == (sends if hasattr(schedules._ComputationType, "WAIT_SEND_F") else 0)


def takes(name, option):
    return option in inspect.signature(getattr(schedules, name)).parameters


@pytest.mark.parametrize("options", [{"max_outstanding_sends": 1}, {"defer_reduce_grad_wait": True}], ids=str)
@pytest.mark.parametrize("name", LOOPED + V_SHAPED)
def test_a_schedule_with_waits_elsewhere_is_proved(one_of_four, name, options):
    if not takes(name, *options):
        pytest.skip("schedules of this torch have no such waits")
    orders = orders_of_torch(made(name, **options))
    for model in ORDER_MODELS:
        prove_order(orders, model, drains=True)


DEFERRED = [
    (name, cells)
    for row in re.finditer(r"^\|((?:[ ,]+`\w+`)+) \|((?: \w+ \|){6})$", PAGE.read_text(), re.MULTILINE)
    for name in re.findall(r"\w+", row[1])
    for cells in [row[2].strip(" |").split(" | ")]
]


@pytest.mark.parametrize(("name", "cells"), DEFERRED, ids=[name for name, _ in DEFERRED])
def test_deferred_receives_of_torch_end_as_the_page_says(one_of_four, name, cells):
    if not takes(name, "defer_pp_recv"):
        pytest.skip("schedules of this torch do not defer receives")
    orders = orders_of_torch(made(name, defer_pp_recv=True), batched=False)
    for model, cell in zip(COLUMNS, cells, strict=True):
        assert outcome(orders, model) == cell, model
        assert outcome(orders, model, buffered=True) == ("crosses" if cell == "crosses" else "ends"), model


def test_deferred_receives_of_torch_get_stuck_where_each_send_is_waited_for_at_once(one_of_four):
    if not takes("ScheduleInterleaved1F1B", "defer_pp_recv"):
        pytest.skip("schedules of this torch do not defer receives")
    orders = orders_of_torch(made("ScheduleInterleaved1F1B", defer_pp_recv=True))
    rows = [[one for one in row if not one.waits] for row in orders.ranks]
    at_once = [chain.from_iterable([one, wait_for(one)] if is_send(one) else [one] for one in row) for row in rows]
    assert outcome(orders, "gloo") == "ends"
    assert outcome(evolve(orders, ranks=tuple(map(tuple, at_once))), "gloo") == "hangs"


def outcome(orders, model, **options):
    try:
        prove_order(orders, model, **options)
    except PlanError as error:
        return {"cycle": "hangs", "order": "crosses"}[error.faults[0].rule]
    return "ends"


def is_send(launch):
    return any(message.way == "send" for message in launch.messages)


def wait_for(launch):
    return Launch("wait", waits=frozenset(message.label for message in launch.messages))


def test_the_table_that_torch_writes_goes_through_the_command_line(one_of_four, tmp_path, capsys):
    table = tmp_path / "interleaved.csv"
    made("ScheduleInterleaved1F1B")._dump_csv(str(table))
    assert main(["verify", str(table), "--order", "nccl2", "--order", "gloo"]) == 0
    printed = capsys.readouterr().out
    assert "4 positions, 8 microbatches" in printed
    assert "no deadlock under gloo" in printed


@pytest.mark.parametrize("name", SINGLE)
def test_a_schedule_of_one_stage_runs_a_loop_of_its_own(one_of_four, name):
    with pytest.raises(PlanError, match=f"{name} runs a loop of its own"):
        plan_of_torch(made(name))


def test_an_object_that_tells_no_order_is_an_error():
    with pytest.raises(PlanError, match="object tells no order"):
        plan_of_torch(object())


def test_torch_reads_every_cell_of_a_written_csv_as_it_stands():
    for row in to_csv(interleaved_1f1b(2, 4)).splitlines():
        assert [str(schedules._Action.from_str(cell)) for cell in row.split(",")] == row.split(",")


# ---- Plans of pipegrid in torch's runtime


def stages_of(plan, rank=0):
    return [
        PipelineStage(nn.Linear(2, 2), stage, plan.num_stages, torch.device("cpu")) for stage in plan.stages_at[rank]
    ]


def test_what_a_plan_takes_of_torchs_private_names(one_of_four):
    runtime = schedules._PipelineScheduleRuntime
    assert list(inspect.signature(runtime._load_csv).parameters) == ["self", "filename", "format"]
    kinds = {kind.name for kind in schedules._ComputationType}
    waits = {"WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD"}
    assert kinds & waits in (set(), waits)  # all in torch 2.15, none in 2.11 and 2.13
    assert {"F", "I", "W", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"} <= {
        kind.value for kind in schedules._ComputationType
    }
    assert list(inspect.signature(schedules.PipelineScheduleMulti.__init__).parameters)[1:4] == [
        "stages",
        "n_microbatches",
        "loss_fn",
    ]
    assert {"group_size", "group_rank", "stage_index", "num_stages"} <= vars(
        PipelineStage(nn.Linear(2, 2), 0, 4, torch.device("cpu"))
    ).keys()


def test_a_plan_is_in_torchs_runtime_as_it_was_lowered(one_of_four):
    plan = v_half(RANKS, MICROBATCHES)
    lowered = lower(plan)
    assert plan_of_torch(torch_schedule(plan, stages_of(plan), loss_fn=nn.functional.mse_loss)).has_communication
    theirs = plan_of_torch(torch_schedule(lowered, stages_of(plan), loss_fn=nn.functional.mse_loss))
    for position in range(RANKS):
        beside = (ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD)
        found = [action for action in theirs.actions(position) if action.kind not in beside]
        assert found == list(lowered.actions(position))


def test_stages_that_are_not_those_of_the_plan_are_an_error(one_of_four):
    plan = v_half(RANKS, MICROBATCHES)
    with pytest.raises(PlanError, match=r"rank 0 has the stages \[0, 4\] of 8; in the plan it has \[0, 7\] of 8"):
        torch_schedule(plan, stages_of(interleaved_1f1b(RANKS, MICROBATCHES, num_chunks=2)))
    with pytest.raises(PlanError, match="a group of 4 ranks, the plan has 2 positions"):
        torch_schedule(v_half(2, 4), stages_of(plan))


def with_late_receives(plan):
    """The plan with each receive right before the compute of its stage and microbatch."""
    rows = []
    for row in to_torch(plan).splitlines():
        cells = [cell for cell in row.split(",") if "REDUCE" not in cell]
        receives = {cell.replace("RECV_", ""): cell for cell in cells if "RECV" in cell}
        rows.append(",".join(one for cell in cells if "RECV" not in cell for one in (receives.get(cell), cell) if one))
    return from_csv("\n".join(rows))


def test_a_plan_whose_receives_hang_on_one_group_is_an_error(one_of_four):
    plan = with_late_receives(lower(one_f_one_b(RANKS, MICROBATCHES)))
    stages = stages_of(plan)
    with pytest.raises(PlanError, match="deadlock under nccl2"):
        torch_schedule(plan, stages, order=["gloo", "nccl2"])
    assert isinstance(torch_schedule(plan, stages, order=["gloo"]), schedules._PipelineScheduleRuntime)
