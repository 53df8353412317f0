"""Training under failures, predicted: restarts, new plans and spare nodes, and the interval between checkpoints."""

from pipegrid.planner.goodput.failures import Failures, Outage, random_failures, read_failures
from pipegrid.planner.goodput.goodput import Goodput, goodput, possible
from pipegrid.planner.goodput.interval import best_interval, daly, daly_goodput, young
from pipegrid.planner.goodput.report import goodput_json, goodput_table
from pipegrid.planner.goodput.simulate import CAUSES, POLICIES, Outcome, Policy, Scenario, simulate
from pipegrid.planner.goodput.throughput import Throughput, parse_throughput, planned_throughput

__all__ = [
    "CAUSES",
    "POLICIES",
    "Failures",
    "Goodput",
    "Outage",
    "Outcome",
    "Policy",
    "Scenario",
    "Throughput",
    "best_interval",
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
    "simulate",
    "young",
]
