"""The training script that the planner writes, on ranks: as it is, each choice of a job trains."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.core.errors import StepArgumentError
from pipegrid.planner import Device, Job, Layers, ModuleCosts, Network, Training, dry_run, plan
from pipegrid.planner.script import training_script
from pipegrid.schedules import PipelineConfig
from pipegrid.topology import HyperCommGrid, PlacementError
from pipegrid.training import Pipeline

STEPS = 2


def job(schedule, *, frozen=False):
    images = ModuleCosts("images", (Layers("encoder", 2, flops=1e12, parameters=10),), 1e3, frozen=frozen)
    language = ModuleCosts(
        "language",
        (Layers("embedding", flops=1e11, parameters=10), Layers("decoder", 6, flops=1e12, parameters=10)),
        1e3,
        pp=(2,),
    )
    training = Training(schedules=(schedule,), microbatch=(2,))
    return Job(
        (images, language), 8, Device(1e14, 1e9), Network(1e9, 1e9), (("images", "language"),), training=training
    )


def watched(script, losses):
    """The script as a module; ``losses`` gets those of each microbatch, ``made`` its stages and how they began."""
    names: dict = {"__name__": "planned", "made": []}
    exec(compile(script, "train.py", "exec"), names)

    class Watched(Pipeline):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            stages = ((name, stage) for name, held in self.stages.items() for stage in held)
            names["made"] += [(name, stage, deepcopy(stage.state_dict())) for name, stage in stages]

    def loss_of(output, microbatch):
        loss = script_loss(output, microbatch)
        if loss.requires_grad:  # else asked what it is a mean over
            losses.append(loss.item())
        return loss

    script_loss = names["loss_of"]
    names.update(Pipeline=Watched, loss_of=loss_of, STEPS=STEPS)
    return names


@pytest.mark.few(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble_v"])
def test_a_written_script_trains_every_arrangement(schedule):
    choices = plan(job(schedule), gpus=4).choices
    seen = set()
    for choice in choices:
        if str(choice.arrangement) in seen:
            continue
        seen.add(str(choice.arrangement))
        losses: list[float] = []
        names = watched(training_script(choice), losses)
        main = names["main"]
        if schedule == "interleaved_1f1b":
            names["LAYOUTS"]["language"] = "Et(|t)*2|t*3"  # folded, as the layouts of deep modules are
        if choice.arrangement.gpus != dist.get_world_size():
            with pytest.raises(PlacementError, match="a world of 4 ranks: .* left over"):
                main()
            continue
        main()
        names["LAYOUTS"]["language"] += "|"
        with pytest.raises(
            StepArgumentError, match=r"layout '.*\|' has \d stages, and the grid \d pp ranks; give a mult"
        ):
            main()
        found: list = [None] * dist.get_world_size()
        dist.all_gather_object(found, losses)
        told = [each for each in found[1:] if each]  # the first rank computes those of the compared step as well
        assert told, f"no rank had the loss in {choice.arrangement}"
        assert all(len(each) == STEPS * choice.shape.job.global_batch // choice.microbatch for each in told)
    assert seen


def choices_of_all_ranks(job):
    """A choice for each arrangement that needs every rank."""
    size = dist.get_world_size()
    found = {str(one.arrangement): one for one in plan(job, gpus=size).choices if one.arrangement.gpus == size}
    assert found
    return found.values()


@pytest.mark.few(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_a_written_script_leaves_frozen_modules_as_they_are(schedule):
    for choice in choices_of_all_ranks(job(schedule, frozen=True)):
        names = watched(training_script(choice), [])
        names["main"]()
        for module, stage, began in names["made"]:
            ended = stage.state_dict()
            assert all(torch.equal(began[key], ended[key]) for key in began) == (module == "images"), module


@pytest.mark.few(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_a_dry_run_counts_the_communicators_that_ranks_open(schedule):
    for choice in choices_of_all_ranks(job(schedule)):
        found = dry_run(choice)
        grids = {
            name: HyperCommGrid(list(grid.shape), list(grid.dim_names), rank_offset=grid.rank_offset)
            for name, grid in choice.arrangement.grids.items()
        }
        mine = [grid for grid in grids.values() if grid.is_current_rank_in_grid()]
        config = PipelineConfig(pipeline_dtype=torch.float32)
        places = choice.shape.stage_places
        pipe = MultiModulePipelineCommunicator(
            grids, {"images": ["language"]}, config, stage_placement=places, traffic=found.proof.plan.traffic
        )
        groups = sum(size > 1 for grid in mine for size in grid.shape)
        opened = pipe.communicators + groups
        pipe.destroy()
        assert opened == found.communicators[dist.get_rank()], str(choice.arrangement)
