"""Gradients beside the schedule: reduction, norm, tied parameters, accumulation type, loss scale, output layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.schedules._lazy import lazy_names
from pipegrid.schedules.gradients.loss_scale import LossScale, LossScaleError
from pipegrid.schedules.gradients.tying import TyingError, with_reduce

if TYPE_CHECKING:
    from pipegrid.schedules.gradients.clip import clip_grad_norm_
    from pipegrid.schedules.gradients.loss_scaler import LossScaler, scale_loss, unscale_gradients_
    from pipegrid.schedules.gradients.main_grad import MainGradError, accumulate_in_main_grad, zero_main_grads
    from pipegrid.schedules.gradients.output_layer import (
        DeferralError,
        clear_embedding_activation_buffer,
        deferred_weight_gradients,
        finish_embedding_wgrad_compute,
        output_linear,
    )
    from pipegrid.schedules.gradients.policy import FinishGradients, gradient_reduction, required_ties
    from pipegrid.schedules.gradients.reduce import GradientError, collection_of, reduce_gradients
    from pipegrid.schedules.gradients.tied import TiedParameters, tie_parameters, tied_stages

__all__ = [
    "DeferralError",
    "FinishGradients",
    "GradientError",
    "LossScale",
    "LossScaleError",
    "LossScaler",
    "MainGradError",
    "TiedParameters",
    "TyingError",
    "accumulate_in_main_grad",
    "clear_embedding_activation_buffer",
    "clip_grad_norm_",
    "collection_of",
    "deferred_weight_gradients",
    "finish_embedding_wgrad_compute",
    "gradient_reduction",
    "output_linear",
    "reduce_gradients",
    "required_ties",
    "scale_loss",
    "tie_parameters",
    "tied_stages",
    "unscale_gradients_",
    "with_reduce",
    "zero_main_grads",
]

__getattr__ = lazy_names(
    __name__,
    {
        "clip": ("clip_grad_norm_",),
        "loss_scaler": ("LossScaler", "scale_loss", "unscale_gradients_"),
        "main_grad": ("MainGradError", "accumulate_in_main_grad", "zero_main_grads"),
        "output_layer": (
            "DeferralError",
            "clear_embedding_activation_buffer",
            "deferred_weight_gradients",
            "finish_embedding_wgrad_compute",
            "output_linear",
        ),
        "policy": ("FinishGradients", "gradient_reduction", "required_ties"),
        "reduce": ("GradientError", "collection_of", "reduce_gradients"),
        "tied": ("TiedParameters", "tie_parameters", "tied_stages"),
    },
)
