"""The values that cross the boundaries of a cut, from one traced forward of the whole model."""

from pipegrid.stages.proof.boundaries import Boundary, CutProof
from pipegrid.stages.proof.proof import Proofs, prove_cut, without

__all__ = ["Boundary", "CutProof", "Proofs", "prove_cut", "without"]
