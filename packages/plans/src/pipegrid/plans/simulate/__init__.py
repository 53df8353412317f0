"""The times and memory of a plan at given costs: start and end of each action, idle time, live memory."""

from pipegrid.plans.simulate.costs import (
    activation_sizes,
    Costs,
    CostsError,
    GivenCosts,
    OtherCutError,
    costs_from_json,
    costs_to_json,
    with_slack,
)
from pipegrid.plans.simulate.simulation import Simulation, simulate, unit_costs

__all__ = [
    "Costs",
    "CostsError",
    "GivenCosts",
    "OtherCutError",
    "Simulation",
    "activation_sizes",
    "costs_from_json",
    "costs_to_json",
    "simulate",
    "unit_costs",
    "with_slack",
]
