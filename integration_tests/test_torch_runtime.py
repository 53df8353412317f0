"""pipegrid's plans in torch's own pipeline runtime: the gradients of one process, from either form of a plan.

It runs what `lower` made, and was written by others: an independent second executor.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipegrid.plans import SCHEDULES, Costs, find_schedule, from_csv, lower, to_csv
from pipegrid.schedules import torch_schedule
from pipegrid.search import search

FEATURES, ROWS = 6, 2
TOLERANCE = 1e-12
NAMES = [name for name, schedule in SCHEDULES.items() if schedule.trains]


def module(stage):
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()).double()


def searched(ranks, count):
    """A plan that no paper has: backwards take twice as long, under a cap below that of ZB-V.

    How far it is searched depends on the machine: one rank does, and the others take its plan.
    """
    costs = Costs(F=1.0, I=2.0, W=1.0)
    found = search(
        costs, float(ranks), num_positions=ranks, num_microbatches=count, num_stages=2 * ranks, time_limit=1.0
    )
    return found.plan


def plan_named(name, ranks, count, group):
    """A named schedule, with pairs where its name says so."""
    name, *pairs = name.split(" with ")
    if name != "search":
        return find_schedule(name).plan(ranks.world_size, count, overlap=bool(pairs))
    found = [to_csv(searched(ranks.world_size, count)) if ranks.rank == 0 else None]
    dist.broadcast_object_list(found, 0, group=group)
    return from_csv(found[0])


def errors(plan, count, rank, group):
    """The largest difference of a gradient of this rank, and of its loss, from one process."""
    stages = [
        PipelineStage(module(stage), stage, plan.num_stages, torch.device("cpu"), group=group)
        for stage in plan.stages_at[rank]
    ]
    schedule = torch_schedule(plan, stages, loss_fn=nn.functional.mse_loss, scale_grads=True)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS * count, FEATURES, generator=generator, dtype=torch.float64) for _ in range(2))
    holds_last = plan.num_stages - 1 in plan.stages_at[rank]
    losses = []
    given = {"target": y, "losses": losses} if holds_last else {}
    schedule.step(*([x] if 0 in plan.stages_at[rank] else []), **given)
    alone = nn.Sequential(*map(module, range(plan.num_stages)))
    loss = nn.functional.mse_loss(alone(x), y)
    loss.backward()
    pairs = [
        (ours.grad, theirs.grad)
        for stage in stages
        for ours, theirs in zip(stage.submod.parameters(), alone[stage.stage_index].parameters(), strict=True)
    ]
    pairs += [(torch.stack(losses).mean(), loss)] if holds_last else []
    return max(float((one.detach() - other.detach()).abs().max()) for one, other in pairs)


def check(ranks, names, counts):
    group = dist.new_group(backend="gloo")
    for name in names:
        for count in counts:
            plan = plan_named(name, ranks, count, group)
            for form in (plan, lower(plan)):
                worst = errors(form, count, ranks.rank, group)
                assert worst <= TOLERANCE, f"{name}, {count} microbatches, {form.has_communication}: {worst}"
    dist.destroy_process_group(group)


@pytest.mark.ranks(2, backend="gloo")
def test_a_plan_in_torchs_runtime_has_the_gradients_of_one_process(ranks):
    check(ranks, ["v_half", "interleaved_zero_bubble", "search"], [3])


@pytest.mark.ranks(2, backend="gloo")
def test_torch_runs_pairs(ranks):
    check(ranks, [f"{name} with pairs" for name, known in SCHEDULES.items() if known.pairs], [5])


@pytest.mark.nightly
@pytest.mark.parametrize("more", [0, 1, 4])
@pytest.mark.ranks(2, backend="gloo", deadline=300)
def test_every_named_schedule_on_two_ranks(ranks, more):
    check(ranks, [*NAMES, "search"], [2 + more])


@pytest.mark.nightly
@pytest.mark.parametrize("more", [0, 1, 4])
@pytest.mark.ranks(4, backend="gloo", deadline=300)
def test_every_named_schedule_on_four_ranks(ranks, more):
    check(ranks, [*NAMES, "search"], [4 + more])
