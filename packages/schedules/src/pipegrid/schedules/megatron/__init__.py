"""The step functions with Megatron's names: each builds its plan and runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.schedules.megatron.config import PipelineConfig
from pipegrid.schedules.megatron.counts import (
    check_first_val_step,
    convert_schedule_table_to_order,
    get_pp_rank_microbatches,
    get_schedule_table,
    get_tensor_shapes,
)
from pipegrid.schedules.megatron.place import Place, place_of, step_plan
from pipegrid.schedules.megatron.units.batches import UnitBatches
from pipegrid.core.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.schedules.megatron.backward import backward_step, custom_backward, deallocate_output_tensor
    from pipegrid.schedules.megatron.forward import (
        WithLoss,
        forward_step,
        forward_step_calc_loss,
        set_current_microbatch,
    )
    from pipegrid.schedules.megatron.prepared import attached_losses, describe_steps
    from pipegrid.schedules.megatron.step_functions import (
        forward_backward_no_pipelining,
        forward_backward_pipelining_with_interleaving,
        forward_backward_pipelining_without_interleaving,
        forward_backward_with_schedule,
        get_forward_backward_func,
    )
    from pipegrid.schedules.megatron.units.routes import agree_on_routes

__all__ = [
    "PipelineConfig",
    "Place",
    "UnitBatches",
    "WithLoss",
    "agree_on_routes",
    "attached_losses",
    "backward_step",
    "check_first_val_step",
    "convert_schedule_table_to_order",
    "custom_backward",
    "deallocate_output_tensor",
    "describe_steps",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_with_schedule",
    "forward_step",
    "forward_step_calc_loss",
    "get_forward_backward_func",
    "get_pp_rank_microbatches",
    "get_schedule_table",
    "get_tensor_shapes",
    "place_of",
    "set_current_microbatch",
    "step_plan",
]

__getattr__, __dir__ = lazy_names(__name__, __all__)
