"""The errors of running a plan; those of planning are in `pipegrid.plans.errors`."""

from __future__ import annotations

from pipegrid.core.errors import StepArgumentError as StepArgumentError
from pipegrid.gradients.errors import GradientError as GradientError
from pipegrid.plans.errors import PlanError
from pipegrid.transport.errors import CollectiveFailedError


class StageOutputError(ValueError):
    """A forward returned outputs that the outgoing edges cannot carry, or of other shapes than announced.

    Also: a loss function returned a value that cannot be a loss; a stage wrote into what it returned for a microbatch
    before that was read, or into a received tensor.
    """


class DataEndedError(ValueError):
    """A stage's data ended before the step did."""


# Names of one thing each that no caller handled differently; for this version.
PlanFieldError = PlanError
PlanMismatchError = AnnouncedShapesError = RuntimeArgumentError = MonitorError = StepArgumentError
StageInputError = LossError = StageOutputError
LossScaleError = ReductionError = MainGradError = DeferralError = TyingError = GradientError
ReductionFailedError = ReductionTimeoutError = ReductionPeerError = CollectiveFailedError
