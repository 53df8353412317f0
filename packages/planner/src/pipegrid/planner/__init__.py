"""The best grids, layout, schedule and microbatch size of a job, searched by prediction and proved. No torch.

Names outside ``__all__`` (results, and what survives failures) are imported from here as well.
"""

from pipegrid.planner.choice import Choice as Choice, Memory as Memory
from pipegrid.planner.dry_run import DryRun as DryRun, dry_run
from pipegrid.planner.errors import JobError, NoFitError
from pipegrid.planner.job import Device, Job, Layers, Measured, ModuleCosts, Network, Training
from pipegrid.planner.layer_costs import layer_costs as layer_costs, layers_toml as layers_toml
from pipegrid.planner.reading import parse_job as parse_job, read_job
from pipegrid.planner.search import Planned as Planned, plan, refined
from pipegrid.planner.survival import (
    Survival as Survival,
    count_survivable as count_survivable,
    survivable as survivable,
    survivable_table as survivable_table,
)
from pipegrid.planner.what_if import WhatIf as WhatIf, what_if

__all__ = [
    "Device",
    "Job",
    "JobError",
    "Layers",
    "Measured",
    "ModuleCosts",
    "Network",
    "NoFitError",
    "Training",
    "dry_run",
    "plan",
    "read_job",
    "refined",
    "what_if",
]
