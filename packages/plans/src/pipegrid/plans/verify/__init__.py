"""The proof that a plan runs, and the dataflow that proof, simulation, lowering and runtime derive from a plan."""

from pipegrid.plans.verify.creation import check_creation, default_creation
from pipegrid.plans.plan.dataflow import Dataflow, EdgeFlow, dataflow_of
from pipegrid.plans.verify.verify import Proof, as_limit, verify

__all__ = ["Dataflow", "EdgeFlow", "Proof", "as_limit", "check_creation", "dataflow_of", "default_creation", "verify"]
