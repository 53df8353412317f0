"""Plans as plain data: actions, plans, and their text, CSV and JSON forms."""

from pipegrid.plans.plan.actions import (
    AT_SOURCE,
    COMPUTES,
    MESSAGE_KINDS,
    MESSAGES,
    RECEIVES,
    SENDS,
    OFFLOADING,
    SHARDING,
    Action,
    ActionKind,
    backward,
    for_microbatches,
    for_piece,
    forward,
    input_backward,
    parse_action,
    weight_backward,
)
from pipegrid.plans.plan.csv import from_csv, to_csv, to_torch
from pipegrid.plans.plan.json import from_json, load_json, to_json
from pipegrid.plans.plan.parts import (
    Group,
    Step,
    actions_of,
    as_placement,
    module_places,
    parse_edge,
    stages_on,
    step_text,
)
from pipegrid.core.graph import chain
from pipegrid.plans.plan.plan import (
    Plan,
    compute_plan,
    require_graph,
    require_placed,
    require_plan,
    require_position,
    to_text,
)
from pipegrid.plans.plan.routes import Actor, Move, Routes
from pipegrid.plans.plan.routes_check import check_routes
from pipegrid.plans.plan.routes_text import routes_from_json, routes_from_text, routes_to_json
from pipegrid.plans.plan.text import from_text
from pipegrid.core.lanes import PositionLane as Lane

__all__ = [
    "AT_SOURCE", "COMPUTES", "MESSAGES", "MESSAGE_KINDS", "OFFLOADING", "RECEIVES", "SENDS", "SHARDING", "Action",
    "ActionKind", "Actor", "Group", "Lane", "Move", "Plan", "Routes", "Step", "actions_of", "as_placement",
    "backward", "chain", "check_routes", "compute_plan", "for_microbatches", "for_piece", "forward", "from_csv",
    "from_json", "from_text", "input_backward", "load_json", "module_places", "parse_action", "parse_edge",
    "require_graph", "require_placed", "require_plan", "require_position", "routes_from_json", "routes_from_text",
    "routes_to_json", "stages_on", "step_text", "to_csv", "to_json", "to_text", "to_torch", "weight_backward",
]  # fmt: skip
