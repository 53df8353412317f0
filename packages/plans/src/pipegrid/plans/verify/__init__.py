"""The proof that a plan runs, and the dataflow that proof, simulation, lowering and runtime derive from a plan."""

from pipegrid.plans.plan.dataflow import Dataflow, EdgeFlow, dataflow_of, default_creation
from pipegrid.plans.verify.verify import Proof, as_limit, verify

__all__ = ["Dataflow", "EdgeFlow", "Proof", "as_limit", "dataflow_of", "default_creation", "verify"]
