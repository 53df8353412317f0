"""Deadlines, plan positions and failures of all ranks, watched by a thread beside the step. No torch."""

from pipegrid.schedules.monitor.control import Control, ControlStore, DisagreementError, Failure, where_all_stand
from pipegrid.schedules.monitor.first_failure import first_failure
from pipegrid.schedules.monitor.monitor import FIRST_STEP_SECONDS, JobFailedError, Monitor, MonitorError, Report
from pipegrid.schedules.monitor.slow_ranks import SlowRank, UnitSeconds, measured_speeds, slow_ranks

__all__ = [
    "FIRST_STEP_SECONDS",
    "Control",
    "ControlStore",
    "DisagreementError",
    "Failure",
    "JobFailedError",
    "Monitor",
    "MonitorError",
    "Report",
    "SlowRank",
    "UnitSeconds",
    "first_failure",
    "measured_speeds",
    "slow_ranks",
    "where_all_stand",
]
