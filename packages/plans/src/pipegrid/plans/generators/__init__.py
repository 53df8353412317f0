"""The named schedules: pure functions from a shape to a plan of computes, each with its source."""

from pipegrid.plans.generators.controllable_memory import v_half, v_min
from pipegrid.plans.generators.looped import forward_only, interleaved_1f1b, interleaved_zero_bubble, looped_bfs
from pipegrid.plans.generators.module_graphs import (
    ANY_GRAPH,
    fitting_schedules,
    frozen_stages,
    multi_module_1f1b,
    schedule_for,
    stage_places,
)
from pipegrid.plans.generators.one_stage import gpipe, one_f_one_b, zero_bubble_h1, zero_bubble_h2
from pipegrid.plans.generators.registry import SCHEDULES, Schedule, find_schedule, require_slices
from pipegrid.plans.generators.routed import routed
from pipegrid.plans.generators.sliced import seq1f1b, seq1f1b_interleaved, seq1f1b_zero_bubble
from pipegrid.plans.generators.shapes import looped_placement, v_placement
from pipegrid.plans.generators.u_shaped import UShapeCounts, u_shape, u_shape_counts
from pipegrid.plans.generators.v_shaped import dualpipe_v, zero_bubble_v

__all__ = [
    "ANY_GRAPH", "SCHEDULES", "Schedule", "UShapeCounts", "dualpipe_v", "find_schedule", "fitting_schedules",
    "forward_only", "frozen_stages", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs",
    "looped_placement", "multi_module_1f1b", "one_f_one_b", "require_slices", "routed", "schedule_for",
    "seq1f1b", "seq1f1b_interleaved", "seq1f1b_zero_bubble", "stage_places", "u_shape", "u_shape_counts",
    "v_half", "v_min", "v_placement", "zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v",
]  # fmt: skip
