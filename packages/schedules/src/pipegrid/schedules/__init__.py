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
from pipegrid.schedules.costs import Costs, CostsError, costs_from_json, costs_to_json
from pipegrid.schedules.counts import (
    check_first_val_step,
    convert_schedule_table_to_order,
    get_pp_rank_microbatches,
    get_schedule_table,
    get_tensor_shapes,
)
from pipegrid.schedules.drawing import timeline
from pipegrid.schedules.errors import Fault, PlanError, PlanSyntaxError
from pipegrid.schedules.generators import (
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    multi_module_1f1b,
    one_f_one_b,
    v_half,
    v_min,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from pipegrid.schedules.lowering import lower
from pipegrid.schedules.perfetto import write_perfetto
from pipegrid.schedules.plan import Group, Lane, Plan, Step, actions_of, chain, compute_plan
from pipegrid.schedules.plan_csv import from_csv, to_csv
from pipegrid.schedules.plan_json import from_json, to_json
from pipegrid.schedules.plan_text import from_text, to_text
from pipegrid.schedules.recording import Aside, Recorded, Recording, Track
from pipegrid.schedules.search import greedy
from pipegrid.schedules.simulation import Simulation, simulate, unit_costs
from pipegrid.schedules.svg import write_svg
from pipegrid.schedules.timelines import Counter, Flow, Span, Timeline, TimelineError, scaled
from pipegrid.schedules.verification import Proof, verify

if TYPE_CHECKING:
    from pipegrid.schedules.forward_backward import (
        StepArgumentError,
        forward_backward_no_pipelining,
        forward_backward_pipelining_with_interleaving,
        forward_backward_pipelining_without_interleaving,
        get_forward_backward_func,
        step_plan,
    )
    from pipegrid.schedules.gradients import GradientError, clip_grad_norm_, reduce_gradients
    from pipegrid.schedules.hooks import Hook, MessageHook, ProfilerRanges
    from pipegrid.schedules.recorder import Recorder
    from pipegrid.schedules.runtime import (
        Forwarded,
        PipelineError,
        PipelineRuntime,
        PlanMismatchError,
        Stage,
        position_of,
    )
    from pipegrid.schedules.seed_stage import StageOutputError
    from pipegrid.schedules.splitting_refused import SplitBackwardError
    from pipegrid.schedules.steps import (
        LossError,
        backward_step,
        custom_backward,
        deallocate_output_tensor,
        forward_step,
        forward_step_calc_loss,
        set_current_microbatch,
    )

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Aside",
    "Costs",
    "CostsError",
    "Counter",
    "Fault",
    "Flow",
    "Forwarded",
    "GradientError",
    "Group",
    "Hook",
    "Lane",
    "LossError",
    "MessageHook",
    "PipelineConfig",
    "PipelineError",
    "PipelineRuntime",
    "Plan",
    "PlanError",
    "PlanMismatchError",
    "PlanSyntaxError",
    "ProfilerRanges",
    "Proof",
    "Recorded",
    "Recorder",
    "Recording",
    "Simulation",
    "Span",
    "SplitBackwardError",
    "Stage",
    "StageOutputError",
    "Step",
    "StepArgumentError",
    "Timeline",
    "TimelineError",
    "Track",
    "actions_of",
    "ascii_timeline",
    "backward_step",
    "chain",
    "check_first_val_step",
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
    "position_of",
    "reduce_gradients",
    "scaled",
    "set_current_microbatch",
    "simulate",
    "step_plan",
    "timeline",
    "to_csv",
    "to_json",
    "to_text",
    "unit_costs",
    "v_half",
    "v_min",
    "verify",
    "write_perfetto",
    "write_svg",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
]

_TORCH_HALF = {
    "StepArgumentError": "forward_backward",
    "forward_backward_no_pipelining": "forward_backward",
    "forward_backward_pipelining_with_interleaving": "forward_backward",
    "forward_backward_pipelining_without_interleaving": "forward_backward",
    "get_forward_backward_func": "forward_backward",
    "step_plan": "forward_backward",
    "GradientError": "gradients",
    "clip_grad_norm_": "gradients",
    "reduce_gradients": "gradients",
    "Hook": "hooks",
    "MessageHook": "hooks",
    "ProfilerRanges": "hooks",
    "Recorder": "recorder",
    "Forwarded": "runtime",
    "PipelineError": "runtime",
    "PipelineRuntime": "runtime",
    "PlanMismatchError": "runtime",
    "Stage": "runtime",
    "position_of": "runtime",
    "StageOutputError": "seed_stage",
    "SplitBackwardError": "splitting_refused",
    "LossError": "steps",
    "backward_step": "steps",
    "custom_backward": "steps",
    "deallocate_output_tensor": "steps",
    "forward_step": "steps",
    "forward_step_calc_loss": "steps",
    "set_current_microbatch": "steps",
}


def __getattr__(name: str) -> Any:
    if name not in _TORCH_HALF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_TORCH_HALF[name]}"), name)
