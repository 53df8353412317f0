"""A model over the ranks of a job: its values, the grid with its groups, and this rank's stages."""

from __future__ import annotations

import torch

from pipegrid.monitor.collectives import Waiting
from pipegrid.schedules import stage_places
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.training import pipeline_stage
from pipegrid.training.pipeline.counts import CallMeeting, StepCounts

LAYOUTS = {2: "Et|t*3L", 4: "Et|t|t|tL"}
"""Of four layers, by the number of stages."""


def made(make):
    """A function that makes the model in float64, with the same values on every rank and in one process."""

    def seeded():
        torch.manual_seed(3)
        return make().double()

    return seeded


def grid_of(**sizes):
    """A grid of these dims, the fastest first, and the groups of each."""
    grid = HyperCommGrid([*sizes.values()], [*sizes])
    grid.create_pgs([*sizes])
    return grid, ProcessGroupCollection.from_grid(grid)


def stages_on(grid, make, schedule):
    """This rank's stages of the model that `made` makes, under a schedule."""
    return pipeline_stage(
        made(make), LAYOUTS[len(stage_places(schedule, grid.dim_size("pp")))], grid, schedule=schedule
    )


def counted(sums):
    """The counts of a step in which this rank's microbatches count ``sums`` (`sums_of`)."""
    meeting = CallMeeting("step", torch.device("cpu"), None, Waiting())
    meeting.start(sums)
    return StepCounts(meeting)
