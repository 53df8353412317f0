"""Deadlines, plan positions and failures of all ranks, watched by a thread beside the step. No torch."""

from pipegrid.schedules.errors import MonitorError
from pipegrid.schedules.monitor.control import Control, ControlStore, DisagreementError, Failure, where_all_stand
from pipegrid.schedules.monitor.epochs import Epoch, Epochs, EpochStore, FencedError, RankLostError, Verdict
from pipegrid.schedules.monitor.first_failure import first_failure
from pipegrid.schedules.monitor.monitor import FIRST_STEP_SECONDS, JobFailedError, Monitor, Report
from pipegrid.schedules.monitor.slow_ranks import SlowRank, UnitSeconds, measured_speeds, slow_ranks

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
    "MonitorError",
    "RankLostError",
    "Report",
    "SlowRank",
    "UnitSeconds",
    "Verdict",
    "first_failure",
    "measured_speeds",
    "slow_ranks",
    "where_all_stand",
]
