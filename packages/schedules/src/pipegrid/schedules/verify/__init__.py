"""The proof that a plan runs: every action once, dependencies met, lanes in order, no deadlock."""

from pipegrid.schedules.verify.creation import check_creation
from pipegrid.schedules.verify.position import own_faults
from pipegrid.schedules.verify.verify import Proof, as_limit, verify

__all__ = ["Proof", "as_limit", "check_creation", "own_faults", "verify"]
