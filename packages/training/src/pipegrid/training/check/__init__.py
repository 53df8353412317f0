"""Stages of a cut against the whole model, in one process."""

from pipegrid.training.stages import check_stages

__all__ = ["check_stages"]
