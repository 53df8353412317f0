"""Training under failures, predicted: restarts, new plans and spare nodes, and the interval between checkpoints."""

from pipegrid.goodput.outages import Failures, Outage, random_failures, read_failures
from pipegrid.goodput.goodput import Goodput, goodput, possible
from pipegrid.goodput.interval import best_interval, daly, daly_goodput, young
from pipegrid.goodput.report import goodput_json, goodput_table
from pipegrid.goodput.rerouted import rerouted_throughput
from pipegrid.goodput.simulate import CAUSES, POLICIES, Outcome, Policy, Scenario, simulate
from pipegrid.goodput.throughput import Throughput, parse_throughput, planned_throughput

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
    "rerouted_throughput",
    "simulate",
    "young",
]
