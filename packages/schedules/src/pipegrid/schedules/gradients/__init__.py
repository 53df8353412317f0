"""Gradients beside the schedule: reduction over ranks, norm, accumulation type, loss scale, output layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.schedules.errors import (
    DeferralError as DeferralError,
    GradientError,
    LossError as LossError,
    LossScaleError as LossScaleError,
    MainGradError as MainGradError,
    ReductionFailedError,
    ReductionTimeoutError as ReductionTimeoutError,
    TyingError as TyingError,
)
from pipegrid.schedules.gradients.loss_scale import LossScale
from pipegrid.plans.passes.lowering import with_reduce
from pipegrid.core.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.schedules.gradients.clip import clip_grad_norm_
    from pipegrid.schedules.gradients.groups import collection_of
    from pipegrid.schedules.gradients.loss_scaler import LossScaler, scale_loss, unscale_gradients_
    from pipegrid.schedules.gradients.main_grad import (
        accumulate_in_main_grad,
        fresh_gradients,
        zero_main_grads,
    )
    from pipegrid.schedules.gradients.output_layer import (
        clear_embedding_activation_buffer,
        deferred_weight_gradients,
        finish_embedding_wgrad_compute,
        output_linear,
    )
    from pipegrid.schedules.gradients.reduction import (
        ReplicaError,
        TiedParameters,
        reduce_gradients,
        require_equal_replicas,
        required_ties,
        tie_parameters,
        tied_stages,
        ties_among,
    )

__all__ = [
    "GradientError",
    "LossScale",
    "LossScaler",
    "ReductionFailedError",
    "ReplicaError",
    "TiedParameters",
    "accumulate_in_main_grad",
    "clear_embedding_activation_buffer",
    "clip_grad_norm_",
    "collection_of",
    "deferred_weight_gradients",
    "finish_embedding_wgrad_compute",
    "fresh_gradients",
    "output_linear",
    "reduce_gradients",
    "require_equal_replicas",
    "required_ties",
    "scale_loss",
    "tie_parameters",
    "tied_stages",
    "ties_among",
    "unscale_gradients_",
    "with_reduce",
    "zero_main_grads",
]

__getattr__, __dir__ = lazy_names(__name__, __all__)
