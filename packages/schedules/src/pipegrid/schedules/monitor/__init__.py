"""Deadlines, plan positions and failures of all ranks, watched by a thread beside the step. No torch."""

from pipegrid.schedules.monitor.control import Control, ControlStore, DisagreementError, Failure, where_all_stand
from pipegrid.schedules.monitor.monitor import JobFailedError, Monitor, MonitorError

__all__ = [
    "Control",
    "ControlStore",
    "DisagreementError",
    "Failure",
    "JobFailedError",
    "Monitor",
    "MonitorError",
    "where_all_stand",
]
