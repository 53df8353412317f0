"""The public names, and that planning needs no torch."""

import subprocess
import sys

import pipegrid.schedules

PLANNING = {
    "Action",
    "ActionKind",
    "Fault",
    "Group",
    "Lane",
    "Plan",
    "PlanError",
    "PlanFieldError",
    "PlanSyntaxError",
    "Proof",
    "Step",
    "TyingError",
    "actions_of",
    "chain",
    "compute_plan",
    "dualpipe_v",
    "forward_only",
    "from_csv",
    "from_json",
    "from_text",
    "gpipe",
    "interleaved_1f1b",
    "looped_bfs",
    "lower",
    "multi_module_1f1b",
    "one_f_one_b",
    "to_csv",
    "to_json",
    "to_text",
    "u_shape",
    "v_half",
    "v_min",
    "verify",
    "with_reduce",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
}

RUNNING = {
    "AnnouncedShapesError",
    "DataEndedError",
    "DeferralError",
    "Forwarded",
    "GradientError",
    "Hook",
    "LossError",
    "LossScale",
    "LossScaleError",
    "LossScaler",
    "MainGradError",
    "MessageHook",
    "PipelineConfig",
    "PipelineError",
    "PipelineRuntime",
    "PlanMismatchError",
    "Recorder",
    "ReductionError",
    "RuntimeArgumentError",
    "Stage",
    "StageInputError",
    "StageOutputError",
    "StepArgumentError",
    "TiedParameters",
    "accumulate_in_main_grad",
    "backward_step",
    "check_first_val_step",
    "clear_embedding_activation_buffer",
    "clip_grad_norm_",
    "convert_schedule_table_to_order",
    "custom_backward",
    "deallocate_output_tensor",
    "finish_embedding_wgrad_compute",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_step",
    "forward_step_calc_loss",
    "get_forward_backward_func",
    "get_pp_rank_microbatches",
    "get_schedule_table",
    "get_tensor_shapes",
    "output_linear",
    "position_of",
    "reduce_gradients",
    "scale_loss",
    "set_current_microbatch",
    "step_plan",
    "tie_parameters",
    "tied_stages",
    "unscale_gradients_",
    "zero_main_grads",
}


def test_the_public_names_are_pinned():
    assert set(pipegrid.schedules.__all__) >= PLANNING | RUNNING
    for name in pipegrid.schedules.__all__:
        assert getattr(pipegrid.schedules, name) is not None


def test_planning_works_with_torch_blocked():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pipegrid.schedules import lower, one_f_one_b, verify\n"
        "from pipegrid.schedules import LossScale, with_reduce\n"
        "plan = with_reduce(lower(one_f_one_b(2, 3)), {'word': (0, 1)})\n"
        "print(verify(plan).num_messages)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("6\n", "")
