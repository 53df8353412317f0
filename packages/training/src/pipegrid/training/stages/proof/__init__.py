"""What crosses the boundaries of a cut, from one traced forward of the whole model."""

from pipegrid.training.stages.proof.proof import Boundary, CutProof, called_with, prove_cut
from pipegrid.training.stages.proof.required import PIXELS, Proofs, without

__all__ = ["PIXELS", "Boundary", "CutProof", "Proofs", "called_with", "prove_cut", "without"]
