"""The errors of running a plan; those of planning are in `pipegrid.plans.errors`."""

from __future__ import annotations

from pipegrid.core.errors import StepArgumentError as StepArgumentError
from pipegrid.gradients.errors import GradientError as GradientError


class StageOutputError(ValueError):
    """A forward returned outputs that the outgoing edges cannot carry, or of other shapes than announced.

    Also: a loss function returned a value that cannot be a loss; a stage wrote into what it returned for a microbatch
    before that was read, or into a received tensor.
    """


class DataEndedError(ValueError):
    """A stage's data ended before the step did."""
