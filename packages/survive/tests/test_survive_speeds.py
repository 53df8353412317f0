"""Units that leave slow ranks while a job of survivors runs."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.schedules import Actor, PipelineConfig, UnitBatches, forward_backward_with_schedule, one_f_one_b
from pipegrid.survive import PipelineJob, SurviveError, Survivors
from pipegrid.topology import HyperCommGrid

UNITS = 4


def train(survivors, model, step):
    """One step, and its end; the gradient, and what `end_step` found."""

    def forward_step(batches, model):
        value = next(batches)
        return model(model.received[0] if model.number else value), lambda output: (output.square().mean(), {})

    def forward_backward(world):
        forward_backward_with_schedule(
            schedule="1f1b",
            forward_step_func=forward_step,
            data_iterator=UnitBatches(lambda replica, unit: torch.full((2, 3), 1.0 + UNITS * replica + unit).double()),
            model=model,
            num_microbatches=UNITS,
            p2p_communicator=world.communicator,
            pg_collection=world.groups,
            routes=world.routes,
        )
        return world.end_step()

    found = survivors.run(f"step {step}", forward_backward)
    gradient = model.weight.grad.clone()
    model.weight.grad = model.bias.grad = None
    return gradient, found


@pytest.mark.ranks(4)
def test_units_leave_a_slow_rank_and_are_at_home_again_when_it_has_recovered(ranks):
    rank, grid = dist.get_rank(), HyperCommGrid([2, 2], ["dp", "pp"])  # rank 3: position 1 of replica 1
    grid.create_pg("pp")
    model = nn.Linear(3, 3).double()
    model.config, model.number, model.received = (
        PipelineConfig(pipeline_dtype=torch.float64),
        grid.coords(rank)["pp"],
        None,
    )
    model.set_input_tensor = lambda received: setattr(model, "received", received)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 10)
    job = PipelineJob(grid, one_f_one_b(2, UNITS), model.config, timeout=10.0, speeds="measured")
    with Survivors(ranks.store, job, modules=model) as survivors:
        world, ticks, takes = survivors._world, itertools.count(), 3.0 if rank == 3 else 1.0
        world._times._clock = lambda: takes * next(ticks)  # a compute takes one tick, or three
        at_home, found = train(survivors, model, 0)
        assert found == ()
        assert world.plan.num_replicas == 1
        for step in range(1, 10):
            _, found = train(survivors, model, step)
        assert [(slow.rank, slow.factor) for slow in found] == [(3, 3.0)]
        moved = {(move.unit, move.stage, move.replica) for move in world.routes.moves}
        assert {stage for _, stage, _ in moved} == {1}
        assert {replica for *_, replica in moved} == {0}
        assert world.plan.num_replicas == 2  # proved again, of the new routes
        takes = 1.0
        for step in range(10, 20):
            gradient, found = train(survivors, model, step)
            torch.testing.assert_close(gradient, at_home, rtol=0, atol=1e-12)
        assert found == ()
        assert not world.routes.moves


def test_speeds_are_by_actor_or_measured():
    grid = HyperCommGrid([2, 1], ["dp", "pp"], world_size=2)
    PipelineJob(grid, one_f_one_b(1, 4), speeds={Actor(0, 1): 0.5})
    with pytest.raises(SurviveError, match="speeds is 'mesured'; give speeds by actor, or 'measured'"):
        PipelineJob(grid, one_f_one_b(1, 4), speeds="mesured")
