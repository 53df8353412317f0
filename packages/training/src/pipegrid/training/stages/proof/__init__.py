"""What crosses the boundaries of a cut, from one traced forward of the whole model."""

from pipegrid.training.stages.proof.boundaries import Boundary, CutProof
from pipegrid.training.stages.proof.proof import Proofs, prove_cut, without

__all__ = ["Boundary", "CutProof", "Proofs", "prove_cut", "without"]
