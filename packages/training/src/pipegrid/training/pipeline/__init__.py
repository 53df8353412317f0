"""One object for a job: modules, their communicator, steps, checkpoints."""

from pipegrid.training.pipeline.modules import PipelineModule
from pipegrid.training.pipeline.pipeline import Pipeline

__all__ = ["Pipeline", "PipelineModule"]
