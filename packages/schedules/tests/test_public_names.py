"""The public names, the older import paths, and that planning needs no torch."""

import subprocess
import sys

import pytest

import pipegrid.schedules

PLANNING = {
    *("Action", "Costs", "JobFailedError", "LossScale", "Monitor"),
    *("PipelineConfig", "Plan", "PlanError", "Recorder", "SCHEDULES"),
    *("chain", "compare", "from_json", "from_text", "greedy", "lower", "offload", "schedule_for", "search", "simulate"),
    *("stage_places", "step_plan", "timeline", "to_json", "to_text", "verify"),
}
RUNNING = {
    *(
        "Forwarded",
        "LossScaler",
        "PipelineError",
        "PipelineRuntime",
    ),
    *("accumulate_in_main_grad", "clip_grad_norm_", "forward_backward_no_pipelining"),
    *("forward_backward_pipelining_with_interleaving", "forward_backward_pipelining_without_interleaving"),
    *("get_forward_backward_func", "output_linear", "reduce_gradients", "tie_parameters", "warm_up", "zero_main_grads"),
}
# What the seeds name, and what has been importable from the package: found in its folder on use.
FURTHER = {
    *("ActionKind", "balanced_slices", "from_csv", "seq1f1b_interleaved", "seq1f1b_zero_bubble", "slice_times"),
    *("to_csv", "with_reduce"),
    *("dualpipe_v", "forward_only", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs"),
    *("multi_module_1f1b", "one_f_one_b", "seq1f1b", "u_shape", "v_half", "v_min"),
    *("zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v", "ascii_timeline", "write_perfetto", "write_svg"),
    *("CostsError", "Group", "PlanFault", "PlanSyntaxError", "ProfilerRanges", "Proof", "Slice"),
    *("Recording", "RuntimeStage", "Simulation", "Timeline", "WithLoss"),
    *("fitting_schedules", "forward_backward_with_schedule"),
    *("find_schedule", "fresh_gradients", "u_shape_counts"),
    *("ReplicaError", "require_equal_replicas", "Aside", "Counter", "DataEndedError", "DisagreementError", "Flow"),
    *("GradientError", "Hook", "Lane", "MessageHook", "Recorded", "Span", "SplitBackwardError", "StageOutputError"),
    *("Step", "StepArgumentError", "TiedParameters", "TimelineError", "Track", "UShapeCounts", "actions_of"),
    *("backward_step", "check_first_val_step"),
    *(
        "clear_embedding_activation_buffer",
        "comparison_table",
        "compute_plan",
        "convert_schedule_table_to_order",
        "costs_from_json",
    ),
    *("costs_to_json", "custom_backward", "deallocate_output_tensor", "describe_steps"),
    "finish_embedding_wgrad_compute",
    *("forward_step", "forward_step_calc_loss", "get_pp_rank_microbatches", "get_schedule_table"),
    *("get_tensor_shapes", "position_of", "scale_loss", "scaled", "set_current_microbatch", "tied_stages"),
    *("unit_costs", "unscale_gradients_"),
    *("UnitBatches", "agree_on_routes", "ties_among", "to_torch", "torch_schedule"),
}


def test_the_public_names_are_pinned():
    assert set(pipegrid.schedules.__all__) == PLANNING | RUNNING
    assert not (PLANNING | RUNNING) & FURTHER


@pytest.mark.parametrize("name", sorted(PLANNING | RUNNING | FURTHER))
def test_a_name_is_imported_from_the_package(name):
    assert getattr(pipegrid.schedules, name) is not None


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'pipegrid.schedules' has no attribute 'gpip'"):
        _ = pipegrid.schedules.gpip


def run(program):
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stderr == ""
    return result.stdout


def test_planning_works_with_torch_blocked():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pipegrid.schedules import *\n"
        "from pipegrid.schedules import one_f_one_b, with_reduce\n"
        "plan = with_reduce(lower(one_f_one_b(2, 3)), {'word': (0, 1)})\n"
        "print(verify(from_json(to_json(plan))).num_messages)\n"
        "import pipegrid.schedules\n"
        "print(*sorted(pipegrid.schedules.__all__))\n"
    )
    messages, names = run(program).splitlines()
    assert messages == "6"
    assert set(names.split()) == PLANNING


def test_planning_imports_neither_torch_nor_what_only_files_need():
    program = (
        "import sys\n"
        "from pipegrid.schedules import lower, one_f_one_b, verify\n"
        "verify(lower(one_f_one_b(2, 3)))\n"
        "print([name for name in ('torch', 'numpy', 'cattrs', 'rich', 'matplotlib') if name in sys.modules])\n"
    )
    assert run(program) == "[]\n"
