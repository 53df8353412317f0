"""The stages of a cut against the whole model, in one process: loss, gradients and buffers of one microbatch."""

from pipegrid.stages.comparison.compare import Compared, StageComparison, compare

__all__ = ["Compared", "StageComparison", "compare"]
