"""The named schedules: pure functions from a shape to a plan of computes, each with its source.

``NAME_order`` gives what one position does without building the others; `v_half` and `v_min` follow them all the same,
since a position puts its ``W`` where it waits for others.
"""

from __future__ import annotations

from pipegrid.schedules.generators.controllable_memory import (
    v_half,
    v_half_order,
    v_min,
    v_min_order,
)
from pipegrid.schedules.generators.looped import (
    forward_only,
    forward_only_order,
    interleaved_1f1b,
    interleaved_1f1b_order,
    looped_bfs,
    looped_bfs_order,
)
from pipegrid.schedules.generators.multi_module import (
    multi_module_1f1b,
    multi_module_1f1b_order,
)
from pipegrid.schedules.generators.one_stage import (
    gpipe,
    gpipe_order,
    one_f_one_b,
    one_f_one_b_order,
)
from pipegrid.schedules.generators.u_shaped import (
    UShapeCounts,
    u_shape,
    u_shape_counts,
    u_shape_order,
)
from pipegrid.schedules.generators.v_shaped import (
    dualpipe_v,
    dualpipe_v_order,
    zero_bubble_v,
    zero_bubble_v_order,
)
from pipegrid.schedules.generators.zero_bubble import (
    zero_bubble_h1,
    zero_bubble_h1_order,
    zero_bubble_h2,
    zero_bubble_h2_order,
)

__all__ = [
    "UShapeCounts",
    "dualpipe_v",
    "dualpipe_v_order",
    "forward_only",
    "forward_only_order",
    "gpipe",
    "gpipe_order",
    "interleaved_1f1b",
    "interleaved_1f1b_order",
    "looped_bfs",
    "looped_bfs_order",
    "multi_module_1f1b",
    "multi_module_1f1b_order",
    "one_f_one_b",
    "one_f_one_b_order",
    "u_shape",
    "u_shape_counts",
    "u_shape_order",
    "v_half",
    "v_half_order",
    "v_min",
    "v_min_order",
    "zero_bubble_h1",
    "zero_bubble_h1_order",
    "zero_bubble_h2",
    "zero_bubble_h2_order",
    "zero_bubble_v",
    "zero_bubble_v_order",
]
