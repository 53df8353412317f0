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

from pipegrid.plans.errors import Fault as Fault, PlanError, PlanSyntaxError as PlanSyntaxError
from pipegrid.plans.generators import (
    SCHEDULES,
    dualpipe_v as dualpipe_v,
    find_schedule as find_schedule,
    fitting_schedules as fitting_schedules,
    forward_only as forward_only,
    gpipe as gpipe,
    interleaved_1f1b as interleaved_1f1b,
    interleaved_zero_bubble as interleaved_zero_bubble,
    looped_bfs as looped_bfs,
    multi_module_1f1b as multi_module_1f1b,
    one_f_one_b as one_f_one_b,
    routed as routed,
    schedule_for,
    seq1f1b as seq1f1b,
    seq1f1b_interleaved as seq1f1b_interleaved,
    seq1f1b_zero_bubble as seq1f1b_zero_bubble,
    stage_places,
    u_shape as u_shape,
    u_shape_counts as u_shape_counts,
    v_half as v_half,
    v_min as v_min,
    zero_bubble_h1 as zero_bubble_h1,
    zero_bubble_h2 as zero_bubble_h2,
    zero_bubble_v as zero_bubble_v,
)
from pipegrid.schedules.gradients import LossScale
from pipegrid.plans.passes.lowering import lower, with_reduce as with_reduce
from pipegrid.plans.passes.offloading import offload
from pipegrid.schedules.megatron import PipelineConfig, UnitBatches as UnitBatches, step_plan
from pipegrid.schedules.monitor import (
    JobFailedError,
    Monitor,
    SlowRank as SlowRank,
    measured_speeds as measured_speeds,
    slow_ranks as slow_ranks,
)
from pipegrid.plans.plan import (
    Action,
    ActionKind as ActionKind,
    Actor as Actor,
    Group as Group,
    Plan,
    Routes as Routes,
    chain,
    compute_plan as compute_plan,
    from_csv as from_csv,
    from_json,
    from_text,
    to_csv as to_csv,
    to_json,
    to_text,
)
from pipegrid.search import (
    compare,
    greedy,
    least_room as least_room,
    lost_rank_costs as lost_rank_costs,
    lost_rank_table as lost_rank_table,
    reroute as reroute,
    schedule_routes as schedule_routes,
    search,
)
from pipegrid.plans.simulate import (
    Costs,
    CostsError as CostsError,
    Simulation as Simulation,
    balanced_slices as balanced_slices,
    simulate,
    slice_times as slice_times,
)
from pipegrid.timeline import (
    Recorder,
    Recording as Recording,
    Timeline as Timeline,
    TimelineError as TimelineError,
    ascii_timeline as ascii_timeline,
    recording_from_json as recording_from_json,
    recording_to_json as recording_to_json,
    timeline,
    write_html as write_html,
    write_perfetto as write_perfetto,
    write_svg as write_svg,
)
from pipegrid.plans.verify import Proof as Proof, verify
from pipegrid.core.lazy import lazy_names

if TYPE_CHECKING:
    from pipegrid.schedules.gradients import (
        LossScaler,
        accumulate_in_main_grad,
        clip_grad_norm_,
        fresh_gradients as fresh_gradients,
        output_linear,
        reduce_gradients,
        tie_parameters,
        zero_main_grads,
    )
    from pipegrid.schedules.megatron import (
        WithLoss as WithLoss,
        agree_on_routes as agree_on_routes,
        forward_backward_no_pipelining,
        forward_backward_pipelining_with_interleaving,
        forward_backward_pipelining_without_interleaving,
        forward_backward_with_schedule as forward_backward_with_schedule,
        get_forward_backward_func,
    )
    from pipegrid.schedules.runtime import (
        Forwarded,
        PipelineError,
        PipelineRuntime,
        ProfilerRanges as ProfilerRanges,
        Slice as Slice,
        Stage as Stage,
        UnitTimes as UnitTimes,
        warm_up,
    )

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

_LAZY = {
    "errors": "AnnouncedShapesError DataEndedError DeferralError GradientError LossError LossScaleError MainGradError "
    "PlanFieldError PlanMismatchError ReductionError ReductionFailedError ReductionPeerError ReductionTimeoutError "
    "RuntimeArgumentError StageInputError StageOutputError StepArgumentError TyingError",
    "plan": "Lane Step actions_of",
    "generators": "UShapeCounts",
    "search": "Found Progress comparison_table",
    "simulate": "costs_from_json costs_to_json unit_costs",
    "timeline": "Aside Counter Flow Recorded Span Track scaled",
    "gradients": "LossScaler ReplicaError TiedParameters "
    "accumulate_in_main_grad clear_embedding_activation_buffer clip_grad_norm_ "
    "finish_embedding_wgrad_compute fresh_gradients output_linear reduce_gradients require_equal_replicas "
    "scale_loss tie_parameters tied_stages ties_among "
    "unscale_gradients_ zero_main_grads",
    "megatron": "WithLoss agree_on_routes backward_step check_first_val_step convert_schedule_table_to_order "
    "custom_backward deallocate_output_tensor describe_steps forward_backward_no_pipelining "
    "forward_backward_pipelining_with_interleaving forward_backward_pipelining_without_interleaving "
    "forward_backward_with_schedule forward_step forward_step_calc_loss get_forward_backward_func "
    "get_pp_rank_microbatches get_schedule_table get_tensor_shapes set_current_microbatch",
    "monitor": "DisagreementError MonitorError UnitSeconds",
    "runtime": "Forwarded Hook MessageHook PipelineError PipelineRuntime ProfilerRanges Slice Stage UnitTimes "
    "position_of warm_up",
    "autograd": "SplitBackwardError",
}

__getattr__, __dir__ = lazy_names(
    __name__, __all__, {name: folder for folder, names in _LAZY.items() for name in names.split()}
)
