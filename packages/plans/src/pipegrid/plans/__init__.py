"""Say, read, lower, prove and time pipeline schedules, as plain data and without torch.

A schedule is a pure function from a shape to a `Plan`: per position, its actions in order. `lower` adds the
communication, `verify` proves that the result can be run, `simulate` gives its times at measured costs. The same proofs
hold for programs of others: `prove_order` takes the orders of any launches.

Rarer names are in the folders: `pipegrid.plans.generators`, `plan`, `passes`, `orders`, `verify`, `simulate`.
"""

from pipegrid.plans.errors import PlanError, PlanFault, PlanSyntaxError
from pipegrid.plans.generators import (
    SCHEDULES,
    UShapeCounts,
    dualpipe_v,
    find_schedule,
    fitting_schedules,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    multi_module_1f1b,
    one_f_one_b,
    routed,
    schedule_for,
    seq1f1b,
    seq1f1b_interleaved,
    seq1f1b_zero_bubble,
    stage_places,
    u_shape,
    u_shape_counts,
    v_half,
    v_min,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from pipegrid.plans.passes.lowering import lower, with_reduce
from pipegrid.plans.passes.offloading import offload
from pipegrid.plans.passes.skipping import with_skips
from pipegrid.plans.plan import (
    Action,
    ActionKind,
    Actor,
    Group,
    Lane,
    Plan,
    Routes,
    Step,
    actions_of,
    chain,
    compute_plan,
    from_csv,
    from_json,
    from_text,
    to_csv,
    to_json,
    to_text,
    to_torch,
)
from pipegrid.plans.simulate import Costs, CostsError, Simulation, costs_from_json, costs_to_json, simulate, unit_costs
from pipegrid.plans.orders import (
    Orders,
    fewest_communicators,
    orders_from_csv,
    orders_from_json,
    orders_of_plan,
    prove_order,
)
from pipegrid.plans.verify import Proof, verify
from pipegrid.core.edge import Direction, Edge
from pipegrid.core.graph import ModuleGraph

__all__ = [
    "SCHEDULES", "Action", "ActionKind", "Actor", "Costs", "CostsError", "Direction", "Edge", "Group",
    "Lane", "ModuleGraph", "Orders", "Plan", "PlanError", "PlanFault", "PlanSyntaxError", "Proof", "Routes",
    "Simulation", "Step", "UShapeCounts", "actions_of", "chain", "compute_plan", "costs_from_json", "costs_to_json",
    "dualpipe_v", "fewest_communicators", "find_schedule", "fitting_schedules", "forward_only", "from_csv",
    "from_json", "from_text", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs", "lower",
    "multi_module_1f1b", "offload", "one_f_one_b", "orders_from_csv", "orders_from_json", "orders_of_plan",
    "prove_order", "routed", "schedule_for", "seq1f1b", "seq1f1b_interleaved", "seq1f1b_zero_bubble",
    "simulate", "stage_places", "to_csv", "to_json", "to_text", "to_torch", "u_shape", "u_shape_counts",
    "unit_costs", "v_half", "v_min", "verify", "with_reduce", "with_skips", "zero_bubble_h1", "zero_bubble_h2",
    "zero_bubble_v",
]  # fmt: skip
