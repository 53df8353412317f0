"""Deadlines, places and failures of all ranks, watched by a thread beside the step; epochs, agreed by those that live.

No torch: a store beside the ranks is enough.
"""

from pipegrid.monitor.control import Control, ControlStore, DisagreementError, Failure, where_all_stand
from pipegrid.monitor.epochs import Epoch, Epochs, EpochStore, FencedError, RankLostError, VoteResult
from pipegrid.monitor.first_failure import first_failure
from pipegrid.monitor.monitor import FIRST_STEP_SECONDS, JobFailedError, Monitor, Report

__all__ = [
    "FIRST_STEP_SECONDS",
    "Control",
    "ControlStore",
    "DisagreementError",
    "Epoch",
    "EpochStore",
    "Epochs",
    "Failure",
    "FencedError",
    "JobFailedError",
    "Monitor",
    "RankLostError",
    "Report",
    "VoteResult",
    "first_failure",
    "where_all_stand",
]
