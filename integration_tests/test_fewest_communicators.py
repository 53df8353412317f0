"""The communicators that a proof found for a plan, opened as they are: as many groups, the same gradients, no hang."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from attrs import evolve

from pipegrid.core.lanes import LaneSharing
from pipegrid.plans.orders import fewest_communicators
from pipegrid.schedules import SCHEDULES, PipelineError, PipelineRuntime, PlanError, from_text, lower, verify
from pipegrid.transport import P2PCommunicator, P2PConfig

from .kit.rows import ROWS, Layer, in_one_process

MODES = ("streams", "serial", "nccl2", "lazy")
# In the middle both positions send before they receive, each on a communicator of its own or they wait for each other.
FACING = from_text("""
modules model:2
placement 0 1
microbatches 2
0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0
""")


def moved(plan, chance, times):
    """The plan with some steps of a position exchanged with the next, batches made and taken apart."""
    positions = [list(steps) for steps in plan.positions]
    for _ in range(times):
        steps = positions[chance.randrange(len(positions))]
        number = chance.randrange(len(steps) - 1)
        batches = [step if isinstance(step, tuple) else (step,) for step in steps[number : number + 2]]
        if chance.random() < 0.5 and all(action.kind.is_message for batch in batches for action in batch):
            steps[number : number + 2] = [batches[0] + batches[1]]
        elif len(batches[0]) > 1:
            steps[number : number + 1] = batches[0][::-1]
        else:
            steps[number : number + 2] = steps[number : number + 2][::-1]
    return evolve(plan, positions=positions)


def random_plan(chance, num_positions):
    """A small plan with the fewest communicators that it ends with, and a proof of the two together."""
    while True:
        schedule = SCHEDULES[chance.choice(sorted(SCHEDULES))]
        slices = ROWS if schedule.sliced else None
        plan = lower(schedule.plan(num_positions, chance.randint(1, 4), num_slices=slices))
        try:
            found = fewest_communicators(moved(plan, chance, chance.randint(0, 3)))
            return found, verify(found.plan, lanes=found)
        except PlanError:  # a move too many
            continue


def run(ranks, proof, found, **settings):
    """Two steps of a plan on its communicators: groups as printed, gradients of one process."""
    plan = proof.plan
    config = P2PConfig(
        pipeline_dtype=torch.float64,
        communicators=found,
        deadline=30.0,
        staged=ranks.backend == "staged",
        **{"strict": ranks.strict_sends, **settings},
    )
    placement = [positions[0] for positions in plan.placement]
    communicator = P2PCommunicator(dist.group.WORLD, config, placement=placement, device=ranks.device)
    groups = {lane.group.group_name: lane.group.size() for lane in communicator.lanes.values() if lane.group}
    assert len(groups) == found.per_position[ranks.rank] == proof.communicators[ranks.rank], str(found)
    assert sorted(groups.values()) == sorted(len(one) for one in found.members if ranks.rank in one)
    stages = {stage: Layer(plan, stage, ranks.device) for stage in plan.stages_at[ranks.rank]}
    runtime = PipelineRuntime(proof, stages, communicator)
    assert runtime.proof is proof
    expected = in_one_process(plan, ranks.device)
    for step in (1, 2):
        runtime.step()
        for number, stage in stages.items():
            theirs = expected[number].model.parameters()
            for mine, other in zip(stage.model.parameters(), theirs, strict=True):
                assert number in plan.forward_only or torch.allclose(mine.grad, step * other.grad, rtol=1e-10), number
    communicator.close()


def over(backend, *modes, size=3):
    """Cases of ranks in each mode; in every run the one of today's torch."""
    return [
        pytest.param(
            mode,
            marks=[
                pytest.mark.ranks(size, backend=backend, fake_nccl=mode, deadline=300),
                *([] if mode == "nccl2" else [pytest.mark.nightly]),
            ],
        )
        for mode in modes
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", over("fake_nccl", *MODES))
def test_a_plan_of_every_schedule(ranks, mode):
    for name, schedule in SCHEDULES.items():
        ranks.report_position(name)
        slices = ROWS if schedule.sliced else None
        plan = lower(schedule.plan(ranks.world_size, 4, num_slices=slices))
        found = fewest_communicators(plan)
        run(ranks, verify(plan, lanes=found), found)


@pytest.mark.ranks(3, deadline=300)
@pytest.mark.parametrize("settings", [{}, {"strict": True}, {"variable_seq_lengths": True}], ids=str)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 8))])
def test_random_plans(ranks, settings, seed):
    """Over the backend of the session; in strict mode and with headers, where the host waits as well."""
    chance = random.Random(seed)
    for number in range(3):
        found, proof = random_plan(chance, ranks.world_size)
        ranks.report_position(f"plan {number}: {found}\n{proof.plan}")
        run(ranks, proof, found, **settings)


@pytest.mark.parametrize("mode", over("fake_nccl", *MODES))
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in (1, 2))])
def test_random_plans_on_a_fake_gpu(ranks, mode, part):
    chance = random.Random(f"{mode} {part}" if part else mode)
    for number in range(6):
        found, proof = random_plan(chance, ranks.world_size)
        ranks.report_position(f"plan {number}: {found}\n{proof.plan}")
        run(ranks, proof, found)


@pytest.mark.parametrize("mode", over("fake_nccl", "streams", "nccl2", size=2))
def test_a_wrong_assignment_is_rejected_by_the_proof_and_hangs_without_it(ranks, mode):
    found = fewest_communicators(FACING, "nccl2")
    assert found.per_position == (2, 2)
    proof = verify(FACING, lanes=found, order="nccl2")
    run(ranks, proof, found)
    wrong = LaneSharing([found.numbers])
    with pytest.raises(PlanError, match="deadlock under nccl2"):
        verify(FACING, lanes=wrong, order="nccl2")
    config = P2PConfig(pipeline_dtype=torch.float64, communicators=wrong, deadline=3.0)
    communicator = P2PCommunicator(dist.group.WORLD, config, device=ranks.device)
    stages = {ranks.rank: Layer(FACING, ranks.rank, ranks.device)}
    with pytest.raises(PlanError, match="deadlock under nccl"):
        PipelineRuntime(FACING, stages, communicator)
    with pytest.raises(PipelineError, match=r"position \d, step \d of \d.*"):
        PipelineRuntime(evolve(proof, lanes=wrong), stages, communicator).step()
    communicator.close()
