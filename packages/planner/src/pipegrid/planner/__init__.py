"""The best grids, layout, schedule and microbatch size of a job, searched by prediction and proved. No torch."""

from pipegrid.planner.choice import Choice, Memory as Memory
from pipegrid.planner.dry_run import DryRun, dry_run
from pipegrid.planner.errors import JobError, NoFitError
from pipegrid.planner.job import Device, Job, Layers, Measured, Module, Network, Training
from pipegrid.planner.layer_costs import layer_costs, layers_toml as layers_toml
from pipegrid.planner.reading import parse_job, read_job
from pipegrid.planner.refine import refined
from pipegrid.planner.search import Planned, plan
from pipegrid.planner.what_if import WhatIf, what_if

__all__ = [
    "Choice",
    "Device",
    "DryRun",
    "Job",
    "JobError",
    "Layers",
    "Measured",
    "Module",
    "Network",
    "NoFitError",
    "Planned",
    "Training",
    "WhatIf",
    "dry_run",
    "layer_costs",
    "parse_job",
    "plan",
    "read_job",
    "refined",
    "what_if",
]
