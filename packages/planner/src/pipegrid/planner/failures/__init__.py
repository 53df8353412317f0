"""Training under failures, predicted: restarts, new plans and spare nodes, and the interval between checkpoints."""

from pipegrid.planner.failures.outages import Failures, Outage, random_failures, read_failures
from pipegrid.planner.failures.goodput import Goodput, goodput, possible
from pipegrid.planner.failures.interval import best_interval, daly, daly_goodput, young
from pipegrid.planner.failures.report import goodput_json, goodput_table
from pipegrid.planner.failures.rerouted import rerouted_throughput
from pipegrid.planner.failures.simulate import CAUSES, POLICIES, Outcome, Policy, Scenario, simulate
from pipegrid.planner.failures.survivable import (
    Counts,
    Piece,
    Survival,
    count_survivable,
    survivable,
    survivable_table,
)
from pipegrid.planner.failures.throughput import Throughput, parse_throughput, planned_throughput

__all__ = [
    "CAUSES",
    "POLICIES",
    "Counts",
    "Failures",
    "Goodput",
    "Outage",
    "Outcome",
    "Piece",
    "Policy",
    "Scenario",
    "Survival",
    "Throughput",
    "best_interval",
    "count_survivable",
    "daly",
    "daly_goodput",
    "goodput",
    "goodput_json",
    "goodput_table",
    "parse_throughput",
    "planned_throughput",
    "possible",
    "random_failures",
    "read_failures",
    "rerouted_throughput",
    "simulate",
    "survivable",
    "survivable_table",
    "young",
]
