"""Plan, verify, simulate, draw and run pipeline schedules.

A schedule is a pure function from a shape to a `Plan`: per position, its actions in order. `lower` adds the
communication, `verify` proves that the result can be run, `simulate` says what it takes at your costs, `greedy`
finds the best plan under a memory cap, and a `timeline` of any of it can be drawn. All of this is plain Python,
without torch. `PipelineRuntime` and the step functions run a verified plan; they load torch on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipegrid.schedules.actions import Action, ActionKind
from pipegrid.schedules.ascii import ascii_timeline
from pipegrid.schedules.catalogue import SCHEDULES, find_schedule
from pipegrid.schedules.comparison import compare, comparison_table
from pipegrid.schedules.config import PipelineConfig
from pipegrid.schedules.control import DisagreementError
from pipegrid.schedules.costs import Costs, CostsError, costs_from_json, costs_to_json
from pipegrid.schedules.counts import (
    check_first_val_step,
    convert_schedule_table_to_order,
    get_pp_rank_microbatches,
    get_schedule_table,
    get_tensor_shapes,
)
from pipegrid.schedules.drawing import timeline
from pipegrid.schedules.errors import (
    DataEndedError,
    Fault,
    PlanError,
    PlanFieldError,
    PlanMismatchError,
    PlanSyntaxError,
    RuntimeArgumentError,
    StageInputError,
    StageOutputError,
    StepArgumentError,
)
from pipegrid.schedules.generators import (
    UShapeCounts,
    dualpipe_v,
    dualpipe_v_order,
    forward_only,
    forward_only_order,
    gpipe,
    gpipe_order,
    interleaved_1f1b,
    interleaved_1f1b_order,
    looped_bfs,
    looped_bfs_order,
    multi_module_1f1b,
    multi_module_1f1b_order,
    one_f_one_b,
    one_f_one_b_order,
    u_shape,
    u_shape_counts,
    u_shape_order,
    v_half,
    v_half_order,
    v_min,
    v_min_order,
    zero_bubble_h1,
    zero_bubble_h1_order,
    zero_bubble_h2,
    zero_bubble_h2_order,
    zero_bubble_v,
    zero_bubble_v_order,
)
from pipegrid.schedules.loss_scale import LossScale, LossScaleError
from pipegrid.schedules.lowering import lower
from pipegrid.schedules.perfetto import write_perfetto
from pipegrid.schedules.placing import step_plan
from pipegrid.schedules.plan import Group, Lane, Plan, Step, actions_of, chain, compute_plan
from pipegrid.schedules.plan_csv import from_csv, to_csv
from pipegrid.schedules.plan_json import from_json, to_json
from pipegrid.schedules.plan_text import from_text, to_text
from pipegrid.schedules.recording import Aside, Recorded, Recording, Track
from pipegrid.schedules.search import greedy
from pipegrid.schedules.simulation import Simulation, simulate, unit_costs
from pipegrid.schedules.svg import write_svg
from pipegrid.schedules.timelines import Counter, Flow, Span, Timeline, TimelineError, scaled
from pipegrid.schedules.tying import TyingError, with_reduce
from pipegrid.schedules.verification import Proof, verify

if TYPE_CHECKING:
    from pipegrid.schedules.backward_steps import backward_step, custom_backward, deallocate_output_tensor
    from pipegrid.schedules.forward_backward import (
        forward_backward_no_pipelining,
        forward_backward_pipelining_with_interleaving,
        forward_backward_pipelining_without_interleaving,
        get_forward_backward_func,
    )
    from pipegrid.schedules.gradients import GradientError, clip_grad_norm_, reduce_gradients
    from pipegrid.schedules.hooks import Hook, MessageHook, ProfilerRanges
    from pipegrid.schedules.loss_scaler import LossScaler, scale_loss, unscale_gradients_
    from pipegrid.schedules.main_grad import MainGradError, accumulate_in_main_grad, zero_main_grads
    from pipegrid.schedules.monitor import JobFailedError, Monitor, MonitorError
    from pipegrid.schedules.output_layer import (
        DeferralError,
        clear_embedding_activation_buffer,
        finish_embedding_wgrad_compute,
        output_linear,
    )
    from pipegrid.schedules.recorder import Recorder
    from pipegrid.schedules.reduction import ReductionError
    from pipegrid.schedules.runtime import (
        Forwarded,
        PipelineError,
        PipelineRuntime,
        Stage,
        position_of,
    )
    from pipegrid.schedules.seed_shapes import AnnouncedShapesError
    from pipegrid.schedules.splitting_refused import SplitBackwardError
    from pipegrid.schedules.steps import (
        LossError,
        forward_step,
        forward_step_calc_loss,
        set_current_microbatch,
    )
    from pipegrid.schedules.tied_parameters import TiedParameters, tie_parameters, tied_stages

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "AnnouncedShapesError",
    "Aside",
    "Costs",
    "CostsError",
    "Counter",
    "DataEndedError",
    "DeferralError",
    "DisagreementError",
    "Fault",
    "Flow",
    "Forwarded",
    "GradientError",
    "Group",
    "Hook",
    "JobFailedError",
    "Lane",
    "LossError",
    "LossScale",
    "LossScaleError",
    "LossScaler",
    "MainGradError",
    "MessageHook",
    "Monitor",
    "MonitorError",
    "PipelineConfig",
    "PipelineError",
    "PipelineRuntime",
    "Plan",
    "PlanError",
    "PlanFieldError",
    "PlanMismatchError",
    "PlanSyntaxError",
    "ProfilerRanges",
    "Proof",
    "Recorded",
    "Recorder",
    "Recording",
    "ReductionError",
    "RuntimeArgumentError",
    "Simulation",
    "Span",
    "SplitBackwardError",
    "Stage",
    "StageInputError",
    "StageOutputError",
    "Step",
    "StepArgumentError",
    "TiedParameters",
    "Timeline",
    "TimelineError",
    "Track",
    "TyingError",
    "UShapeCounts",
    "accumulate_in_main_grad",
    "actions_of",
    "ascii_timeline",
    "backward_step",
    "chain",
    "check_first_val_step",
    "clear_embedding_activation_buffer",
    "clip_grad_norm_",
    "compare",
    "comparison_table",
    "compute_plan",
    "convert_schedule_table_to_order",
    "costs_from_json",
    "costs_to_json",
    "custom_backward",
    "deallocate_output_tensor",
    "dualpipe_v",
    "dualpipe_v_order",
    "find_schedule",
    "finish_embedding_wgrad_compute",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "forward_only",
    "forward_only_order",
    "forward_step",
    "forward_step_calc_loss",
    "from_csv",
    "from_json",
    "from_text",
    "get_forward_backward_func",
    "get_pp_rank_microbatches",
    "get_schedule_table",
    "get_tensor_shapes",
    "gpipe",
    "gpipe_order",
    "greedy",
    "interleaved_1f1b",
    "interleaved_1f1b_order",
    "looped_bfs",
    "looped_bfs_order",
    "lower",
    "multi_module_1f1b",
    "multi_module_1f1b_order",
    "one_f_one_b",
    "one_f_one_b_order",
    "output_linear",
    "position_of",
    "reduce_gradients",
    "scale_loss",
    "scaled",
    "set_current_microbatch",
    "simulate",
    "step_plan",
    "tie_parameters",
    "tied_stages",
    "timeline",
    "to_csv",
    "to_json",
    "to_text",
    "u_shape",
    "u_shape_counts",
    "u_shape_order",
    "unit_costs",
    "unscale_gradients_",
    "v_half",
    "v_half_order",
    "v_min",
    "v_min_order",
    "verify",
    "with_reduce",
    "write_perfetto",
    "write_svg",
    "zero_bubble_h1",
    "zero_bubble_h1_order",
    "zero_bubble_h2",
    "zero_bubble_h2_order",
    "zero_bubble_v",
    "zero_bubble_v_order",
    "zero_main_grads",
]

_TORCH_HALF = {
    "forward_backward_no_pipelining": "forward_backward",
    "forward_backward_pipelining_with_interleaving": "forward_backward",
    "forward_backward_pipelining_without_interleaving": "forward_backward",
    "get_forward_backward_func": "forward_backward",
    "GradientError": "gradients",
    "clip_grad_norm_": "gradients",
    "reduce_gradients": "gradients",
    "JobFailedError": "monitor",
    "Monitor": "monitor",
    "MonitorError": "monitor",
    "Hook": "hooks",
    "MessageHook": "hooks",
    "ProfilerRanges": "hooks",
    "Recorder": "recorder",
    "Forwarded": "runtime",
    "PipelineError": "runtime",
    "PipelineRuntime": "runtime",
    "Stage": "runtime",
    "position_of": "runtime",
    "AnnouncedShapesError": "seed_shapes",
    "LossScaler": "loss_scaler",
    "scale_loss": "loss_scaler",
    "unscale_gradients_": "loss_scaler",
    "MainGradError": "main_grad",
    "accumulate_in_main_grad": "main_grad",
    "zero_main_grads": "main_grad",
    "DeferralError": "output_layer",
    "clear_embedding_activation_buffer": "output_layer",
    "finish_embedding_wgrad_compute": "output_layer",
    "output_linear": "output_layer",
    "ReductionError": "reduction",
    "TiedParameters": "tied_parameters",
    "tie_parameters": "tied_parameters",
    "tied_stages": "tied_parameters",
    "SplitBackwardError": "splitting_refused",
    "LossError": "steps",
    "backward_step": "backward_steps",
    "custom_backward": "backward_steps",
    "deallocate_output_tensor": "backward_steps",
    "forward_step": "steps",
    "forward_step_calc_loss": "steps",
    "set_current_microbatch": "steps",
}


def __getattr__(name: str) -> Any:
    if name not in _TORCH_HALF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_TORCH_HALF[name]}"), name)
