"""What crosses the boundaries of a cut, from one traced forward of the whole model."""

from pipegrid.training.stages.proof.boundaries import Boundary, CutProof
from pipegrid.training.stages.proof.proof import prove_cut
from pipegrid.training.stages.proof.required import Proofs, without

__all__ = ["Boundary", "CutProof", "Proofs", "prove_cut", "without"]
