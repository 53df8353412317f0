"""Plan, verify, simulate, draw and run pipeline schedules.

A schedule is a pure function from a shape to a `Plan`: per position, its actions in order. `lower` adds the
communication, `verify` proves that the result can be run, `simulate` says what it takes at your costs, `greedy`
finds the best plan under a memory cap, and a `timeline` of any of it can be drawn. All of this is plain Python,
without torch. `PipelineRuntime` and the step functions run a verified plan; they load torch on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipegrid.schedules import generators
from pipegrid.schedules.errors import (
    DataEndedError,
    Fault,
    LossError,
    PlanError,
    PlanFieldError,
    PlanMismatchError,
    PlanSyntaxError,
    ReductionError,
    RuntimeArgumentError,
    StageInputError,
    StageOutputError,
    StepArgumentError,
)
from pipegrid.schedules.generators import (
    UShapeCounts,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    multi_module_1f1b,
    one_f_one_b,
    u_shape,
    u_shape_counts,
    v_half,
    v_min,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from pipegrid.schedules.generators.registry import SCHEDULES, find_schedule
from pipegrid.schedules.gradients.loss_scale import LossScale, LossScaleError
from pipegrid.schedules.gradients.tying import TyingError, with_reduce
from pipegrid.schedules.lowering import lower
from pipegrid.schedules.megatron.config import PipelineConfig
from pipegrid.schedules.megatron.counts import (
    check_first_val_step,
    convert_schedule_table_to_order,
    get_pp_rank_microbatches,
    get_schedule_table,
    get_tensor_shapes,
)
from pipegrid.schedules.megatron.place import step_plan
from pipegrid.schedules.monitor import DisagreementError, JobFailedError, Monitor, MonitorError
from pipegrid.schedules.plan import from_csv, from_text, to_csv, to_text
from pipegrid.schedules.plan.actions import Action, ActionKind
from pipegrid.schedules.plan.json import from_json, to_json
from pipegrid.schedules.plan.plan import Group, Lane, Plan, Step, actions_of, chain, compute_plan
from pipegrid.schedules.search.compare import compare, comparison_table
from pipegrid.schedules.search.greedy import greedy
from pipegrid.schedules.simulate.costs import Costs, CostsError, costs_from_json, costs_to_json
from pipegrid.schedules.simulate.simulation import Simulation, simulate, unit_costs
from pipegrid.schedules.timeline.ascii import ascii_timeline
from pipegrid.schedules.timeline.perfetto import write_perfetto
from pipegrid.schedules.timeline.recorder import Recorder
from pipegrid.schedules.timeline.recording import Aside, Recorded, Recording, Track
from pipegrid.schedules.timeline.sources import timeline
from pipegrid.schedules.timeline.svg import write_svg
from pipegrid.schedules.timeline.timeline import Counter, Flow, Span, Timeline, TimelineError, scaled
from pipegrid.schedules.verify.verify import Proof, verify

if TYPE_CHECKING:
    from pipegrid.schedules.autograd import SplitBackwardError
    from pipegrid.schedules.gradients.clip import clip_grad_norm_
    from pipegrid.schedules.gradients.loss_scaler import LossScaler, scale_loss, unscale_gradients_
    from pipegrid.schedules.gradients.main_grad import MainGradError, accumulate_in_main_grad, zero_main_grads
    from pipegrid.schedules.gradients.output_layer import (
        DeferralError,
        clear_embedding_activation_buffer,
        finish_embedding_wgrad_compute,
        output_linear,
    )
    from pipegrid.schedules.gradients.reduce import GradientError, reduce_gradients
    from pipegrid.schedules.gradients.tied import TiedParameters, tie_parameters, tied_stages
    from pipegrid.schedules.megatron.backward import backward_step, custom_backward, deallocate_output_tensor
    from pipegrid.schedules.megatron.forward import (
        forward_step,
        forward_step_calc_loss,
        set_current_microbatch,
    )
    from pipegrid.schedules.megatron.shapes import AnnouncedShapesError
    from pipegrid.schedules.megatron.step_functions import (
        forward_backward_no_pipelining,
        forward_backward_pipelining_with_interleaving,
        forward_backward_pipelining_without_interleaving,
        get_forward_backward_func,
    )
    from pipegrid.schedules.runtime import (
        Forwarded,
        Hook,
        MessageHook,
        PipelineError,
        PipelineRuntime,
        ProfilerRanges,
        Stage,
        position_of,
    )

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
    "find_schedule",
    "finish_embedding_wgrad_compute",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "forward_only",
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
    "greedy",
    "interleaved_1f1b",
    "looped_bfs",
    "lower",
    "multi_module_1f1b",
    "one_f_one_b",
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
    "unit_costs",
    "unscale_gradients_",
    "v_half",
    "v_min",
    "verify",
    "with_reduce",
    "write_perfetto",
    "write_svg",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
    "zero_main_grads",
]

_TORCH_HALF = {
    "forward_backward_no_pipelining": "megatron.step_functions",
    "forward_backward_pipelining_with_interleaving": "megatron.step_functions",
    "forward_backward_pipelining_without_interleaving": "megatron.step_functions",
    "get_forward_backward_func": "megatron.step_functions",
    "GradientError": "gradients.reduce",
    "clip_grad_norm_": "gradients.clip",
    "reduce_gradients": "gradients.reduce",
    "Hook": "runtime",
    "MessageHook": "runtime",
    "ProfilerRanges": "runtime",
    "Forwarded": "runtime",
    "PipelineError": "runtime",
    "PipelineRuntime": "runtime",
    "Stage": "runtime",
    "position_of": "runtime",
    "AnnouncedShapesError": "megatron.shapes",
    "LossScaler": "gradients.loss_scaler",
    "scale_loss": "gradients.loss_scaler",
    "unscale_gradients_": "gradients.loss_scaler",
    "MainGradError": "gradients.main_grad",
    "accumulate_in_main_grad": "gradients.main_grad",
    "zero_main_grads": "gradients.main_grad",
    "DeferralError": "gradients.output_layer",
    "clear_embedding_activation_buffer": "gradients.output_layer",
    "finish_embedding_wgrad_compute": "gradients.output_layer",
    "output_linear": "gradients.output_layer",
    "TiedParameters": "gradients.tied",
    "tie_parameters": "gradients.tied",
    "tied_stages": "gradients.tied",
    "SplitBackwardError": "autograd",
    "backward_step": "megatron.backward",
    "custom_backward": "megatron.backward",
    "deallocate_output_tensor": "megatron.backward",
    "forward_step": "megatron.forward",
    "forward_step_calc_loss": "megatron.forward",
    "set_current_microbatch": "megatron.forward",
}


def __getattr__(name: str) -> Any:
    if name.endswith("_order"):
        return getattr(generators, name)
    if name not in _TORCH_HALF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_TORCH_HALF[name]}"), name)
