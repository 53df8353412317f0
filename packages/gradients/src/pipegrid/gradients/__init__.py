"""Gradients summed over ranks: replicas, tied copies, one norm of the job, main_grad, loss scale, output layer.

Plain functions over the modules of a rank and its groups, in any training loop. Names that need torch load on use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.core.lazy import lazy_names
from pipegrid.gradients.errors import GradientError
from pipegrid.gradients.loss_scale import LossScale

if TYPE_CHECKING:
    from pipegrid.gradients.clip import clip_grad_norm_
    from pipegrid.gradients.groups import collection_of
    from pipegrid.gradients.loss_scaler import LossScaler, scale_loss, unscale_gradients_
    from pipegrid.gradients.main_grad import accumulate_in_main_grad, fresh_gradients, zero_main_grads
    from pipegrid.gradients.output_layer import (
        clear_embedding_activation_buffer,
        deferred_weight_gradients,
        finish_embedding_wgrad_compute,
        output_linear,
    )
    from pipegrid.gradients.reduction import (
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
    "zero_main_grads",
]

__getattr__, __dir__ = lazy_names(__name__, __all__)
