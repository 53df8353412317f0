"""Plan, verify, simulate, draw and run pipeline schedules.

A schedule is a pure function from a shape to a `Plan`: per position, its actions in order. `lower` adds the
communication, `verify` proves that the result can be run, `simulate` gives its times at measured costs, `greedy`
finds the best plan under a memory cap, and `timeline` makes a picture of any of them. All of this is plain Python,
without torch. `PipelineRuntime` and the step functions run a verified plan; they load torch on first use.

Names outside ``__all__`` (schedules, helpers of the step functions, drawings, rarer errors) live in the folders, the
schedules in ``pipegrid.plans.generators``, and are imported from here as well. Where torch is not installed,
``__all__`` holds the planning names only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.plans import *
from pipegrid.search import *
from pipegrid.timeline import *
from pipegrid.gradients import LossScale
from pipegrid.schedules.megatron import PipelineConfig, UnitBatches as UnitBatches, step_plan
from pipegrid.monitor import DisagreementError as DisagreementError, JobFailedError, Monitor
from pipegrid.schedules.speeds import (
    SlowRank as SlowRank,
    UnitSeconds as UnitSeconds,
    measured_speeds as measured_speeds,
    slow_ranks as slow_ranks,
)
from pipegrid.core.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.autograd import SplitBackwardError as SplitBackwardError
    from pipegrid.gradients import (
        LossScaler,
        ReplicaError as ReplicaError,
        TiedParameters as TiedParameters,
        accumulate_in_main_grad,
        clear_embedding_activation_buffer as clear_embedding_activation_buffer,
        clip_grad_norm_,
        finish_embedding_wgrad_compute as finish_embedding_wgrad_compute,
        fresh_gradients as fresh_gradients,
        output_linear,
        reduce_gradients,
        require_equal_replicas as require_equal_replicas,
        scale_loss as scale_loss,
        tie_parameters,
        tied_stages as tied_stages,
        ties_among as ties_among,
        unscale_gradients_ as unscale_gradients_,
        zero_main_grads,
    )
    from pipegrid.schedules.errors import (
        DataEndedError as DataEndedError,
        GradientError as GradientError,
        StageOutputError as StageOutputError,
        StepArgumentError as StepArgumentError,
    )
    from pipegrid.schedules.megatron import (
        WithLoss as WithLoss,
        agree_on_routes as agree_on_routes,
        backward_step as backward_step,
        check_first_val_step as check_first_val_step,
        convert_schedule_table_to_order as convert_schedule_table_to_order,
        custom_backward as custom_backward,
        deallocate_output_tensor as deallocate_output_tensor,
        describe_steps as describe_steps,
        forward_backward_no_pipelining,
        forward_backward_pipelining_with_interleaving,
        forward_backward_pipelining_without_interleaving,
        forward_backward_with_schedule as forward_backward_with_schedule,
        forward_step as forward_step,
        forward_step_calc_loss as forward_step_calc_loss,
        get_forward_backward_func,
        get_pp_rank_microbatches as get_pp_rank_microbatches,
        get_schedule_table as get_schedule_table,
        get_tensor_shapes as get_tensor_shapes,
        set_current_microbatch as set_current_microbatch,
    )
    from pipegrid.schedules.runtime import (
        Forwarded,
        Hook as Hook,
        MessageHook as MessageHook,
        PipelineError,
        PipelineRuntime,
        ProfilerRanges as ProfilerRanges,
        Slice as Slice,
        RuntimeStage as RuntimeStage,
        TakeTurns as TakeTurns,
        UnitTimes as UnitTimes,
        exchange_tokens as exchange_tokens,
        hand_over as hand_over,
        position_of as position_of,
        warm_up,
    )
    from pipegrid.schedules.torch_runtime import torch_schedule as torch_schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Forwarded",
    "JobFailedError",
    "LossScale",
    "LossScaler",
    "Monitor",
    "PipelineConfig",
    "PipelineError",
    "PipelineRuntime",
    "Plan",
    "PlanError",
    "Recorder",
    "accumulate_in_main_grad",
    "chain",
    "clip_grad_norm_",
    "compare",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "from_json",
    "from_text",
    "get_forward_backward_func",
    "greedy",
    "lower",
    "offload",
    "output_linear",
    "reduce_gradients",
    "schedule_for",
    "search",
    "simulate",
    "stage_places",
    "step_plan",
    "tie_parameters",
    "timeline",
    "to_json",
    "to_text",
    "verify",
    "warm_up",
    "zero_main_grads",
]

__getattr__, __dir__ = lazy_names(__name__, __all__)
